"""The log lines that describe a run at its start and its end."""

import importlib
import logging
import platform
import shlex
import time

import torch
import torchvision
from torch import nn

from distribuuuu import __version__
from distribuuuu.checkpoint.weights_files import list_bests
from distribuuuu.config.conflicts import find_unused_options
from distribuuuu.config.errors import counted
from distribuuuu.config.reader import COMMAND_LINE
from distribuuuu.config.registry import dataset_name
from distribuuuu.data.build_transform import statistics_of
from distribuuuu.data.loader import Loader, TrainLoader
from distribuuuu.distributed import comm as dist
from distribuuuu.engine.run import Run, is_finished
from distribuuuu.engine.state import TrainState
from distribuuuu.launch.detect import Launch
from distribuuuu.models import count_parameters
from distribuuuu.optim.schedules import describe_lr
from distribuuuu.records.metric_writers import format_duration

logger = logging.getLogger(__name__)


def describe_machine(launch: Launch, device: torch.device) -> None:
    """Log the versions, the device and the launcher."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    logger.info("distribuuuu %s, torch %s, torchvision %s", __version__, torch.__version__, torchvision.__version__)
    logger.info("python %s; launcher: %s; backend %s", platform.python_version(), launch, dist.backend())
    logger.info("device: %s (%s), %s", device, name, counted(torch.get_num_threads(), "CPU thread"))


def describe_model(cfg, model: nn.Module, *loaders: Loader) -> None:
    """Log the model, its number of parameters, and, on the main process, the warnings about its data."""
    for note in dict.fromkeys(note for loader in loaders for note in loader.notes):
        if dist.is_main():
            logger.warning("%s", note)
    for level, note in cfg.notes if dist.is_main() else ():
        logger.log(level, "%s", note)
    logger.info("model: %s, %.3f M parameters", cfg.MODEL.ARCH, count_parameters(model) / 1e6)


def describe_images(cfg, *loaders: Loader) -> None:
    """Log what reaches the model, with the values that are the data set's own: crops, mean, std, sampling."""
    for loader in loaders:
        kind, start = "validation", 0
        if isinstance(loader, TrainLoader):
            kind, start = "training", cfg.TRAIN.IM_SIZE_START
        logger.info("%s: %s%s", kind, loader.samples.transform, f"; from {start} px on" if start else "")
        for name, samples in loader.samples.extra.items():
            num = loader.sampler.extra[name].plan.global_batch  # type: ignore[union-attr]  # a training loader
            images = counted(len(samples.images), "image")
            logger.info("loader %s: %s, %d per step; %s", name, images, num, samples.transform)
    for problem in find_unused_options(cfg):
        if len(loaders) > 1 or str(problem.key).startswith("TEST."):
            logger.warning("%s", problem)
    mean, std = (" ".join(f"{value:.3g}" for value in values) for values in statistics_of(cfg, loaders[0].images))
    flips = "; flips: alternating" if cfg.DATA.FLIP_MODE == "alternating" else ""
    sampling = f"; sampling: {cfg.DATA.SAMPLING}{flips}" if len(loaders) > 1 else ""
    logger.info("mean %s, std %s%s", mean, std, sampling)


def describe_training(cfg, state: TrainState, train_loader: TrainLoader, val_loader: Loader) -> None:
    """Log the model, the data, the global batch, the learning rate, and warnings about the options."""
    describe_model(cfg, state.model, train_loader, val_loader)
    num_train, num_val = (counted(len(loader.images), "image") for loader in (train_loader, val_loader))
    classes = counted(len(state.classes), "class")
    logger.info("data: %s; train: %s, validation: %s, %s", dataset_name(cfg), num_train, num_val, classes)
    if cfg.TEST.DATASET != cfg.TRAIN.DATASET:
        logger.info("validation data: %s (TEST.DATASET), training data: %s", cfg.TEST.DATASET, cfg.TRAIN.DATASET)
    describe_images(cfg, train_loader, val_loader)
    plan = train_loader.plan
    meant, given = cfg.DIST.PROCESSES, dist.world_size()
    is_adapted = cfg.TRAIN.GLOBAL_BATCH_SIZE or cfg.origins.get("OPTIM.BASE_LR") == COMMAND_LINE
    if meant not in (0, given) and not is_adapted:
        batch = meant * plan.global_batch // given
        text = "the recipe is for %s, a global batch of %d images; here it is %d; to train as intended, add %s %d"
        logger.warning(text, counted(meant, "process"), batch, plan.global_batch, "TRAIN.GLOBAL_BATCH_SIZE", batch)
    last = f", {train_loader.steps_of(cfg.OPTIM.MAX_EPOCH - 1)} in the last one" if cfg.OPTIM.LAST_EPOCH < 1 else ""
    most = cfg.TRAIN.BATCH_SIZE
    less = f" (TRAIN.BATCH_SIZE {most} rounded down)" if most != plan.micro_batch else ""
    # Incomplete steps are dropped; the copies of an image are in one step.
    seen = train_loader.num_steps * -(-plan.global_batch // cfg.DATA.REPEATS)
    is_part = cfg.DATA.SAMPLING == "uniform" and seen < len(train_loader.images)
    left = f", with {seen:,} of the {num_train}" if is_part else ""
    logger.info("step: %s%s; %s per epoch%s%s", plan, less, counted(train_loader.num_steps, "step"), left, last)
    learned = f"loss: {cfg.LOSS.NAME}" if cfg.TASK.NAME == "auto" else f"task: {cfg.TASK.NAME}"
    logger.info("%s; optimizer: %s", learned, cfg.OPTIM.NAME)
    logger.info("learning rate: %s; seed %d", describe_lr(cfg, plan.global_batch), state.seed)
    if is_finished(cfg, state):
        done, patience = counted(state.epoch, "epoch"), f", TRAIN.PATIENCE {cfg.TRAIN.PATIENCE}"
        limits = f"{cfg.OPTIM.MAX_EPOCH}{patience if state.epoch < cfg.OPTIM.MAX_EPOCH else ''}"
        logger.info("nothing to train: %s finished, OPTIM.MAX_EPOCH is %s", done, limits)


def describe_end(run: Run, started: float) -> None:
    """Log the best weights of each kind, the commands that use them, and the time of the run over all starts."""
    cfg, state = run.cfg, run.state
    metric, _ = run.task.primary_metric
    label = run.log.eval_metrics.get(metric, metric)
    if state.epoch < cfg.OPTIM.MAX_EPOCH and is_finished(cfg, state):
        logger.info("Early stopping at epoch %d/%d: %s has not improved for %s (TRAIN.PATIENCE)", state.epoch,
                    cfg.OPTIM.MAX_EPOCH, label, counted(cfg.TRAIN.PATIENCE, "epoch"))  # fmt: skip
    elif state.epoch < cfg.OPTIM.MAX_EPOCH:
        logger.info("stopped after epoch %d/%d; without --stop-epoch, the same command continues", state.epoch,
                    cfg.OPTIM.MAX_EPOCH)  # fmt: skip
    found = list_bests(cfg.OUT_DIR)
    paths = {kind: found[kind] for kind in state.models if kind in found}
    for kind, path in paths.items():
        name = "" if kind == "raw" else f"{kind} "
        logger.info("best %s%s: %s; weights: %s", name, label, state.bests[kind].describe(metric), path)
    if paths:
        out = shlex.quote(str(cfg.OUT_DIR))
        for command in ("test {}", "report {}", "predict {} IMAGES", "export {} --format onnx --out FOLDER"):
            logger.info("next: distribuuuu %s", command.format(out))
    if any(run.log.spent.values()):
        total, spent = time.perf_counter() - started, run.log.spent
        measured = [part for part in ("forward", "backward", "optimizer", "step") if spent[part]]
        shares = {part: f"{part} {seconds / total:.0%}" for part, seconds in spent.items()}
        parts = ", ".join((f"waiting for {shares['data']}", *(shares[part] for part in measured)))
        logger.info("time: %s (%s), %s, %s", shares["training"], parts, shares["evaluation"], shares["checkpoints"])
    if run.train_loader.device.type == "cuda" and state.timing["seconds"]:
        importlib.import_module("distribuuuu.engine.flops").log_utilization(run)
    if state.num_skipped:
        num_steps = sum(map(run.train_loader.steps_of, range(state.epoch)))  # the last epoch may end early
        logger.warning("the task applied no gradients in %d of %d steps", state.num_skipped, num_steps)
    if state.seconds > time.perf_counter() - started:
        logger.info("Total training time, including restarts: %s", format_duration(state.seconds))
