"""Evaluation: the last, short batch is padded where another number of images would be compiled."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.fake_cuda import CUDA, fake_cuda
from support.tiers import slow
from torch import nn

from distribuuuu.data.batch import Batch
from distribuuuu.data.loader import Loader, build_loader
from distribuuuu.data.normalize import Normalizer, pad_batch
from distribuuuu.distributed.ddp import compile_model
from distribuuuu.engine.evaluator import PaddedModel, evaluate
from distribuuuu.launch.detect import Launch
from distribuuuu.models import build_model
from distribuuuu.models.cifar_resnet import CifarResNet
from distribuuuu.optim.precision import Precision
from distribuuuu.records import predictions
from distribuuuu.records.predictions import Recorder, build_recorder
from distribuuuu.tasks.base import build_task
from distribuuuu.tasks.meter import Meter

CPU = torch.device("cpu")
# MODEL.ARCH and the side of its images.
NETS = [("resnet14", 16), ("botnet50", 64), ("vit_tiny_patch16_224", 224)]


@pytest.mark.parametrize("layout", [slow(torch.contiguous_format), torch.channels_last])
@pytest.mark.parametrize("arch, size", NETS)
def test_a_padded_batch_gives_each_image_the_bits_of_a_full_one(small_cfg, arch, size, layout):
    cfg = small_cfg("MODEL.ARCH", arch, "MODEL.KWARGS", "{}", "TRAIN.IM_SIZE", size, "TEST.IM_SIZE", size)
    model = build_model(cfg, False).eval().to(memory_format=layout)
    images = torch.randn(8, 3, size, size).to(memory_format=layout)
    with torch.inference_mode():
        full = model(images)
        for num in (1, 5, 8):
            padded = PaddedModel(model, 8)(images[:num])
            assert torch.equal(padded, full[:num])
    assert pad_batch(images[:5], 8).is_contiguous(memory_format=layout) and pad_batch(images, 8) is images


class TwoHeads(nn.Module):
    """A model with outputs of several shapes, and a method besides `forward`."""

    def __init__(self):
        super().__init__()
        self.shapes, self.scale = [], 2.0

    def forward(self, images: torch.Tensor, factor: float = 1.0) -> dict:
        self.shapes.append(tuple(images.shape))
        return {"logits": [images.mean((2, 3)) * factor], "classes": torch.ones(3), "loss": images.sum()}

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return images * self.scale


def test_a_padded_model_is_used_like_the_model():
    model, images = TwoHeads(), torch.ones(2, 3, 4, 4)
    padded = PaddedModel(model, 5)
    outputs = padded(images)
    assert outputs["logits"][0].shape == (2, 3) and outputs["classes"].shape == (3,) and outputs["loss"].shape == ()
    assert torch.equal(padded.features(images), 2 * images) and padded.scale == 2.0
    padded(images, factor=2.0)
    padded(torch.ones(10, 3, 4, 4))
    assert [shape[0] for shape in model.shapes] == [5, 2, 10]
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        padded.other  # noqa: B018


@pytest.fixture
def compiled(monkeypatch) -> Iterator[list[str]]:
    """Compile to the same operations; return the kind of each compilation: "normalizer" or "model"."""
    torch._dynamo.reset()
    compile_function, kinds = torch.compile, []

    def record(kind: str) -> dict:
        return {"backend": lambda graph, inputs: kinds.append(kind) or graph.forward, "dynamic": False}

    def compile_module(model: nn.Module, **settings: object) -> None:
        model._compiled_call_impl = compile_function(model._call_impl, **record("model"))

    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_function(function, **record("normalizer")))
    monkeypatch.setattr(nn.Module, "compile", compile_module)
    yield kinds
    torch._dynamo.reset()


def evaluate_once(cfg, recorded: bool = False) -> tuple[dict, Recorder | None]:
    torch.manual_seed(1)
    loader = build_loader(cfg, Launch("alone"), CPU, train=False)
    task, model = build_task(cfg, loader.images.classes, CPU, Precision()), build_model(cfg, False)
    compile_model(model, cfg.MODEL.COMPILE)
    recorder = build_recorder(cfg, task, model, loader) if recorded else None
    return evaluate(recorder or task, model, loader), recorder


@pytest.mark.parametrize("flip", [False, True])
def test_an_evaluation_compiles_for_one_number_of_images(small_cfg, compiled, flip):
    words = ("TEST.BATCH_SIZE", 16, "TEST.FLIP", flip)  # of 37 images: the last batch has five
    expected, _ = evaluate_once(small_cfg(*words))
    assert compiled == []
    result, _ = evaluate_once(small_cfg(*words, "MODEL.COMPILE", "default"))
    assert compiled == ["normalizer", "model"]
    assert result == {**expected, "loss": pytest.approx(expected["loss"], rel=1e-6)} and result["count"] == 37


def test_chunks_of_recorded_predictions_are_not_padded(small_cfg, compiled, monkeypatch):
    seen, starts = [], []
    monkeypatch.setattr(predictions, "begin_start_up", lambda: starts.append(len(seen)))
    evaluate_chunk = Recorder._evaluate

    def record(self: Recorder, model: nn.Module, batch: Batch, *rest: object) -> None:
        seen.append((type(model), len(batch.images)))
        evaluate_chunk(self, model, batch, *rest)

    monkeypatch.setattr(Recorder, "_evaluate", record)
    words = ("TEST.BATCH_SIZE", 17, "TEST.SAVE_PREDICTIONS", True, "MODEL.COMPILE", "default")
    evaluate_once(small_cfg(*words), recorded=True)  # 17, 17 and 3 images: a chunk is complete at the second batch
    evaluate_once(small_cfg(*words[:1], 31, *words[2:]), recorded=True)  # 31 and 6 images: at the last one
    assert seen == [(CifarResNet, 32), (CifarResNet, 32)] and starts == [1, 2], "compiling it may take long"


@pytest.mark.parametrize("num", [1, 3])
def test_on_cuda_a_short_batch_has_the_shape_of_the_others(small_cfg, monkeypatch, num):
    parts = build_loader(cfg := small_cfg(), Launch("alone"), CPU, train=False)
    model = build_model(cfg, False)
    monkeypatch.setattr(Meter, "read", lambda self: {"count": 37})  # fake tensors have no values
    with fake_cuda(monkeypatch) as timeline:
        pixels, labels = torch.zeros(12, 3, 16, 16, dtype=torch.uint8).pin_memory(), torch.zeros(12).long().pin_memory()
        batches = [*[(Batch(pixels, labels), ())] * num, (Batch(pixels[:5], labels[:5]), ())]
        normalize = Normalizer(CUDA, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), channels_last=True)
        loader = Loader(parts.samples, parts.sampler, batches, normalize)
        task, shapes = build_task(cfg, parts.images.classes, CUDA, Precision()), []
        model.to(CUDA).register_forward_pre_hook(lambda module, inputs: shapes.append(len(inputs[0])))
        timeline.waits.clear()
        evaluate(task, model, loader)
    assert shapes == [*[12] * num, 12] and timeline.faults == {}


def test_the_logits_of_shifted_images_count_half(small_cfg):
    images = torch.arange(2 * 3 * 5 * 6.0).view(2, 3, 5, 6)
    padded = torch.from_numpy(np.pad(images.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), mode="reflect"))
    views = images, padded[..., :5, :6], padded[..., 4:, 4:]
    model = lambda view: view[:, :, 1, 2] ** 2  # noqa: E731
    for flip in (False, True):
        task = build_task(small_cfg("TEST.SHIFT", 2, "TEST.FLIP", flip), ("a", "b", "c"), CPU, Precision())
        plain = [(model(view) + model(view.flip(-1))) / 2 if flip else model(view) for view in views]
        expected = plain[0] / 2 + (plain[1] + plain[2]) / 4
        torch.testing.assert_close(task.predict_step(model, images), expected)
