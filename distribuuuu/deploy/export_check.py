"""Check of an exported model: its answers on the evaluation set of its run, compared with those of the run's model."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import LazyImage, build_decode_options
from distribuuuu.data.loader import BadImageError
from distribuuuu.data.samples import Samples, as_targets
from distribuuuu.data.seeding import SampleRNG
from distribuuuu.data.transforms import Transform
from distribuuuu.deploy.loaded_run import CPU, EvalTransform
from distribuuuu.launch.host import count_cores
from distribuuuu.report.run_log import progress
from distribuuuu.tasks.meter import Meter
from distribuuuu.tasks.metrics import StepOutput, build_metrics

# An export is verified if at least this share of its answers equals those of the run's model.
MIN_EQUAL = 0.999
# Decoded images in memory at a time.
_CHUNK = 32

# From decoded images, uint8 (3, H, W) of any sizes, to their logits, float32 (N, classes).
Predict = Callable[[Sequence[torch.Tensor]], torch.Tensor]


class FlipAverage(nn.Module):
    """A model whose logits are averaged with those of the mirrored images, as an evaluation with TEST.FLIP does."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (N, 3, H, W) to logits (N, classes)."""
        return (self.model(images) + self.model(images.flip(-1))) / 2


class CropClassifier(nn.Module):
    """Normalization and model: uint8 crops (N, 3, size, size) to logits (N, classes)."""

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, model: nn.Module, transform: EvalTransform):
        super().__init__()
        self.model = model
        normalizer = transform.normalizer()
        self.register_buffer("mean", normalizer.mean)
        self.register_buffer("scale", normalizer.scale)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map crops to logits."""
        return self.model((pixels.float() - self.mean) * self.scale)


def evaluated_model(model: nn.Module, cfg) -> nn.Module:
    """Return a model as it is evaluated, converted: on the CPU, float32, contiguous, with the flip of TEST.FLIP."""
    model = model.cpu().float().eval().to(memory_format=torch.contiguous_format)
    return FlipAverage(model) if cfg.TEST.FLIP else model


def crop_images(transform: EvalTransform, images: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the center crops of decoded images (3, H, W): uint8 (N, 3, size, size)."""
    return torch.stack([transform.crop.transform_batch(image) for image in images])


def torch_predict(model: nn.Module, transform: EvalTransform) -> Predict:
    """Return the predictions of a model of normalized images, on the CPU in float32."""
    normalize = transform.normalizer()
    return lambda images: model(normalize(crop_images(transform, images)))


@dataclass(frozen=True)
class _WholeImage(Transform):
    """The decoded image, unchanged."""

    def __call__(self, image: LazyImage, rng: SampleRNG) -> torch.Tensor:
        return image.pixels()


@torch.inference_mode()
def compare(cfg, images: ImageDataset, reference: Predict, candidate: Predict, max_images: int = 0) -> dict[str, Any]:
    """Return how the answers of a candidate compare with those of a reference on an evaluation set.

    An answer is the class of the largest logit or, with several labels per image, the classes above probability 0.5.

    Args:
        cfg: the config, which sets decoder and treatment of broken images.
        images: the evaluation set.
        reference: the model of the run.
        candidate: the exported model.
        max_images: number of images, evenly spaced over the set; 0: all.

    Returns:
        Entries of export.json: number of images, top-1 (mAP with several labels) and images per second of both, share
        of equal answers in percent, greatest difference of logits, and whether the export is verified.

    Raises:
        BadImageError: an image cannot be read.
    """
    metric = "map" if images.multilabel else "top1"
    predicts, names = (reference, candidate), ("run", "export")
    metrics = build_metrics("TEST.METRICS", (metric,), len(images.classes), 1, images.multilabel)
    meters = [Meter(metrics, len(images.classes), CPU) for _ in names]
    seconds, equal, difference = [0.0, 0.0], 0, 0.0
    num = min(max_images, len(images)) or len(images)
    indices = [position * len(images) // num for position in range(num)]
    for pixels, targets in progress(_read_chunks(cfg, images, indices), label="check", total=-(-num // _CHUNK)):
        logits = []
        for kind, predict in enumerate(predicts):
            if not seconds[kind]:
                predict(pixels[:1])  # warm-up
            start = time.perf_counter()
            logits.append(predict(pixels))
            seconds[kind] += time.perf_counter() - start
            meters[kind].update(StepOutput(torch.zeros(()), logits[-1], targets))
        answers = [each.gt(0) if images.multilabel else each.argmax(1, keepdim=True) for each in logits]
        equal += int(answers[0].eq(answers[1]).all(dim=1).sum())
        # NaN, which max() would drop, is kept.
        difference = float(torch.stack([torch.tensor(difference), (logits[0] - logits[1]).abs().max()]).max())
    values = [meter.read()[metric] for meter in meters]
    return {
        "verified": equal >= MIN_EQUAL * num and math.isfinite(difference),
        "images": num,
        "images_of_set": len(images),
        metric: dict(zip(names, values, strict=True)),
        "equal_answers": 100 * equal / num,
        "max_logit_difference": difference,
        "images_per_s": {name: num / spent for name, spent in zip(names, seconds, strict=True)},
        "threads": torch.get_num_threads(),
    }


def _read_chunks(cfg, images: ImageDataset, indices: list[int]) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Yield decoded images and targets, as the evaluation reads them.

    Raises:
        BadImageError: an image cannot be read, and DATA.ON_BAD_IMAGE is not skip.
    """
    skips = cfg.DATA.ON_BAD_IMAGE == "skip"
    samples = Samples(images, _WholeImage(), cfg.DATA.DECODER, skips, build_decode_options(cfg))
    with ThreadPoolExecutor(count_cores()) as pool:
        for start in range(0, len(indices), _CHUNK):
            chunk = list(pool.map(lambda index: samples[0, index], indices[start : start + _CHUNK]))
            pixels = [sample.pixels for sample in chunk if sample.pixels is not None]
            if broken := [sample.broken[-1] for sample in chunk if sample.pixels is None]:
                raise BadImageError(f"broken image: {broken[0]}; fix: repair it, or set DATA.ON_BAD_IMAGE skip")
            yield pixels, as_targets([sample.label for sample in chunk])
