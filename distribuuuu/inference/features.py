"""Features of images: the input of the layer that makes the logits of a trained model."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distribuuuu.checkpoint.host_copy import copy_to_host
from distribuuuu.config import ConfigError
from distribuuuu.distributed.sharding import inference
from distribuuuu.inference.forward_chunks import ChunkLoader, one_behind
from distribuuuu.inference.loaded_run import LoadedRun
from distribuuuu.models.head import find_head
from distribuuuu.tasks.metrics import rank_classes

# Images of a forward pass.
CHUNK = 64


def has_classifier(run: LoadedRun) -> bool:
    """Tell whether a run has answers to be compared with labels."""
    return run.has_classifier and run.task.has_scores and run.task.classifies


def feature_model(run: LoadedRun) -> nn.Module:
    """Return the part of the model whose features are used: that named `backbone` of a model without answers."""
    return run.model if run.task.has_scores else getattr(run.model, "backbone", run.model)


def call_layers(model: nn.Module, images: Tensor, layers: Iterable[nn.Module]) -> tuple[list[tuple[Any, Any]], Any]:
    """Return the calls of some layers in a forward pass, as pairs of layer and output, and the output of the model."""
    calls: list[tuple[Any, Any]] = []
    hooks = [layer.register_forward_hook(lambda own, _, output: calls.append((own, output))) for layer in layers]
    with inference(model):
        output = model(images)
    for hook in hooks:
        hook.remove()
    return calls, output


def find_classifiers(run: LoadedRun, images: Tensor, averaged: bool = False) -> list[nn.Module]:
    """Return the layer whose output is that of the model, or layers whose mean it is, as in a distilled DeiT.

    If there is none, it is the first linear layer of the head, e.g. one with an output for each of two label sets; if
    `averaged`, also a convolution, e.g. that of SqueezeNet, whose output is averaged over the positions.
    """
    model = feature_model(run)
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    calls, logits = call_layers(model, images, layers)
    same = [call for call in calls if isinstance(logits, Tensor) and call[1].numel() == logits.numel()]
    for chosen in (same[-1:], same):
        outputs = [output.reshape(logits.shape) for _, output in chosen]
        if outputs and torch.allclose(torch.stack(outputs).mean(0), logits, equal_nan=True):
            if len({layer.weight.shape[1] for layer, _ in chosen}) > 1:
                raise ConfigError(f"MODEL.ARCH: {run.cfg.MODEL.ARCH} has heads of different widths; fix: another model")
            return [layer for layer, _ in chosen]
    named = dict(run.model.named_modules())  # without those that `deploy_model` has removed
    head = {named[name] for name in find_head(run.cfg, run.model, run.task) if name in named}
    kinds = (nn.Linear, nn.Conv2d) if averaged else nn.Linear
    if first := next((layer for layer, _ in calls if layer in head and isinstance(layer, kinds)), None):
        return [first]
    raise ConfigError(f"MODEL.ARCH: {run.cfg.MODEL.ARCH} does not end with a linear layer; fix: add an nn.Linear")


def iter_features(
    run: LoadedRun, loader: ChunkLoader, mirrored: int | None = None
) -> Iterator[tuple[range, Tensor, Tensor, dict[int, Any]]]:
    """Yield of each chunk its positions, features, predicted classes, and the `ImageFault` of each image not read.

    Features, float32 (N, dim), and classes, int64 (N,), -1 without a classifier, are on the CPU. The images of chunks
    from the position `mirrored` on are mirrored.

    Raises:
        ConfigError: features or scores are not finite, or the model does not end with a linear layer.
    """
    inputs: list[Tensor] = []
    layers = find_classifiers(run, loader.zero_images(1), averaged=True)
    hooks = [layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].float())) for layer in layers]

    def start(pixels: Tensor) -> Callable[[], list[Tensor]]:
        if has_classifier(run):
            scores = run.compute_scores(pixels)
            predicted = rank_classes(scores, run.cfg.TRAIN.TOPK)[:, 0]  # ties as in the metric top1
        else:
            scores = pixels[:0]
            predicted = torch.full((len(pixels),), -1, device=pixels.device)
            with inference(run.model), run.task.autocast():
                feature_model(run)(pixels)
        used = [one.mean((2, 3)) if one.ndim == 4 else one for one in inputs[: len(layers)]]
        features = torch.stack(used).mean(0).flatten(1)  # TEST.FLIP adds those of mirrored images
        inputs.clear()
        return copy_to_host([features, features.isfinite().all() & scores.isfinite().all(), predicted])

    try:
        started = (
            (span, causes, start(pixels if mirrored is None or span.start < mirrored else pixels.flip(3)))
            for span, pixels, causes in loader.chunks()
        )
        for span, causes, wait in one_behind(started, run.device):
            features, is_finite, predicted = wait()
            if not is_finite:
                reason = "features or scores that are not finite; fix: name another checkpoint"
                raise ConfigError(f"RUN: {run.source} has {reason}")
            yield span, features, predicted, causes
    finally:
        for hook in hooks:
            hook.remove()
