"""The arithmetic of a step: how a global batch falls into processes and accumulated micro-batches."""

from dataclasses import dataclass

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import counted

# The values of MODEL.COMPILE that replay CUDA graphs.
GRAPH_MODES = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class BatchPlan:
    """How many images a step takes: global_batch = micro_batch x accum_steps x world_size."""

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

    The micro-batch is the greatest divisor of a process's share that is at most `batch_size`.

    Raises:
        ConfigError: the global batch does not divide among the processes, or their share only into micro-batches
            of less than half of `batch_size`; says what would fit.
    """
    if not global_batch_size:
        return BatchPlan(batch_size, 1, world_size)
    plan = _divide(batch_size, global_batch_size, world_size)
    if plan:
        return plan
    share, rest = divmod(global_batch_size, world_size)
    processes, images = counted(world_size, "process"), counted(share, "image")
    why = f"gives each of {processes} {images}, which divide only into small micro-batches"
    nearest = " or ".join(map(str, _nearest_that_fit(batch_size, global_batch_size, world_size)))
    message = f"{global_batch_size} {f'is not divisible by {processes}' if rest else why} (TRAIN.BATCH_SIZE"
    raise ConfigError(Problem("TRAIN.GLOBAL_BATCH_SIZE", f"{message} {batch_size}); {nearest} would fit"))


def check_pairs(cfg, plan: BatchPlan) -> None:
    """Check that micro-batches fall into pairs where a config mixes images.

    Raises:
        ConfigError: they are of an odd number of images.
    """
    mixing = tuple(f"AUG.{key}" for key in ("MIXUP", "CUTMIX") if cfg.AUG[key])
    if mixing and plan.micro_batch % 2:
        message = f"images are mixed in pairs, but {plan.micro_batch} at a time are odd ({plan}); set"
        remedy = "TRAIN.BATCH_SIZE, or TRAIN.GLOBAL_BATCH_SIZE, so that they are even"
        raise ConfigError(Problem(mixing, f"{message} {remedy}"), cfg.origins)


def check_num_images(cfg, plan: BatchPlan, num_images: int) -> None:
    """Check that the training set has the images of at least one step.

    Raises:
        ConfigError: it has fewer.
    """
    if num_images < plan.global_batch:
        key = "TRAIN.GLOBAL_BATCH_SIZE" if cfg.TRAIN.GLOBAL_BATCH_SIZE else "TRAIN.BATCH_SIZE"
        message = f"one step takes {plan.global_batch} images ({plan}), but the training set has {num_images}"
        raise ConfigError(Problem(key, f"{message}; take fewer"), cfg.origins)


def check_accumulation(cfg, plan: BatchPlan) -> None:
    """Check that no gradients are to accumulate over replays of a CUDA graph, whose memory the next replay takes.

    Raises:
        ConfigError: they are.
    """
    mode = cfg.MODEL.COMPILE
    if plan.accum_steps > 1 and mode in GRAPH_MODES:
        message = f"{mode} replays CUDA graphs, over which gradients do not accumulate ({plan})"
        remedy = f"set it to default, or TRAIN.BATCH_SIZE to {plan.per_process}"
        raise ConfigError(Problem("MODEL.COMPILE", f"{message}; {remedy}"), cfg.origins)


def _divide(batch_size: int, global_batch_size: int, world_size: int) -> BatchPlan | None:
    share, rest = divmod(global_batch_size, world_size)
    if rest or not share:
        return None
    micro_batch = next(size for size in range(min(share, batch_size), 0, -1) if share % size == 0)
    if micro_batch * 2 < min(share, batch_size):
        return None
    return BatchPlan(micro_batch, share // micro_batch, world_size)


def _nearest_that_fit(batch_size: int, global_batch_size: int, world_size: int) -> list[int]:
    """Return the nearest global batches below and above that can be divided."""
    share = global_batch_size // world_size
    lower = (size * world_size for size in range(share, 0, -1))
    upper = (size * world_size for size in range(share + 1, share + batch_size + 1))
    found = [next((size for size in sizes if _divide(batch_size, size, world_size)), None) for sizes in (lower, upper)]
    return [size for size in found if size]
