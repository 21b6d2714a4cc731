"""Measurements of a planned run: a few of its steps and evaluation batches, in processes of their own."""

import itertools
import math
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from distribuuuu.commands.plan.bottleneck import Speeds, diagnose_bottleneck, find_remedies
from distribuuuu.commands.plan.run_plan import epochs_to_measure, extrapolate, plan_run, sizes_of, step_seconds
from distribuuuu.commands.plan.timing import endless_batches, synchronize, time_calls
from distribuuuu.config import Config, ConfigError, Problem
from distribuuuu.config.config_node import changed
from distribuuuu.config.declaration import AUTO
from distribuuuu.data.batch_plan import BatchPlan, plan_of
from distribuuuu.data.workers import PREFETCH, count_workers
from distribuuuu.distributed.process_group import find_device
from distribuuuu.distributed.sharding import inference
from distribuuuu.engine.auto_batch_size import (
    available_memory,
    in_fresh_process,
    list_micro_batches,
    read_peak,
    search_here,
    trial_run,
    with_number,
)
from distribuuuu.engine.precise_bn import compute_precise_statistics
from distribuuuu.engine.resume import capture
from distribuuuu.engine.run import Run
from distribuuuu.engine.run_description import list_unused_speed
from distribuuuu.launch.detect import Launch
from distribuuuu.models import check_model, count_parameters
from distribuuuu.optim.schedules import set_lr
from distribuuuu.records.run_log import progress
from distribuuuu.trainer import take_step

# Seconds of the training steps, over all image sides, and of an evaluation.
STEPS_S, EVALUATION_S = 12.0, 4.0
_HERE = Launch("plan")


def measure_and_plan(cfg: Config, num_processes: int) -> dict[str, Any]:
    """Return the plan of a run on a number of processes, see `plan_run`; no hours if it does not fit into host memory.

    Raises:
        ConfigError: the config contradicts the model or the data, or memory does not suffice for a few images.
    """
    check_model(cfg)
    if cfg.TRAIN.BATCH_SIZE == AUTO:
        cfg = with_number(cfg, search_here(cfg, take_step, _HERE, list_micro_batches(cfg, num_processes)))
    plan, free = plan_of(cfg, num_processes), available_memory()
    predicted, found = None, {}
    if find_device(0).type != "cuda":
        micro, accum = plan.micro_batch, min(2, plan.accum_steps)
        trials = [BatchPlan(max(micro // part, least), accum, plan.world_size) for part, least in ((4, 2), (2, 4))]
        with ThreadPoolExecutor(2) as pool:
            low, high = pool.map(lambda trial: _measure(cfg, trial, False), trials)
        factor = (micro - trials[0].micro_batch) / (trials[1].micro_batch - trials[0].micro_batch)
        predicted, found = low["peak"].scaled(high["peak"], factor), high
    if predicted is None or predicted.used < free:
        found = _measure(cfg, plan, True)
    peak, fits = found.pop("peak"), "epoch_s" in found
    own = max(predicted.own if predicted else 0, peak.own if fits else 0)
    memory = {"peak_mib": own / 2**20, "predicted_mib": predicted and predicted.own / 2**20, "free_mib": free / 2**20,
              "workers_mib": peak.workers / 2**20, "of": "cuda" if peak.limit else "host", "fits": fits}  # fmt: skip
    return plan_run(cfg, plan, {**found, "memory": memory})


def _measure(cfg: Config, plan: BatchPlan, times: bool) -> dict[str, Any]:
    found = in_fresh_process(measure_run, cfg, plan, times)
    if isinstance(found, str):
        fix = f"; measured without DIST.SHARD {cfg.DIST.SHARD}" if cfg.DIST.SHARD != "none" else ""
        raise ConfigError(Problem("TRAIN.BATCH_SIZE", f"out of memory with {plan}: {found}{fix}; fix: lower it"))
    return found


def measure_run(folder: str, cfg: Config, plan: BatchPlan, times: bool) -> dict[str, Any]:
    """Return the measurements of this process for `plan_run`, and its peak memory as "peak".

    Args:
        folder: OUT_DIR.
        cfg: the config.
        plan: the images of a step, of which this process takes its share; the batches of the evaluation shrink with it.
        times: False: two steps and two batches of the evaluation, for the memory only.
    """
    sizes, full = sizes_of(cfg) or [cfg.TRAIN.IM_SIZE], plan_of(cfg, plan.world_size)
    cfg = changed(cfg, {"TEST.BATCH_SIZE": max(1, cfg.TEST.BATCH_SIZE * plan.micro_batch // full.micro_batch)})
    with trial_run(cfg, _HERE, plan, folder) as run:
        state, device, found = run.state, run.train_loader.device, {"start_s": run.state.seconds, **_describe(run)}
        epochs = epochs_to_measure(sizes)[0 if times else -1 :]
        waits: list[float] = []
        first, ends, waited = _train(run, epochs[0], 0.0, waits), {}, 0.0
        if times:
            ends = {sizes[epoch]: _train(run, epoch, STEPS_S / len(epochs), waits) for epoch in epochs}
            waited = waits[-1] / ends[sizes[epochs[-1]]][-1]
            ahead, num_steps = count_ahead(run), found["images"]["train"] // full.global_batch
            found["step_s"] = {size: step_seconds(one, ahead) for size, one in ends.items()}
            found["epoch_s"] = {size: extrapolate(one, num_steps, ahead) for size, one in ends.items()}
            found["start_s"] += max(0.0, first[-1] - len(first) * found["step_s"][sizes[epochs[0]]])  # the warm-up
        started = time.perf_counter()
        result = {"count": 1, "loss": 1.0, **dict.fromkeys(run.task.eval_metrics, 1.0)}
        state.finish_epoch(dict.fromkeys(state.models, result))  # as if each kind of weights were the best
        run.checkpoints.save(capture(run))
        found["checkpoint_s"] = time.perf_counter() - started
        evaluations = [_evaluate(run, model, EVALUATION_S * times, full) for model in state.models.values()]
        run.checkpoints.finish()
        found["unused"] = list_unused_speed(cfg, _HERE) if device.type == "cuda" else []
        found |= {"peak": read_peak(device), "evaluation_s": sum(evaluations)}
        found["last_s"] = evaluations[-1] if cfg.TEST.SAVE_PREDICTIONS and device.type == "cpu" else 0.0
        files = {"checkpoint_mib": run.checkpoints.list(), "best_mib": Path(folder).glob("best*")}
        found |= {name: sum(path.stat().st_size for path in paths) / 2**20 for name, paths in files.items()}
        combined = full.per_process / found["step_s"][sizes[epochs[-1]]] if times else 0.0
        return found | (_measure_speeds(run, combined, waited) if times else {})


def _describe(run: Run) -> dict[str, Any]:
    """Return the size of the model and of the data."""
    model, image = run.state.model.eval(), run.train_loader.zero_images(1)
    with torch.compiler.set_stance("force_eager"), inference(model), FlopCounterMode(display=False) as counter:
        model(image)
    size = {"arch": run.cfg.MODEL.ARCH, "params_m": count_parameters(model) / 1e6}
    images = {"train": len(run.train_loader.images), "val": len(run.val_loader.images)}
    return {"model": {**size, "gflops": counter.get_total_flops() / 1e9}, "images": images}


def _timed(items: Iterable, ends: list[float], limit_s: float, device: torch.device) -> Iterator:
    """Yield at least two items until the time is over, then append the seconds from the start to the end of each.

    On CUDA, the device records the ends, and the host waits for it only once, after the last item.
    """
    started, marks = time.perf_counter(), [_mark(device)]
    with progress(None, "measuring", round(limit_s), unit="s", disable=None if limit_s >= 1 else True) as bar:
        for item in items:
            yield item
            marks.append(_mark(device))
            elapsed = time.perf_counter() - started
            bar.update(min(elapsed, limit_s) - bar.n)
            if elapsed > limit_s and len(marks) > 2:
                break
    synchronize(device)
    first = marks[0]
    ends += [mark - first if isinstance(mark, float) else 1e-3 * first.elapsed_time(mark) for mark in marks[1:]]


def _mark(device: torch.device) -> Any:
    """Return the present time in seconds, after all queued work; on CUDA, an event."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    synchronize(device)
    return time.perf_counter()


def _train(run: Run, epoch: int, limit_s: float, waits: list[float]) -> list[float]:
    """Train for some steps from the start of an epoch; return the seconds until the end of each.

    The seconds spent waiting for data are appended to `waits`.
    """
    state, loader = run.state, run.train_loader
    ends: list[float] = []
    loader.pop_data_time()
    batches = loader.batches_from(state.stream_seed, epoch, 0)
    run.model.train()
    for step in _timed(range(loader.steps_of(epoch)), ends, limit_s, loader.device):
        set_lr(state.optimizer, run.lr_at(epoch + step / loader.num_steps))
        take_step(run, batches, step)
        state.finish_step(loader.num_steps)
    state.step = 0
    waits.append(loader.pop_data_time())
    return ends


def _evaluate(run: Run, model: torch.nn.Module, limit_s: float, plan: BatchPlan) -> float:
    """Return the seconds of an evaluation, with the batch-norm statistics before it."""
    cfg, state, loader, seconds = run.cfg, run.state, run.val_loader, 0.0
    if num := cfg.MODEL.PRECISE_BN:
        ends: list[float] = []
        images = _timed(run.train_loader.iter_images(state.stream_seed, 0, num), ends, limit_s, loader.device)
        compute_precise_statistics(model, images, state.precision.autocast)
        seconds = extrapolate(ends, -(-num // plan.global_batch) * plan.accum_steps, count_ahead(run))
    model.eval()
    ends = []
    with inference(model):
        for batch in _timed(loader, ends, limit_s, loader.device):
            run.task.eval_step(model, batch)
    num_batches = -(-len(loader.images) // (plan.world_size * cfg.TEST.BATCH_SIZE))
    return seconds + extrapolate(ends, num_batches, count_ahead(run))


def count_ahead(run: Run) -> int:
    """Return the number of steps that the workers prepare ahead."""
    workers = 0 if run.cfg.DATA.LOADER == "device" else count_workers(run.cfg.TRAIN.WORKERS, _HERE)
    return max(1, math.ceil(PREFETCH * workers / run.train_loader.plan.accum_steps))


def _measure_speeds(run: Run, combined: float, waited: float) -> dict[str, Any]:
    """Return the images/s of the model and the loader alone, and the bottleneck of a step.

    Args:
        run: the run.
        combined: images/s of both together.
        waited: fraction of that time that was spent waiting for data.
    """
    cfg, loader, plan = run.cfg, run.train_loader, run.train_loader.plan
    on_gpu = loader.device.type == "cuda"
    batches = itertools.repeat(loader.sample_batch())
    run.model.train()
    model = plan.per_process / time_calls(lambda: take_step(run, batches, 0), loader.device).seconds
    speeds = {"model": model, "loader": None, "together": combined}
    if cfg.DATA.LOADER == "device":
        return {"images_per_s": speeds, "bottleneck": f"model-bound: the model processes {model:,.0f} images/s"}
    stream = map(loader.to_device, endless_batches(loader, run.state.stream_seed))
    timed = time_calls(lambda: [next(stream) for _ in range(plan.accum_steps)], loader.device, count_ahead(run))
    speeds["loader"] = rate = plan.per_process / timed.seconds
    num_workers, most = (count_workers(number, _HERE) for number in (cfg.TRAIN.WORKERS, -1))
    remedies = find_remedies(cfg, loader.images, num_workers)
    bottleneck = diagnose_bottleneck(Speeds(model, rate, combined, waited), num_workers, most, remedies, not on_gpu)
    return {"images_per_s": speeds, "bottleneck": bottleneck}
