"""Batch arithmetic: how a global batch is divided into processes and accumulated micro-batches."""

from dataclasses import dataclass

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import counted
from distribuuuu.config.options import GRAPH_MODES


@dataclass(frozen=True)
class BatchPlan:
    """The number of images in a step: global_batch = micro_batch x accum_steps x world_size."""

    micro_batch: int
    accum_steps: int
    world_size: int

    @property
    def per_process(self) -> int:
        """Images of one process in one step."""
        return self.micro_batch * self.accum_steps

    @property
    def global_batch(self) -> int:
        """Images of all processes in one step."""
        return self.per_process * self.world_size

    def __str__(self) -> str:
        return (
            f"global batch {self.global_batch:,} = {counted(self.micro_batch, 'image')}"
            f" x {counted(self.accum_steps, 'micro-batch')} x {counted(self.world_size, 'process')}"
        )


def plan_batches(batch_size: int, global_batch_size: int, world_size: int) -> BatchPlan:
    """Return the plan for TRAIN.BATCH_SIZE and TRAIN.GLOBAL_BATCH_SIZE (0: not set) on `world_size` processes.

    The micro-batch is the largest divisor of the images per process that is at most `batch_size`. If it is less than
    half of that, or the processes do not divide the global batch, a ConfigError names a size near it that fits.
    """
    if not global_batch_size:
        return BatchPlan(batch_size, 1, world_size)
    share, remainder = divmod(global_batch_size, world_size)
    most = min(share, batch_size)
    micro_batch = next((size for size in range(most, 0, -1) if share % size == 0), 0)
    if remainder or not share or 2 * micro_batch < most:
        per_step = batch_size * world_size
        found = f"got {global_batch_size} on {counted(world_size, 'process')}; expected a multiple of {world_size}"
        fix = f"fix: set it to {max(1, round(global_batch_size / per_step)) * per_step}"
        message = f"{found} that divides into micro-batches of about TRAIN.BATCH_SIZE {batch_size} images; {fix}"
        raise ConfigError(Problem("TRAIN.GLOBAL_BATCH_SIZE", message))
    return BatchPlan(micro_batch, share // micro_batch, world_size)


def plan_of(cfg, world_size: int) -> BatchPlan:
    """Return the plan of a config."""
    return plan_batches(cfg.TRAIN.BATCH_SIZE, cfg.TRAIN.GLOBAL_BATCH_SIZE, world_size)


def check_pairs(cfg, plan: BatchPlan) -> None:
    """Raise ConfigError if the config mixes images in pairs and micro-batches have an odd number of images."""
    mixing = tuple(f"AUG.{key}" for key in ("MIXUP", "CUTMIX") if cfg.AUG[key])
    if mixing and plan.micro_batch % 2:
        found = f"got micro-batches of {counted(plan.micro_batch, 'image')} ({plan}); expected an even number, since"
        message = f"{found} images are mixed in pairs; fix: change TRAIN.BATCH_SIZE or TRAIN.GLOBAL_BATCH_SIZE"
        raise ConfigError(Problem(mixing, message), cfg.origins)


def check_num_images(cfg, plan: BatchPlan, num_images: int) -> None:
    """Raise ConfigError if the training set has fewer images than one step takes."""
    if num_images < plan.global_batch:
        key = "TRAIN.GLOBAL_BATCH_SIZE" if cfg.TRAIN.GLOBAL_BATCH_SIZE else "TRAIN.BATCH_SIZE"
        most = num_images // plan.world_size * (plan.world_size if cfg.TRAIN.GLOBAL_BATCH_SIZE else 1)
        expected = f"expected at most {num_images}, the size of the training set; fix: lower it"
        expected += f" to {most} or less" if most else ""
        message = f"got {plan.global_batch} images per step ({plan}); {expected}"
        raise ConfigError(Problem(key, message), cfg.origins)


def check_graphs(cfg, plan: BatchPlan) -> None:
    """Raise ConfigError if CUDA graphs cannot be used as MODEL.COMPILE says.

    Replays of a graph overwrite the memory of gradients that accumulate; the graph of a step holds no communication.
    """
    mode = cfg.MODEL.COMPILE
    if plan.accum_steps > 1 and mode in GRAPH_MODES:
        fix = f"fix: set it to default, or TRAIN.BATCH_SIZE to {plan.per_process}"
        message = f"got {mode}, which replays CUDA graphs, with accumulated gradients ({plan}); {fix}"
        raise ConfigError(Problem("MODEL.COMPILE", message), cfg.origins)
    if plan.world_size > 1 and mode == "step":
        message = f"got step with {plan.world_size} processes; expected one; fix: set it to default or none"
        raise ConfigError(Problem("MODEL.COMPILE", message), cfg.origins)
