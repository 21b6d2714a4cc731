"""Timing of the parts of a training step: model, all-reduce of the gradients, loader, model and loader combined.

Everything is built as for training, but no checkpoint is read or written.
"""

import itertools
import json
import logging
import math
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from distribuuuu import trainer
from distribuuuu.commands.plan.timing import (
    MEASURE_S,
    diagnose_bottleneck,
    endless_batches,
    find_remedies,
    time_calls,
)
from distribuuuu.data.loader import TrainLoader, build_loader
from distribuuuu.data.make_batch import PREFETCH, count_workers
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.process_group import pick_device
from distribuuuu.engine.build import build_training, open_run
from distribuuuu.engine.preflight import resolve_num_classes, resolve_preprocessing
from distribuuuu.engine.run_description import describe_model
from distribuuuu.files.atomic_file import replacing
from distribuuuu.launch.detect import detect_launch
from distribuuuu.optim.schedules import set_lr

logger = logging.getLogger(__name__)

# Line width of the report; with the time before it, a line has 80 columns.
_WIDTH = 71
_NAMES = {
    "forward_backward": "model: forward + backward",
    "optimizer": "optimizer step",
    "step": "training step, batch in memory",
    "loader": "loader: normalized, on the device",
    "together": "loader + model",
}


def measure_steps(cfg) -> dict:
    """Measure the parts, log a table and a diagnosis, write OUT_DIR/timing.json and return its content.

    Raises:
        ConfigError: the data or the model contradicts the config, or an image is broken.
    """
    cfg = resolve_preprocessing(resolve_num_classes(cfg))
    launch = detect_launch()
    device = pick_device(launch.local_rank)
    loader = build_loader(cfg, launch, device, train=True)
    with open_run(cfg, launch, device, log_name=""):
        step = Step(cfg, loader)
        describe_model(cfg, step.state.model)
        logger.info("step: %s", loader.plan)
        logger.info("measuring: about a minute if a step takes less than a second")
        # A data set on the device has no workers during the steps.
        num_workers, max_workers = (
            0 if cfg.DATA.LOADER == "device" else count_workers(number, launch) for number in (cfg.TRAIN.WORKERS, -1)
        )
        result = measure(step, loader, num_workers)
        speeds = result["step"]["images_per_s"], result["loader"]["images_per_s"], result["wait"]
        remedies = find_remedies(cfg, loader.images, num_workers)
        result["verdict"] = diagnose_bottleneck(*speeds, num_workers, max_workers, remedies)
        result |= {"workers": num_workers, "most_workers": max_workers}
        for line in format_report(result):
            logger.info("%s", line)
        if dist.is_main():
            with replacing(Path(cfg.OUT_DIR) / "timing.json", "w", encoding="utf-8") as file:
                file.write(json.dumps(result, indent=2) + "\n")
    return result


class Step:
    """Parts of a training step. The learning rate is 0, so the weights and therefore the speed stay the same."""

    def __init__(self, cfg, loader: TrainLoader):
        self.training = build_training(cfg, loader, loader.zero_images(loader.plan.micro_batch)[:1], latest=None)
        self.state, self.task = self.training.state, self.training.task
        set_lr(self.state.optimizer, 0.0)
        self.training.model.train()
        # Not zeros, with which a GPU draws less power, and is therefore faster, than with images.
        self.batch = loader.sample_batch()

    def backward(self, all_reduce: bool = True) -> None:
        """Compute the gradients of a step, with or without their all-reduce."""
        trainer.Step(self.training, itertools.repeat(self.batch), 0).gradients(all_reduce)

    def update(self, batches: Iterator) -> None:
        """Run a complete training step."""
        trainer.take_step(self.training, batches, 0)
        for average in self.state.averages.values():
            average.update(self.state.global_batch, images_seen=self.state.global_batch)


def measure(step: Step, loader: TrainLoader, num_workers: int) -> dict:
    """Return the seconds and the images/s of each part. A collective."""
    plan = loader.plan

    def time_part(call: Callable[[], object], group: int = 1) -> dict:
        seconds = time_calls(call, loader.device, group)
        return {"seconds": seconds, "images": plan.global_batch, "images_per_s": plan.global_batch / seconds}

    parts = {"forward_backward": time_part(step.backward)}
    if dist.is_distributed():
        parts["not_exchanged"] = time_part(lambda: step.backward(all_reduce=False))
    in_memory = itertools.repeat(step.batch)
    parts |= {"optimizer": time_part(step.state.optimizer.step), "step": time_part(lambda: step.update(in_memory))}
    # Steps that the workers have prefetched; shorter blocks would overestimate the loader.
    ahead = max(1, math.ceil(PREFETCH * num_workers / plan.accum_steps))
    batches = endless_batches(loader, step.state.stream_seed)
    parts["loader"] = time_part(lambda: [next(batches) for _ in range(plan.accum_steps)], ahead)
    if parts["loader"]["seconds"] < parts["step"]["seconds"]:  # batches are always ready, and a few steps suffice
        ahead = min(ahead, max(1, int(MEASURE_S / parts["step"]["seconds"])))
    loader.pop_data_time()
    started = time.perf_counter()
    parts["together"] = time_part(lambda: step.update(batches), ahead)
    wait = min(1.0, loader.pop_data_time() / (time.perf_counter() - started))
    return {**parts, "wait": dist.all_reduce_max([wait])[0], "processes": plan.world_size}


def format_report(result: dict) -> Iterator[str]:
    """Yield the table of the measurements in timing.json, line by line, and the diagnosis."""
    yield f"{'per step':<36} {'images':>8} {'ms':>10} {'images/s':>10}"
    for key, name in _NAMES.items():
        part = result[key]
        yield f"{name:<36} {part['images']:>8,} {1e3 * part['seconds']:>10.2f} {part['images_per_s']:>10,.0f}"
    yield f"of which waiting for data: {result['wait']:.0%}"
    if "not_exchanged" in result:
        exposed_ms = 1e3 * (result["forward_backward"]["seconds"] - result["not_exchanged"]["seconds"])
        yield f"all-reduce of the gradients: {max(0.0, exposed_ms):.2f} ms of the backward pass"
    yield from textwrap.wrap(f"diagnosis: {result['verdict']}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
