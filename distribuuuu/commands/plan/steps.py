"""Timing of the parts of a training step: model, all-reduce of the gradients, loader, model and loader combined.

Everything is built as for training, but no checkpoint is read or written.
"""

import itertools
import json
import logging
import math
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from distribuuuu import trainer
from distribuuuu.commands.plan import timing
from distribuuuu.commands.plan.bottleneck import Speeds, diagnose_bottleneck, find_remedies
from distribuuuu.commands.plan.timing import endless_batches, time_calls
from distribuuuu.config.derived import eval_crop_size, height_and_width
from distribuuuu.config.options import GRAPH_MODES
from distribuuuu.data.batch import Batch
from distribuuuu.data.loader import TrainLoader, build_loader
from distribuuuu.data.workers import PREFETCH, count_workers
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.process_group import pick_device
from distribuuuu.engine.build import build_training, open_run
from distribuuuu.engine.out_of_memory import explain_out_of_memory
from distribuuuu.engine.preflight import resolve_num_classes, resolve_preprocessing
from distribuuuu.engine.run_description import describe_model
from distribuuuu.files.atomic_file import replacing
from distribuuuu.launch.detect import detect_launch
from distribuuuu.optim.schedules import set_lr
from distribuuuu.records.environment import local_peak_bytes

logger = logging.getLogger(__name__)

# Line width of the report; with the time before it, a line has 80 columns.
_WIDTH = 71


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
        result = measure(cfg, step, loader, num_workers)
        model, alone, combined = (result[name]["images_per_s"] for name in ("step", "loader", "together"))
        speeds = Speeds(model, alone, combined, result["wait"])
        remedies = find_remedies(cfg, loader.images, num_workers)
        diagnosis = diagnose_bottleneck(speeds, num_workers, max_workers, remedies, shares_cores=device.type == "cpu")
        result |= {"workers": num_workers, "most_workers": max_workers, "verdict": diagnosis}
        for line in format_report(result, cfg.DIST.COMPRESS):
            logger.info("%s", line)
        if dist.is_main():
            with replacing(Path(cfg.OUT_DIR) / "timing.json", "w", encoding="utf-8") as file:
                file.write(json.dumps(result, indent=2) + "\n")
    return result


class Step:
    """Parts of a training step. The learning rate is 0, so the weights and therefore the speed stay the same."""

    def __init__(self, cfg, loader: TrainLoader):
        self.device = loader.device
        self.accum_steps = loader.plan.accum_steps
        self.training = build_training(cfg, loader, loader.dummy_batch()[:1], latest=None)
        self.state, self.task = self.training.state, self.training.task
        self._replays_graphs = cfg.MODEL.COMPILE in GRAPH_MODES
        set_lr(self.state.optimizer, 0.0)
        self.training.model.train()
        # Not zeros, with which a GPU draws less power, and is therefore faster, than with images.
        self.batch = loader.sample_batch()

    def _mark_step_begin(self) -> None:
        """Mark the beginning of a step for CUDA graphs, so that each forward pass replays the first graph.

        Otherwise, torch records a new graph after each forward pass without a backward pass. Once one step is marked,
        all have to be.
        """
        if self._replays_graphs:
            torch.compiler.cudagraph_mark_step_begin()

    def forward(self) -> None:
        """Compute the logits, ready for a backward pass."""
        for _ in range(self.accum_steps):
            self._mark_step_begin()
            with self.task.autocast():
                self.state.model(self.batch.first_images)

    def _mark_steps(self, batches: Iterator) -> Iterator:
        """Yield the batches, each as the beginning of a step."""
        for batch in batches:
            self._mark_step_begin()
            yield batch

    def backward(self, batches: Iterator, all_reduce: bool = True) -> None:
        """Compute the gradients of a step, with or without their all-reduce."""
        trainer.Step(self.training, self._mark_steps(batches), 0).gradients(all_reduce)

    def update(self, batches: Iterator) -> None:
        """Run a complete training step."""
        trainer.take_step(self.training, self._mark_steps(batches), 0)
        for average in self.state.averages.values():
            average.update(self.state.global_batch, images_seen=self.state.global_batch)

    @torch.inference_mode()
    def evaluate(self, images: torch.Tensor, targets: torch.Tensor) -> None:
        """Run a step of the evaluation."""
        self._mark_step_begin()
        self.task.eval_step(self.state.model, Batch(images, targets))


@explain_out_of_memory("measuring the steps")
def measure(cfg, step: Step, loader: TrainLoader, num_workers: int) -> dict:
    """Return the seconds and the images/s of each part, and the memory in bytes. A collective."""
    plan, device = loader.plan, step.device
    in_memory = itertools.repeat(step.batch)

    def time_part(call: Callable[[], object], num_images: int = plan.global_batch) -> dict:
        return _as_part(dist.all_reduce_max([time_calls(call, device).seconds])[0], num_images)

    parts = {"forward": time_part(step.forward), "forward_backward": time_part(lambda: step.backward(in_memory))}
    if dist.is_distributed():
        parts["not_exchanged"] = time_part(lambda: step.backward(in_memory, all_reduce=False))
    parts |= {"optimizer": time_part(step.state.optimizer.step), "step": time_part(lambda: step.update(in_memory))}
    # Steps that the workers have prefetched; shorter blocks would overestimate the loader.
    ahead = max(1, math.ceil(PREFETCH * num_workers / plan.accum_steps))
    parts |= measure_loader(step, loader, ahead, parts["step"])
    memory = {**count_state_bytes(step), "training": peak_bytes(device)}
    images = evaluation_images(cfg, parts["forward"], device, plan.micro_batch)
    targets = loader.zero_targets(len(images))
    step.state.model.eval()
    parts["evaluation"] = time_part(lambda: step.evaluate(images, targets), len(images) * plan.world_size)
    return {**parts, "memory": {**memory, "evaluation": peak_bytes(device)}, "processes": plan.world_size}


def measure_loader(step: Step, loader: TrainLoader, ahead: int, model: dict) -> dict:
    """Measure the loader alone and together with the model, on one stream of images: none is read twice.

    `ahead` is the number of prefetched steps, `model` the measurement of a step on a batch in memory.
    """
    plan, device = loader.plan, step.device
    pixels = endless_batches(loader, step.state.stream_seed)
    batches = map(loader.to_device, pixels)

    def time_loader(source: Iterator) -> dict:
        seconds = time_calls(lambda: [next(source) for _ in range(plan.accum_steps)], device, ahead).seconds
        images_per_s = sum(dist.gather_objects(plan.per_process / seconds))
        return _as_part(plan.global_batch / images_per_s, plan.global_batch)

    parts = {"pixels": time_loader(pixels), "loader": time_loader(batches)}
    # If the model is slower, batches are always ready, and a few long steps suffice.
    enough = (
        ahead if parts["loader"]["seconds"] > model["seconds"] else max(1, int(timing.MEASURE_S / model["seconds"]))
    )
    combined = time_calls(lambda: step.update(batches), device, min(ahead, enough), loader.pop_data_time)
    seconds, data_fraction = dist.all_reduce_max([combined.seconds, combined.data_fraction])
    return {**parts, "together": _as_part(seconds, plan.global_batch), "wait": data_fraction}


def evaluation_images(cfg, forward: dict, device: torch.device, micro_batch: int) -> torch.Tensor:
    """Return noise in the shape of an evaluation batch, or of `micro_batch` images if that would take too long."""
    is_fast = cfg.TEST.BATCH_SIZE * dist.world_size() / forward["images_per_s"] < timing.MEASURE_S
    size = height_and_width(eval_crop_size(cfg))
    images = torch.randn(cfg.TEST.BATCH_SIZE if is_fast else micro_batch, cfg.DATA.CHANNELS, *size, device=device)
    return images.to(memory_format=torch.channels_last) if cfg.MODEL.CHANNELS_LAST else images


def count_state_bytes(step: Step) -> dict[str, int]:
    """Return the size in bytes of the parameters, the gradients and the optimizer state."""
    parameters: list[torch.Tensor] = list(step.state.model.parameters())
    states = [value for entry in step.state.optimizer.state.values() for value in entry.values()]
    tensors: dict[str, list[torch.Tensor]] = {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "optimizer": [value for value in states if isinstance(value, torch.Tensor)],
    }
    return {name: sum(value.numel() * value.element_size() for value in values) for name, values in tensors.items()}


def peak_bytes(device: torch.device) -> int:
    """Return the maximum over all processes of `local_peak_bytes`. A collective."""
    return int(dist.all_reduce_max([local_peak_bytes(device)])[0])


def _as_part(seconds: float, num_images: int) -> dict:
    return {"seconds": seconds, "images": num_images, "images_per_s": num_images / seconds}


def format_report(result: dict, compress: str) -> Iterator[str]:
    """Yield the table of the measurements in timing.json, line by line, and the diagnosis."""
    yield f"{'per step':<36} {'images':>8} {'ms':>10} {'images/s':>10}"
    yield _row("model: forward", result["forward"])
    yield _row("model: forward + backward", result["forward_backward"])
    yield f"{'optimizer step':<36} {'':>8} {1e3 * result['optimizer']['seconds']:>10.2f}"
    yield _row("training step, batch in memory", result["step"])
    yield _row("model: forward in evaluation", result["evaluation"])
    yield _row("loader: uint8 batches", result["pixels"])
    yield _row("loader: normalized, on the device", result["loader"])
    yield _row("loader + model", result["together"])
    yield f"of which waiting for data: {result['wait']:.0%}"
    yield format_all_reduce(result, compress)
    mb = {name: value / 1e6 for name, value in result["memory"].items()}
    yield f"MB: parameters {mb['parameters']:,.1f}, gradients {mb['gradients']:,.1f}, optimizer {mb['optimizer']:,.1f}"
    if mb["training"]:
        yield f"peak per process: {mb['training']:,.0f} MB in training, {mb['evaluation']:,.0f} MB including evaluation"
    yield from textwrap.wrap(f"diagnosis: {result['verdict']}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def format_all_reduce(result: dict, compress: str) -> str:
    """Return the line about the all-reduce of the gradients."""
    if "not_exchanged" not in result:
        return "all-reduce of the gradients: none (one process)"
    exposed_ms = 1e3 * (result["forward_backward"]["seconds"] - result["not_exchanged"]["seconds"])
    sent_mb = result["memory"]["gradients"] / 1e6 / (1 if compress == "none" else 2)
    as_type = "" if compress == "none" else f" as {compress}"
    exposed = f"{exposed_ms:.2f} ms" if exposed_ms > 0 else "not measurable"
    return f"all-reduce: {sent_mb:,.1f} MB of gradients{as_type}, exposed: {exposed}"


def _row(name: str, part: dict) -> str:
    return f"{name:<36} {part['images']:>8,} {1e3 * part['seconds']:>10.2f} {part['images_per_s']:>10,.0f}"
