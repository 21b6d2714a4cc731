"""Measurements of a planned run, in processes of their own, and what follows for its hours and its bottleneck."""

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from distribuuuu.config import Config, ConfigError, Problem
from distribuuuu.config.derived import total_steps
from distribuuuu.data.batch import PREFETCH
from distribuuuu.data.batch_plan import BatchPlan, plan_of
from distribuuuu.data.loader import count_workers
from distribuuuu.distributed.sharding import inference
from distribuuuu.engine.flops import count_forward, measure_utilization
from distribuuuu.engine.preflight import resolve_cfg
from distribuuuu.engine.run import Run, begin_epoch
from distribuuuu.engine.state import record_event, seconds_between
from distribuuuu.engine.trial_run import available_memory, in_fresh_process, read_peak, trial_run
from distribuuuu.launch.detect import Launch
from distribuuuu.models import count_parameters
from distribuuuu.optim.schedules import set_lr
from distribuuuu.trainer import take_step

# Seconds of the training steps, and of an evaluation.
STEPS_S, EVALUATION_S = 12.0, 4.0
_ASSUMED = (
    "as fast as the one measured here, without DIST.SHARD, with as many cores and workers; communication costs no time"
)
# Fractions of the time of the steps above which the loader is the bottleneck, and of all time for the evaluation.
MAX_DATA_FRACTION, MAX_EVALUATION = 0.1, 0.5
_HERE = Launch("plan")


def measure_and_plan(cfg: Config, num_processes: int) -> dict[str, Any]:
    """Return the plan of a run on a number of processes, see `plan_run`.

    Raises:
        ConfigError: the config contradicts the model or the data, or memory does not suffice.
    """
    cfg = resolve_cfg(cfg, trains=True)
    plan = plan_of(cfg, num_processes)
    found = in_fresh_process(measure_run, cfg, plan)
    if isinstance(found, str):
        fix = "fix: lower it; with TRAIN.GLOBAL_BATCH_SIZE, the hyperparameters remain valid"
        raise ConfigError(Problem("TRAIN.BATCH_SIZE", f"out of memory with {plan}: {found}; {fix}"))
    found["memory"]["free_mib"] = available_memory() / 2**20
    return plan_run(cfg, plan, found)


def measure_run(folder: str, cfg: Config, plan: BatchPlan) -> dict[str, Any]:
    """Return the measurements of this process for `plan_run`; `folder` is OUT_DIR.

    They are `start_s`, `epoch_s`, `evaluation_s` of all kinds of weights, `checkpoint_s` and others. The process takes
    its share of the images of a step in `plan`.
    """
    with trial_run(cfg, _HERE, plan, folder) as run:
        state, device, found = run.state, run.train_loader.device, {"start_s": run.state.seconds, **_describe(run)}
        # The last epoch has the largest images.
        epoch = cfg.OPTIM.MAX_EPOCH - 1 if cfg.TRAIN.IM_SIZE_START else 0
        first, _ = _train(run, epoch, 0.0)
        num_workers = 0 if cfg.DATA.LOADER == "device" else count_workers(cfg.TRAIN.WORKERS, _HERE)
        ahead = max(1, math.ceil(PREFETCH * num_workers / plan.accum_steps))  # steps that the workers prepare ahead
        ends, parts = _train(run, epoch, STEPS_S)
        found["step_s"] = step_seconds(ends, ahead)
        found["epoch_s"] = extrapolate(ends, found["images"]["train"] // plan.global_batch, ahead)
        found["start_s"] += max(0.0, first[-1] - len(first) * found["step_s"])  # the warm-up
        started = time.perf_counter()
        result = {"count": 1, "loss": 1.0, **dict.fromkeys(run.task.eval_metrics, 1.0)}
        results = dict.fromkeys(state.models, result)  # as if each kind of weights were the best
        state.finish_epoch(results)
        run.save(results)
        found["checkpoint_s"] = time.perf_counter() - started
        found["evaluation_s"] = sum(_evaluate(run, model, plan, ahead) for model in state.models.values())
        run.checkpoints.finish()
        found["memory"] = {"peak_mib": read_peak(device) / 2**20, "of": "cuda" if device.type == "cuda" else "host"}
        found["images_per_s"] = plan.per_process / found["step_s"]
        found |= measure_utilization(run, found["images_per_s"])
        found["parts"] = {**parts, "other": max(0.0, 1 - sum(parts.values()))}
        is_data, waited = parts["data"] >= MAX_DATA_FRACTION, f"{parts['data']:.0%} of the steps is waiting"
        advice = f"the loader: {waited}; fix: see docs/large_data.md#workers-and-decoders"
        return found | {"bottleneck": advice if is_data else f"the model: {waited} for data"}


def _describe(run: Run) -> dict[str, Any]:
    """Return the size of the model and of the data."""
    model = run.state.model
    flops, _ = count_forward(model, run.train_loader.zero_images(1))
    size = {"arch": run.cfg.MODEL.ARCH, "params_m": count_parameters(model) / 1e6, "gflops": flops / 1e9}
    images = {"train": len(run.train_loader.images), "val": len(run.val_loader.images)}
    return {"model": size, "images": images}


def _timed(items: Iterable, ends: list[float], limit_s: float, device: torch.device) -> Iterator:
    """Yield at least two items until the time is over, then append the seconds from the start to the end of each.

    On CUDA, the device records the ends, and the host waits for it only once, after the last item.
    """
    started, marks = time.perf_counter(), [_mark(device)]
    for item in items:
        yield item
        marks.append(_mark(device))
        if time.perf_counter() - started > limit_s and len(marks) > 2:
            break
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    ends += [seconds_between(marks[0], mark) for mark in marks[1:]]


def _mark(device: torch.device) -> Any:
    """Return the present time in seconds, after all queued work; on CUDA, an event."""
    if device.type == "mps":
        torch.mps.synchronize()
    return record_event() if device.type == "cuda" else time.perf_counter()


def _train(run: Run, epoch: int, limit_s: float) -> tuple[list[float], dict[str, float]]:
    """Train for some steps of an epoch; return the seconds until the end of each, and the share of each part."""
    state, loader = run.state, run.train_loader
    ends: list[float] = []
    loader.pop_data_time()
    state.clock.pop()
    batches = loader.batches_from(state.seed, epoch, 0)
    begin_epoch(run)
    for step in _timed(range(loader.steps_of(epoch)), ends, limit_s, loader.device):
        set_lr(state.optimizer, run.lr_at(epoch + step / loader.num_steps))
        take_step(run, batches, step)
        state.finish_step()
    state.step = 0
    parts = {"data": loader.pop_data_time(), **state.clock.pop()}
    return ends, {part: seconds / ends[-1] for part, seconds in parts.items()}


def _evaluate(run: Run, model: torch.nn.Module, plan: BatchPlan, ahead: int) -> float:
    """Return the seconds of an evaluation."""
    loader, ends = run.val_loader, list[float]()
    model.eval()
    with inference(model):
        for batch in _timed(loader, ends, EVALUATION_S, loader.device):
            run.task.eval_step(model, batch)
    return extrapolate(ends, -(-len(loader.images) // (plan.world_size * run.cfg.TEST.BATCH_SIZE)), ahead)


# -------------------------------------------------------------------------------------- arithmetic


def extrapolate(ends: Sequence[float], total: int, group: int = 1) -> float:
    """Return the seconds of `total` steps of which the first ones were timed.

    The first group counts, but not in the rate, which is the median over the groups after it.

    Args:
        ends: seconds from the start to the end of each timed step.
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


def plan_run(cfg, plan: BatchPlan, found: dict[str, Any]) -> dict[str, Any]:
    """Return the plan of a run: the measurements `found` of `measure_run`, and what follows from them."""
    epochs, num_steps = cfg.OPTIM.MAX_EPOCH, found["images"]["train"] // plan.global_batch
    steps = total_steps(cfg, num_steps)
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
        "training": found["epoch_s"] * steps / (num_steps or 1),
        "evaluation": num_evaluations * found["evaluation_s"],
        "checkpoints": (epochs + num_evaluations) * found["checkpoint_s"],
    }
    share = seconds["evaluation"] / max(1e-9, sum(seconds.values()))
    result |= {"seconds": seconds, "hours": sum(seconds.values()) / 3600}
    if share > MAX_EVALUATION:
        # With this period, the evaluation takes half of the time.
        period = cfg.TRAIN.EVAL_PERIOD * math.ceil(share / max(1e-3, 1 - share))
        fix = f"TRAIN.EVAL_PERIOD {min(period, epochs)} or fewer validation images"
        result["bottleneck"] = f"evaluation, {share:.0%} of the time; fix: {fix}"
    return result
