"""The loader: from an ImageSet to normalised batches on the device."""

import atexit
import functools
import logging
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler

from distribuuuu.batching import BatchPlan, plan_batches
from distribuuuu.config import ConfigError
from distribuuuu.datasets.image_set import ImageSet, contradiction
from distribuuuu.datasets.samplers import Batch, EvalSampler, ResumableDistributedSampler
from distribuuuu.datasets.transforms import eval_transform, train_transform
from distribuuuu.launch import Launch
from distribuuuu.registry import DATASETS
from distribuuuu.seeding import derive_seed, seed_cpu
from distribuuuu.signals import shield_worker

logger = logging.getLogger(__name__)

# How many other images a broken one may be replaced by before the data counts as broken.
MAX_SUBSTITUTES = 20


class BadImageError(ConfigError):
    """An image that cannot be read; names the file."""

    one_process = True


@dataclass(frozen=True)
class Sample:
    """One image on its way to a batch: uint8 (3, H, W), its label, and what went wrong before it was read."""

    pixels: torch.Tensor | None
    label: int
    broken: tuple[str, ...] = ()


class SeededImages(Dataset):
    """Transformed images, each with all generators seeded from its (key, index): the same in any worker or none."""

    def __init__(self, images: ImageSet, transform: Callable, skip_broken: bool):
        self.images = images
        self.transform = transform
        self.skip_broken = skip_broken

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, where: tuple[int, int]) -> Sample:
        key, index = where
        broken: list[str] = []
        for attempt in range(1 + MAX_SUBSTITUTES * self.skip_broken):
            chosen = index if attempt == 0 else derive_seed(key, index, attempt) % len(self.images)
            try:
                image = self.images.read(chosen)
                seed_cpu(derive_seed(key, index))
                return Sample(self.transform(image), self.images.label(chosen), tuple(broken))
            except Exception as error:  # decoders raise nearly anything; the loader names the file and the cause
                broken.append(f"{self.images.where(chosen)}: {type(error).__name__}: {error}")
        return Sample(None, -1, tuple(broken))


def _collate(samples: list[Sample]) -> tuple[torch.Tensor | None, torch.Tensor, tuple[str, ...]]:
    """Return (uint8 (N, 3, H, W), int64 (N,), messages); no images when one of them could not be had."""
    broken = tuple(message for sample in samples for message in sample.broken)
    if any(sample.pixels is None for sample in samples):
        return None, torch.empty(0), broken
    pixels = torch.stack([sample.pixels for sample in samples])
    return pixels, torch.tensor([sample.label for sample in samples]), broken


class _Gate:
    """A sampler that yields nothing until it is opened, so that workers can be started without work."""

    def __init__(self, sampler: Sampler[Batch]):
        self.sampler = sampler
        self.is_open = False

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.sampler if self.is_open else ())


def _end_workers(loader: weakref.ref) -> None:
    iterator = getattr(loader(), "_iterator", None)
    if iterator is not None:
        iterator._shutdown_workers()


class Loader:
    """Batches of normalised images on the device. Its workers are forked here and now, and stay.

    Attributes:
        images: the ImageSet behind it.
        num_broken: broken images met so far on this process.
    """

    def __init__(
        self,
        dataset: SeededImages,
        sampler: Sampler[Batch],
        device: torch.device,
        mean: Sequence[float],
        std: Sequence[float],
        num_workers: int,
        pin_memory: bool,
    ):
        self.images = dataset.images
        self.dataset = dataset
        self.sampler = sampler
        self.device = device
        self._wait_s = 0.0
        self.num_broken = 0
        self._mean = torch.tensor(mean, dtype=torch.float32, device=device).view(3, 1, 1) * 255
        self._scale = 1 / (torch.tensor(std, dtype=torch.float32, device=device).view(3, 1, 1) * 255)
        gate = _Gate(sampler)
        # More workers than cores are the user's choice; the log says how long the batches were waited for.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        self._batches = DataLoader(
            dataset,
            batch_sampler=gate,
            num_workers=num_workers,
            collate_fn=_collate,
            pin_memory=pin_memory and device.type == "cuda",
            persistent_workers=num_workers > 0,
            worker_init_fn=functools.partial(shield_worker, parent=os.getpid()),
        )
        iter(self._batches)
        gate.is_open = True
        # Before multiprocessing's own exit handler, which would wait for workers that do not hear its SIGTERM.
        atexit.register(_end_workers, weakref.ref(self._batches))

    def __len__(self) -> int:
        return len(self.sampler)

    @property
    def num_rounds(self) -> int:
        """The most batches that any process has."""
        return self.sampler.num_rounds

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (float32 (N, 3, H, W), int64 (N,)) on the device.

        Raises:
            BadImageError: an image cannot be read, and DATA.ON_BAD_IMAGE is not skip.
        """
        batches = iter(self._batches)
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self._wait_s += time.perf_counter() - start
            if batch is None:
                return
            pixels, labels, broken = batch
            self._report(broken, substituted=pixels is not None)
            yield self._normalize(pixels), labels.to(self.device, non_blocking=True)

    def take_wait_s(self) -> float:
        """Return the seconds spent waiting for batches since the last call."""
        wait_s, self._wait_s = self._wait_s, 0.0
        return wait_s

    def _normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        return torch.sub(pixels.to(self.device, non_blocking=True), self._mean).mul_(self._scale)

    def _report(self, broken: tuple[str, ...], substituted: bool) -> None:
        if not substituted:
            raise BadImageError(f"broken image: {broken[0]}; mend or remove it, or set DATA.ON_BAD_IMAGE skip")
        for message in broken:
            self.num_broken += 1
            logger.warning("broken image no. %d, another in its place: %s", self.num_broken, message)


class TrainLoader(Loader):
    """A loader whose steps can be entered anywhere."""

    sampler: ResumableDistributedSampler

    @property
    def plan(self) -> BatchPlan:
        """How a step falls into processes and micro-batches."""
        return self.sampler.plan

    @property
    def num_steps(self) -> int:
        """Steps of a whole epoch."""
        return self.sampler.num_steps

    def batches_from(self, seed: int, epoch: int, first_step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return an iterator over this process's micro-batches from a step of an epoch on."""
        self.sampler.set_position(seed, epoch, first_step)
        return iter(self)

    def example(self) -> torch.Tensor:
        """Return black images of the shape of a micro-batch: float32 (N, 3, H, W) on the device."""
        pixels = self.dataset.transform(Image.new("RGB", (64, 64)))
        return torch.zeros(self.plan.micro_batch, *pixels.shape, device=self.device)

    def preview(self, seed: int, num: int) -> torch.Tensor:
        """Return the first images of a run as they are trained on: uint8 (at most num, 3, H, W)."""
        self.sampler.set_position(seed, epoch=0, first_step=0)
        samples = [self.dataset[where] for where in next(iter(self.sampler))[:num]]
        return torch.stack([sample.pixels for sample in samples if sample.pixels is not None])


def build_loader(cfg, launch: Launch, device: torch.device, train: bool) -> Loader:
    """Return the training or the evaluation loader of a config; call it before the process group is joined.

    Raises:
        ConfigError: the data contradicts the config.
    """
    images = build_images(cfg, train)
    if train:
        plan = plan_batches(cfg.TRAIN.BATCH_SIZE, cfg.TRAIN.GLOBAL_BATCH_SIZE, launch.world_size)
        if len(images) < plan.global_batch:
            raise ConfigError(
                f"TRAIN.BATCH_SIZE: one step takes {plan.global_batch} images ({plan}),"
                f" but the training set has {len(images)}; take fewer"
            )
        sampler = ResumableDistributedSampler(len(images), plan, launch.rank)
    else:
        sampler = EvalSampler(len(images), cfg.TEST.BATCH_SIZE, launch.rank, launch.world_size)
    dataset = SeededImages(images, build_transform(cfg, images, train), cfg.DATA.ON_BAD_IMAGE == "skip")
    mean, std = cfg.DATA.MEAN or images.mean, cfg.DATA.STD or images.std
    loader = TrainLoader if train else Loader
    return loader(dataset, sampler, device, mean, std, cfg.TRAIN.WORKERS, cfg.TRAIN.PIN_MEMORY)


def build_images(cfg, train: bool) -> ImageSet:
    """Return the ImageSet of a config."""
    images = DATASETS.get("dummy" if cfg.MODEL.DUMMY_INPUT else cfg.DATA.NAME).from_cfg(cfg, train)
    if len(images.classes) != cfg.MODEL.NUM_CLASSES:
        where = f"DATA.NAME {cfg.DATA.NAME}"
        raise ConfigError(f"MODEL.NUM_CLASSES: {contradiction(cfg.MODEL.NUM_CLASSES, len(images.classes), where)}")
    return images


def build_transform(cfg, images: ImageSet, train: bool) -> Callable:
    """Return the transform from a PIL image to uint8 (3, H, W)."""
    if not train:
        return eval_transform(cfg.TEST.IM_SIZE, cfg.TEST.CROP_SIZE or cfg.TRAIN.IM_SIZE)
    data = cfg.DATA
    crop = images.crop if data.CROP == "auto" else data.CROP
    return train_transform(cfg.TRAIN.IM_SIZE, crop, data.CROP_SCALE, data.CROP_PADDING, data.FLIP)
