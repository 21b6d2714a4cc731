"""Quality of the features of a trained model: k-nearest neighbors and a linear probe, without training the model.

Sizes of blocks are constants, so the result depends neither on TEST.BATCH_SIZE nor on the number of workers.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distribuuuu.checkpoint.manager import copy_to_host
from distribuuuu.commands.scan.data_config import open_images
from distribuuuu.commands.stats.significance import wilson_interval
from distribuuuu.config import ConfigError
from distribuuuu.data.batch import as_targets
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.loader import BadImageError, count_workers
from distribuuuu.distributed.sharding import inference
from distribuuuu.inference.forward_chunks import ChunkLoader, list_spans, one_behind
from distribuuuu.inference.loaded_run import LoadedRun
from distribuuuu.launch.detect import detect_launch
from distribuuuu.records.run_log import progress
from distribuuuu.tasks.metrics import rank_classes

# Neighbors, and the temperature of their votes (Wu et al., arXiv 1805.01978; the same in DINO, arXiv 2104.14294).
NUM_NEIGHBORS, TEMPERATURE = 20, 0.07
# L2 penalties of the linear probe; to select one, every fifth training image of a class is held out.
PENALTIES, HELD_OUT = (1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6), 5
# Images of a forward pass; queries and neighbors of a block of similarities; images of a block of the linear probe.
_CHUNK, _QUERIES, _NEIGHBORS, _ROWS = 64, 1024, 16384, 8192
_MAX_FLOAT32 = 2**28  # more values of features are kept in float16


def probe_run(run: LoadedRun) -> dict[str, Any]:
    """Return the content of probe.json: top-1 in percent of the classifier, of k-NN and of a linear probe.

    Raises:
        ConfigError: the data cannot be read or has several labels per image, or the model has no features.
    """
    sets = [open_labeled_images(run, train) for train in (True, False)]
    sizes = _CHUNK, count_workers(run.cfg.TRAIN.WORKERS, detect_launch()), run.cfg.DATA.WORKER_KIND
    loaders = [ChunkLoader(own, run.transform, list_spans(len(own), _CHUNK), run.device, *sizes) for own in sets]
    run.build()  # after the workers have been forked: the model may be on a GPU
    torch.set_float32_matmul_precision("highest")
    (rows, labels, _), (test_rows, test_labels, num_right) = (extract_features(run, loader) for loader in loaders)
    classes, num = tuple(sets[0].classes), len(test_labels)
    counts = {"classifier": num_right} if has_classifier(run) and classes == run.classes else {}
    counts["k-NN"] = int(predict_knn(rows, labels, test_rows, len(classes), run.device).eq(test_labels).sum())
    standardize(rows, test_rows)
    weights, penalty = fit_selected(rows, labels, len(classes), run.device)
    counts["linear probe"] = int(predict_linear(test_rows, weights).eq(test_labels).sum())
    return {
        "source": run.source, "weights": run.weights, "arch": run.cfg.MODEL.ARCH, "features": rows.shape[1],
        "classes": len(classes), "num_train": len(rows), "num_test": num, "k": NUM_NEIGHBORS,
        "temperature": TEMPERATURE, "penalty": penalty, "correct": counts,
        "top1": {name: 100 * count / num for name, count in counts.items()},
        "interval": {name: [100 * end for end in wilson_interval(count, num)] for name, count in counts.items()},
    }  # fmt: skip


def open_labeled_images(run: LoadedRun, train: bool) -> ImageDataset:
    """Return the training or the evaluation set of a run; its classes may be others than those of the model."""
    try:
        images = open_images(run.cfg, train)
    except ConfigError as error:
        fix = "the probe needs these images; fix: add TRAIN.DATASET FOLDER TEST.DATASET FOLDER"
        raise ConfigError([*error.problems, fix]) from error
    if images.targets != "label" or not len(images):
        raise ConfigError(f"DATA.NAME: got {run.cfg.DATA.NAME}; expected images with one label each")
    return images


def has_classifier(run: LoadedRun) -> bool:
    """Tell whether a run has answers to be compared with labels."""
    return run.has_classifier and run.task.has_scores and run.task.classifies


def feature_model(run: LoadedRun) -> nn.Module:
    """Return the part of the model whose features are probed: that named `backbone` of a model without answers."""
    return run.model if run.task.has_scores else getattr(run.model, "backbone", run.model)


def find_classifiers(run: LoadedRun, images: Tensor) -> list[nn.Module]:
    """Return the layer whose output is that of the model, or layers whose mean it is, as in a distilled DeiT."""
    found: list[tuple[nn.Module, Tensor]] = []
    model = feature_model(run)
    hooks = [layer.register_forward_hook(lambda own, _, output: found.append((own, output)))
             for layer in model.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]  # fmt: skip
    with inference(run.model):
        logits = model(images)
    for hook in hooks:
        hook.remove()
    found = [(layer, output.reshape(logits.shape)) for layer, output in found if output.numel() == logits.numel()]
    for chosen in (found[-1:], found):
        if chosen and torch.allclose(torch.stack([output for _, output in chosen]).mean(0), logits, equal_nan=True):
            return [layer for layer, _ in chosen]
    raise ConfigError(f"MODEL.ARCH: {run.cfg.MODEL.ARCH} does not end with a linear layer; fix: add an nn.Linear")


def extract_features(run: LoadedRun, loader: ChunkLoader) -> tuple[Tensor, Tensor, int]:
    """Return features of length 1 (N, dim) on the CPU, labels (N,) and the number of right answers of the classifier.

    Features are the input of the layer that makes the logits. A ConfigError is raised if they are not finite.
    """
    images, num_right, rows = loader.images, 0, torch.empty(0)
    labels = as_targets([images.label(index) for index in range(len(images))])
    inputs: list[Tensor] = []
    layers = find_classifiers(run, loader.zero_images(1))
    hooks = [layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].float())) for layer in layers]

    def start(pixels: Tensor, causes: dict[int, str]) -> Callable[[], list[Tensor]]:
        for index, cause in causes.items():
            raise BadImageError(f"broken image: {images.describe(index)}: {cause}; fix: repair or remove it")
        if has_classifier(run):
            predicted = rank_classes(run.compute_scores(pixels), run.cfg.TRAIN.TOPK)[:, 0]  # ties as in the metric top1
        else:
            predicted = torch.full((len(pixels),), -1, device=pixels.device)
            with inference(run.model):
                feature_model(run)(pixels)
        features = torch.stack(inputs[: len(layers)]).mean(0).flatten(1)  # TEST.FLIP adds those of mirrored images
        inputs.clear()
        return copy_to_host([F.normalize(features, dim=1), features.isfinite().all(), predicted])

    chunks = progress(loader.chunks(), label="features", total=len(loader.sampler.spans))
    for span, wait in one_behind(((span, start(*chunk)) for span, *chunk in chunks), run.device):
        features, is_finite, predicted = wait()
        if not is_finite:
            raise ConfigError(f"RUN: {run.source} has features that are not finite; fix: name another checkpoint")
        if not len(rows):
            size = len(images), features.shape[1]
            rows = torch.empty(size, dtype=torch.float32 if size[0] * size[1] <= _MAX_FLOAT32 else torch.float16)
        rows[span.start : span.stop] = features
        num_right += int(predicted.eq(labels[span.start : span.stop]).sum())
    for hook in hooks:
        hook.remove()
    return rows, labels, num_right


@torch.no_grad()
def predict_knn(rows: Tensor, labels: Tensor, queries: Tensor, num_classes: int, device: torch.device) -> Tensor:
    """Return the class of each query (M, dim), int64 (M,), by votes of its neighbors among the rows (N, dim).

    A vote has the weight exp(cosine / temperature). Features have length 1; similarities are computed on the device.
    """
    dtype, found, predicted = torch.promote_types(rows.dtype, torch.float32), [], []
    for block in progress(queries.split(_QUERIES), label="k-NN"):
        block, start = block.to(device, dtype), 0
        best, indices = block.new_empty(len(block), 0), torch.empty(len(block), 0, dtype=torch.int64, device=device)
        for part in rows.split(_NEIGHBORS):
            similarities = torch.cat([best, block @ part.to(device, dtype).T], dim=1)
            own = torch.arange(start, start + len(part), device=device).expand(len(block), -1)
            best, order = similarities.topk(min(NUM_NEIGHBORS, similarities.shape[1]))
            indices, start = torch.cat([indices, own], dim=1).gather(1, order), start + len(part)
        found.append((best, indices))
    best, indices = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
    for similar, nearest in zip(best.split(_QUERIES), indices.split(_QUERIES), strict=True):
        weights = (similar.double() / TEMPERATURE).exp()  # on the CPU, the order of a sum does not vary
        votes = weights.new_zeros(len(weights), num_classes).scatter_add_(1, labels[nearest], weights)
        predicted.append(votes.argmax(dim=1))
    return torch.cat(predicted)


def standardize(rows: Tensor, *others: Tensor) -> None:
    """Standardize features (N, dim) in place, and others by the same means and deviations."""
    sums = torch.zeros(2, rows.shape[1], dtype=torch.float64)
    for part in rows.split(_ROWS):
        sums += torch.stack([part.double().sum(0), part.double().square().sum(0)])
    mean, square = sums / len(rows)
    deviation = (square - mean.square()).clamp(min=0).sqrt()
    for part in (part for own in (rows, *others) for part in own.split(_ROWS)):
        part.copy_((part - mean) * torch.where(deviation > 1e-6, 1 / deviation, 0))


def fit_linear(rows: Tensor, labels: Tensor, shares: Tensor, penalty: float, start: Tensor) -> Tensor:
    """Return the weights (dim + 1, classes) of multinomial logistic regression by L-BFGS; the last row: biases.

    The loss is the cross-entropy of features (N, dim), weighted by the share (N,) of each image, plus `penalty / 2`
    times the sum of the squared weights without the biases, in the type and on the device of the initial weights.
    """
    weights = start.clone()
    optimizer = torch.optim.LBFGS([weights], max_iter=200, history_size=10, line_search_fn="strong_wolfe",
                                  tolerance_grad=1e-6, tolerance_change=1e-12)  # fmt: skip

    def compute_loss() -> Tensor:
        gradient = penalty * weights
        gradient[-1] = 0
        loss = (gradient * weights).sum() / 2
        for part, own, share in zip(rows.split(_ROWS), labels.split(_ROWS), shares.split(_ROWS), strict=True):
            inputs, own, share = F.pad(part.to(weights), (0, 1), value=1.0), own.to(weights.device), share.to(weights)
            log_p = (inputs @ weights).log_softmax(1)
            loss -= log_p.gather(1, own[:, None])[:, 0] @ share
            gradient += inputs.T @ ((log_p.exp() - F.one_hot(own, log_p.shape[1])) * share[:, None])
        weights.grad = gradient
        return loss

    optimizer.step(compute_loss)
    return weights


def predict_linear(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the class of each row of features (M, dim): int64 (M,) on the CPU."""
    logits = (part.to(weights) @ weights[:-1] + weights[-1] for part in rows.split(_ROWS))
    return torch.cat([part.argmax(1) for part in logits]).cpu()


def fit_selected(rows: Tensor, labels: Tensor, num_classes: int, device: torch.device) -> tuple[Tensor, float]:
    """Return weights, fitted on all images, and their penalty: the largest of the best ones on held-out images."""
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    weights = torch.zeros(rows.shape[1] + 1, num_classes, dtype=dtype, device=device)
    is_held_out = torch.zeros(len(rows), dtype=torch.bool)
    is_held_out[labels.argsort(stable=True)[HELD_OUT - 1 :: HELD_OUT]] = True
    found: list[tuple[int, float, Tensor]] = []
    for penalty in progress(PENALTIES, label="linear probe"):
        weights = fit_linear(rows, labels, ~is_held_out / (~is_held_out).sum(), penalty, weights)
        found.append((int((predict_linear(rows, weights).eq(labels) & is_held_out).sum()), penalty, weights))
    _, penalty, weights = max(found, key=lambda entry: entry[:2])
    return fit_linear(rows, labels, torch.full((len(rows),), 1 / len(rows)), penalty, weights), penalty
