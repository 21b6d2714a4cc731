"""Loaders: from a config to normalized batches on the device.

`build_loader` assembles the pipeline: data set -> sampler -> samples (decode, crop, augment) -> workers -> normalizer.
"""

import copy
import itertools
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any

import torch

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import BadImageError, counted, first_few
from distribuuuu.config.options import PIXEL_RANGES, UNCOMPILED
from distribuuuu.config.registry import DATASETS, dataset_name, task_class
from distribuuuu.data.batch import (
    Batch,
    HostBatch,
    Normalizer,
    Pass,
    Pool,
    Samples,
    WorkerBatches,
    as_targets,
    copy_to_device,
    map_leaves,
)
from distribuuuu.data.batch_plan import BatchPlan, check_num_images, plan_of
from distribuuuu.data.build_transform import MAIN, build_transform, depends_on_epoch, statistics_of
from distribuuuu.data.datasets.base import ImageDataset, class_count_mismatch
from distribuuuu.data.decode import build_decode_options
from distribuuuu.data.samplers import WHOLE, EvalSampler, ResumableDistributedSampler
from distribuuuu.distributed import comm as dist
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.host import count_cores

logger = logging.getLogger(__name__)


class Loader:
    """Batches of normalized images on the device, with warnings about the data (`notes`) to log when a run starts."""

    def __init__(
        self,
        samples: Samples,
        sampler: EvalSampler | ResumableDistributedSampler,
        batches: Iterable[HostBatch],
        normalize: Normalizer,
        notes: Sequence[str] = (),
    ):
        self.images = samples.images
        self.samples = samples
        self.sampler = sampler
        self.device = normalize.device
        self.notes = notes
        self.num_broken = 0
        self._batches = batches
        self._normalize = normalize
        # Each keeps the number of images that it is compiled for.
        self._normalize_extra = {name: copy.copy(normalize) for name in samples.extra}
        self._stream = None
        if self.device.type == "cuda":
            self._stream, self._queued = torch.cuda.Stream(self.device), torch.cuda.Event(blocking=True)
            # The constants of `normalize` may still be pending on the current stream.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._data_time_s = 0.0

    def __len__(self) -> int:
        return len(self.sampler)

    @property
    def max_num_batches(self) -> int:
        """The largest number of batches of any process."""
        return self.sampler.max_num_batches

    def __iter__(self) -> Iterator[Batch]:
        return map(self.to_device, self.host_batches())

    def expect(self, passes: Iterable[Pass]) -> None:
        """Let workers make batches of the passes that probably follow the next one; see `Pool.expected`."""
        if isinstance(self._batches, WorkerBatches):
            self._batches.pool.expected = passes

    def host_batches(self) -> Iterator[Batch]:
        """Yield batches of uint8 images (N, 3, H, W) as they come from the workers."""
        batches = iter(self._batches)
        while True:
            start, dist.GroupState.phase = time.perf_counter(), "waiting for data"
            made = next(batches, None)
            self._data_time_s += time.perf_counter() - start
            dist.GroupState.phase = ""
            if made is None:
                return
            batch, broken = made
            if batch is None:
                raise broken[-1].error(can_skip=not self.samples.skip_broken)
            for fault in broken:
                if not fault.is_damaged:
                    raise fault.error()
                self.num_broken += 1
                answer = "substituted" if self.samples.substitutes else "not evaluated"
                logger.warning("broken image (%d so far), %s: %s", self.num_broken, answer, fault)
            yield batch

    def to_device(self, batch: Batch) -> Batch:
        """Normalize a batch on the device; from the host to CUDA on a side stream, concurrently with the last step.

        Pixels that are on CUDA come from the current stream, so they stay on it. The host first waits for the step
        before the last one. Without a limit, it would queue far more steps, with the memory of their batches, than the
        device has run, e.g. if a step is the replay of one CUDA graph.
        """
        if not self._stream:
            return self._normalized(batch, self._normalize)
        current = torch.cuda.current_stream(self.device)
        self._queued.synchronize()
        self._queued.record(current)
        if batch.first_images.device.type == "cuda":
            return self._normalized(batch, self._normalize)
        with torch.cuda.stream(self._stream):
            moved = self._normalized(batch, self._normalize)
        current.wait_stream(self._stream)
        # Allocated on the side stream, used on the current one.
        map_leaves(torch.Tensor, lambda tensor: tensor.record_stream(current), moved)
        return moved

    def _normalized(self, batch: Batch, normalize: Normalizer) -> Batch:
        """Return a batch on the device, on the current stream."""
        images = map_leaves(torch.Tensor, normalize, batch.images)
        others = batch.targets, batch.index, batch.broken
        targets, index, broken = map_leaves(torch.Tensor, lambda tensor: copy_to_device(tensor, self.device), others)
        extra = {name: self._normalized(one, self._normalize_extra[name]) for name, one in batch.extra.items()}
        return Batch(images, targets, index, extra, broken)

    def zero_images(self, num: int) -> torch.Tensor:
        """Return zeros in the shape of `num` images, of the first view: float32 (num, 3, H, W) on the device."""
        shape = self.samples.options.channels, *self.samples.transform.views[0].shape
        return self._normalize.empty((num, *shape)).zero_()

    def zero_targets(self, num: int) -> Any:
        """Return zeros in the form of the targets of `num` images, that of the first label, on the device."""
        target = as_targets([self.images.label(0)], self.images.targets)
        return map_leaves(torch.Tensor, lambda part: part.new_zeros(num, *part.shape[1:]).to(self.device), target)

    def pop_data_time(self) -> float:
        """Return the seconds spent waiting for batches since the last call."""
        data_time_s, self._data_time_s = self._data_time_s, 0.0
        return data_time_s


class TrainLoader(Loader):
    """A loader that can start at any step of any epoch."""

    sampler: ResumableDistributedSampler

    @property
    def plan(self) -> BatchPlan:
        """The division of a step into processes and micro-batches."""
        return self.sampler.plan

    @property
    def num_steps(self) -> int:
        """Steps per whole epoch, of the images that are chosen."""
        return self.sampler.num_steps

    def steps_of(self, epoch: int) -> int:
        """Return the steps of an epoch, from 0; the last one may be shorter."""
        return self.sampler.steps_of(epoch)

    def choose(self, indices: Sequence[int] | torch.Tensor | None, in_order: bool = False) -> None:
        """Let the following epochs take these images only, each once and in random order; None: all of them.

        With `in_order`, an epoch takes them in their order, and they may occur repeatedly.
        Call it before `batches_from`, on every process with the same images; after a resume within an epoch, with those
        that the epoch began with. `num_steps` and `steps_of` follow. A ConfigError is raised for images that are
        not distinct or fewer than one step takes, that differ between processes, or that DATA.SAMPLING would draw.
        """
        self.sampler.choose(indices, in_order)
        if len(set(dist.gather_objects(self.sampler.choice))) > 1:
            error = ConfigError("TASK.NAME: the task chose different images for an epoch on different processes")
            error.on_all_processes = True
            raise error

    def batches_from(self, seed: int, epoch: int, first_step: int) -> Iterator[Batch]:
        """Return an iterator over this process's micro-batches, starting at a step of an epoch."""
        self.sampler.set_position(seed, epoch, first_step)
        return iter(self)

    def iter_images(self, seed: int, epoch: int, num: int) -> Iterator[torch.Tensor]:
        """Yield this process's images (N, 3, H, W) of the first steps that together hold at least `num` images.

        The steps are those of a whole epoch: the task may have chosen fewer images.
        """
        num_steps, before = -(-num // self.plan.global_batch), {name: getattr(self.sampler, name) for name in WHOLE}
        vars(self.sampler).update(WHOLE)
        try:
            for batch in itertools.islice(self.batches_from(seed, epoch, 0), num_steps * self.plan.accum_steps):
                yield batch.first_images
        finally:
            vars(self.sampler).update(before)

    def preview(self, seed: int, num: int) -> torch.Tensor:
        """Return the first training images of a run after augmentation: uint8 (at most num, 3, H, W), else 0 to 1.

        Of several views it is the first, of many channels the first three. If an image is broken, there are none; the
        first step reports it.
        """
        self.sampler.set_position(seed, epoch=0, first_step=0)
        batch, _ = self.samples.make_batch(next(iter(self.sampler))[:num], torch.Tensor.new_empty)
        if not batch:
            return torch.empty(0)
        pixels, normalize = batch.first_images.cpu(), self._normalize
        if pixels.dtype != torch.uint8:  # black and white are 2.5 standard deviations below and above the mean
            pixels = ((pixels - normalize.mean.cpu()) * normalize.scale.cpu() / 5 + 0.5).clamp_(0, 1)
        return pixels[:, : 3 if pixels.shape[1] >= 3 else 1]


def build_loader(cfg, launch: Launch, device: torch.device, train: bool) -> Any:
    """Return the TrainLoader or the evaluation Loader of a config, before the process group is created."""
    return build_loaders(cfg, launch, device, (train,))[0]


def build_loaders(cfg, launch: Launch, device: torch.device, splits: Sequence[bool] = (True, False)) -> list[Any]:
    """Return a TrainLoader for training and a Loader for evaluation, which share their workers; see `build_loader`."""
    parts = [build_samples(cfg, launch, device, train) for train in splits]
    passes, is_on_host = [one for one, _ in parts], cfg.DATA.LOADER == "host"
    pin_memory = cfg.TRAIN.PIN_MEMORY and device.type == "cuda" and is_on_host
    num_workers = count_workers(cfg.TRAIN.WORKERS, launch) if is_on_host else 0
    batch_bytes = max(count_bytes(one.samples, one.sampler) for one in passes)
    batches = start_workers(passes, cfg.DATA.WORKER_KIND, num_workers, pin_memory, batch_bytes)
    loaders = []
    for train, (one, notes), made in zip(splits, parts, batches, strict=True):
        # After the workers have been forked.
        compiled, one_of = cfg.MODEL.COMPILE not in UNCOMPILED, PIXEL_RANGES[cfg.DATA.PIXELS]
        statistics = statistics_of(cfg, one.samples.images)
        normalize = Normalizer(device, *statistics, cfg.MODEL.CHANNELS_LAST, compiled, one_of, is_on_host)
        loaders.append((TrainLoader if train else Loader)(one.samples, one.sampler, made, normalize, notes))
    return loaders


def count_workers(chosen: int, launch: Launch) -> int:
    """Return TRAIN.WORKERS; for -1, this process's share of the cores available on its machine."""
    return chosen if chosen >= 0 else max(1, count_cores() // launch.local_world_size)


def start_workers(
    passes: Sequence[Pass], kind: str, num_workers: int, pin_memory: bool, batch_bytes: int = 0
) -> list[WorkerBatches]:
    """Return for each pass an iterable over its batches; the same workers make all of them.

    Args:
        kind: "process" (forked now, kept until the end) or "thread".
        num_workers: 0: this process makes the batches itself.
        batch_bytes: size of the images of the largest batch, for which processes share memory; 0: unknown.
    """
    sources = [one.samples for one in passes]
    if not num_workers:
        pool = Pool(sources, pin_memory)
    elif kind == "process":
        from distribuuuu.data.workers import ProcessPool

        pool = ProcessPool(sources, num_workers, pin_memory, batch_bytes)
    else:
        from distribuuuu.data.workers import ThreadPool

        pool = ThreadPool(sources, num_workers, pin_memory)
    return [WorkerBatches(pool, one) for one in passes]


def check_same_data(*loaders: Loader) -> None:
    """Compare the images of the loaders over the processes; raise ConfigError on all of them if they differ."""
    sets: dict[str, ImageDataset] = {}
    for loader in loaders:
        key = "TRAIN.DATASET" if isinstance(loader, TrainLoader) else "TEST.DATASET"
        sets[key] = loader.images
        sets |= {f"TRAIN.DATASET of loader {name}": one.images for name, one in loader.samples.extra.items()}
    found = dist.gather_objects({key: (len(images), images.digest) for key, images in sets.items()})
    problems = []
    for key, own in found[0].items():
        if others := [(rank, one[key][0]) for rank, one in enumerate(found) if one[key] != own]:
            rank, num = others[0]
            counts = f"process {rank} found {counted(num, 'image')}, process 0 {counted(own[0], 'image')}"
            differ = "" if num != own[0] else ", but their names or labels differ"
            fix = "fix: let all nodes have the same files, and start again when nothing changes them"
            problems.append(f"{key}: the processes do not see the same images: {counts}{differ}; {fix}")
    if problems:
        error = ConfigError(problems)
        error.on_all_processes = True
        raise error


def count_bytes(samples: Samples, sampler: Any) -> int:
    """Return the size of the images of a batch, with those of other data sets that come along with it."""
    num_pixels = sum(math.prod(view.shape) for view in samples.transform.views)
    others = (count_bytes(one, sampler.extra[name]) for name, one in samples.extra.items())
    pixel_bytes = samples.options.channels * samples.options.dtype.itemsize
    return pixel_bytes * num_pixels * sampler.batch_size + sum(others)


def build_samples(
    cfg, launch: Launch, device: torch.device, train: bool, name: str = MAIN, plan: BatchPlan | None = None
) -> tuple[Any, list[str]]:
    """Return the Pass of a config: its samples and the sampler of this process; and warnings about the data.

    A further loader of the task has a name and a plan of its own.
    """
    images = build_images(cfg, train, is_main=name == MAIN)
    notes = list(find_notes(cfg, images, launch, train, name))
    sampler: Any = build_sampler(cfg, images, launch, train, plan)
    transform, options = build_transform(cfg, images, train, name), build_decode_options(cfg)
    arguments = transform, cfg.DATA.DECODER, cfg.DATA.ON_BAD_IMAGE == "skip", options
    if cfg.DATA.LOADER == "device":
        from distribuuuu.data.device_samples import DeviceSamples

        num_threads = count_workers(cfg.TRAIN.WORKERS, launch)
        samples: Samples = DeviceSamples.load(images, device, num_threads, *arguments, notes, substitutes=train)
    else:
        samples = Samples(images, *arguments, substitutes=train)
    if train and name == MAIN and (extra := task_class(cfg).extra_loaders(cfg)):
        from distribuuuu.data.extra_loaders import configs_of_extra

        for other, own, own_plan in configs_of_extra(cfg, extra, sampler.plan):
            one, found = build_samples(own, launch, device, True, other, own_plan)
            samples.extra[other], sampler.extra[other] = one.samples, one.sampler
            notes += found
    return Pass(samples, sampler), notes


def build_images(cfg, train: bool, family: type[ImageDataset] | None = None, is_main: bool = True) -> ImageDataset:
    """Return the data of a config; `family` replaces the class of DATA.NAME.

    The number of classes is that of MODEL.NUM_CLASSES, except for a further loader; else a ConfigError is raised.
    """
    images = (family or DATASETS.get(dataset_name(cfg))).from_cfg(cfg, train)
    if len(images.classes) != cfg.MODEL.NUM_CLASSES and not cfg.TEST.LABELS and is_main:
        raise ConfigError(f"MODEL.NUM_CLASSES: {class_count_mismatch(cfg, len(images.classes))}")
    return images


def find_notes(cfg, images: ImageDataset, launch: Launch, train: bool, name: str = MAIN) -> Iterator[str]:
    """Yield warnings about the data; raise BadImageError for broken files if DATA.ON_BAD_IMAGE is not skip."""
    key = ("TRAIN.DATASET" if train else "TEST.DATASET") + (f" of loader {name}" if name != MAIN else "")
    yield from (f"{key}: {note}" for note in images.notes())
    if images.has_files or images.holds_files:
        from distribuuuu.data.datasets.file_check import check_images, find_reduced

        try:
            broken = check_images(cfg, images, train)
            if broken and cfg.DATA.ON_BAD_IMAGE != "skip":
                raise BadImageError(f"{key}: {broken}; fix: repair or remove them, or set DATA.ON_BAD_IMAGE skip")
        except BadImageError as error:
            error.one_process = launch.local_rank == 0  # the disk may be local to this machine
            raise
        reduced = find_reduced(images, build_decode_options(cfg))
        yield from (f"{key}: {note}" for note in (broken, reduced) if note)
    if train and len(images.classes) == 1 and name == MAIN:
        yield f"{key}: there is only one class, {images.classes[0]}: every model has a top-1 of 100"
    if train or images.targets != "label":
        return
    labels = [images.label(index) for index in range(len(images))]
    present = set(labels) if all(isinstance(label, Integral) for label in labels) else range(len(images.classes))
    if missing := [name for label, name in enumerate(images.classes) if label not in present]:
        named = f"{len(missing)} of {len(images.classes)} classes: {first_few(missing)}"
        yield f"{key}: no image of {named}; they are not evaluated"


def build_sampler(
    cfg, images: ImageDataset, launch: Launch, train: bool, plan: BatchPlan | None = None
) -> EvalSampler | ResumableDistributedSampler:
    """Return the sampler of this process; raise ConfigError if a step takes more images than there are."""
    num_images = len(images)
    if not train:
        return EvalSampler(num_images, cfg.TEST.BATCH_SIZE, launch.rank, launch.world_size)
    plan = plan or plan_of(cfg, launch.world_size)
    check_num_images(cfg, plan, num_images)
    balance = None
    if cfg.DATA.SAMPLING != "uniform":
        from distribuuuu.data.class_balance import CLASS_POWERS, ClassBalance

        labels = [int(images.label(index)) for index in range(num_images)]
        balance = ClassBalance(labels, CLASS_POWERS[cfg.DATA.SAMPLING])
    alternating = cfg.DATA.FLIP if cfg.DATA.FLIP_MODE == "alternating" else None
    sampler = ResumableDistributedSampler(
        num_images, plan, launch.rank, cfg.DATA.REPEATS, depends_on_epoch(cfg), balance, alternating
    )
    if cfg.OPTIM.LAST_EPOCH < 1:
        sampler.last = cfg.OPTIM.MAX_EPOCH - 1, cfg.OPTIM.LAST_EPOCH
    return sampler
