"""Arithmetic of a planned run: hours, disk and bottleneck from the measurements of a few steps."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from distribuuuu.config.derived import show_size, total_steps
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.views import build_im_size

_ASSUMED = (
    "as fast as the one measured here, without DIST.SHARD, with as many cores and workers; communication costs no time"
)
# Share of the time from which the evaluation is the bottleneck.
MAX_EVALUATION = 0.5


def sizes_of(cfg) -> list[Any]:
    """Return the side of the training images in each epoch, in pixels; of a rectangle, its size as text."""
    im_size_at, final = build_im_size(cfg), cfg.TRAIN.IM_SIZE
    fixed = final if isinstance(final, int) else show_size(final)
    return [im_size_at(epoch) if im_size_at else fixed for epoch in range(cfg.OPTIM.MAX_EPOCH)]


def epochs_to_measure(sizes: Sequence[int]) -> list[int]:
    """Return an epoch of the smallest and one of the largest size; those between are interpolated."""
    return [sizes.index(size) for size in sorted({min(sizes), max(sizes)})]


def extrapolate(ends: Sequence[float], total: int, group: int = 1) -> float:
    """Return the seconds of `total` steps of which the first ones were timed.

    The first group counts, but not in the rate, which is the median over the groups after it.

    Args:
        ends: seconds from the start to the end of each timed step.
        total: number of steps.
        group: steps whose batches the workers prepare ahead.
    """
    if len(ends) >= total:
        return ends[total - 1] if total else 0.0
    return ends[-1] + (total - len(ends)) * step_seconds(ends, group)


def step_seconds(ends: Sequence[float], group: int) -> float:
    """Return the seconds of a step after the first ones; see `extrapolate`."""
    group = max(1, min(group, (len(ends) - 1) // 2))
    starts = range(group - 1, len(ends) - group, group)
    return statistics.median((ends[at + group] - ends[at]) / group for at in starts) if starts else ends[0]


def interpolate(known: dict[int, float], size: int) -> float:
    """Return the seconds at an image side: linear in the number of pixels between the measured sides."""
    low, high = min(known), max(known)
    share = (size**2 - low**2) / (high**2 - low**2) if high > low else 0.0
    return known[low] + share * (known[high] - known[low])


def count_checkpoints(cfg, num_steps: int) -> int:
    """Return the number of checkpoint files at most, with the one that is being written."""
    checkpoint, epochs = cfg.CHECKPOINT, cfg.OPTIM.MAX_EPOCH
    per_epoch = 1 + (2 * num_steps // checkpoint.EVERY_STEPS if checkpoint.EVERY_STEPS else 0)
    older = epochs // checkpoint.KEEP_EVERY if checkpoint.KEEP_EVERY else 0
    return min(checkpoint.KEEP_LAST + older + 1, epochs * per_epoch)


def plan_run(cfg, plan: BatchPlan, found: dict[str, Any]) -> dict[str, Any]:
    """Return the plan of a run: the measurements that are shown, and what follows from them.

    Args:
        cfg: the config.
        plan: the images of a step.
        found: the measurements of `measure_run`: `images`, `start_s`, `epoch_s` by image side, `evaluation_s` of all
            kinds of weights, `last_s` of what follows the last epoch, `checkpoint_s`, `checkpoint_mib`, `best_mib`,
            `bottleneck`.
    """
    epochs, num_steps = cfg.OPTIM.MAX_EPOCH, found["images"]["train"] // plan.global_batch
    steps, sizes = total_steps(cfg, num_steps), sizes_of(cfg)
    result = {
        **found,
        "epochs": epochs,
        "steps_per_epoch": num_steps,
        "steps": steps,
        "images_seen": steps * plan.global_batch,
        "batch": {**vars(plan), "global_batch": plan.global_batch},
        "assumption": f"{plan.world_size} processes, each {_ASSUMED}" if plan.world_size > 1 else None,
    }
    num_evaluations = -(-epochs // cfg.TRAIN.EVAL_PERIOD)
    seconds = {
        "start": found["start_s"],
        "training": sum(interpolate(found["epoch_s"], size) for size in sizes) * steps / (epochs * num_steps or 1),
        "evaluation": num_evaluations * found["evaluation_s"] + found["last_s"],
        "checkpoints": (epochs + num_evaluations) * found["checkpoint_s"],
    }
    share, files = seconds["evaluation"] / max(1e-9, sum(seconds.values())), count_checkpoints(cfg, num_steps)
    disk = files * found["checkpoint_mib"] + found["best_mib"]
    result |= {"seconds": seconds, "hours": sum(seconds.values()) / 3600, "checkpoints": files, "disk_mib": disk}
    if share > MAX_EVALUATION:
        # With this period, the evaluation takes half of the time.
        period = cfg.TRAIN.EVAL_PERIOD * math.ceil(share / max(1e-3, 1 - share))
        fix = f"TRAIN.EVAL_PERIOD {min(period, epochs)} or fewer validation images"
        result["bottleneck"] = f"evaluation, {share:.0%} of the time; fix: {fix}"
    return result
