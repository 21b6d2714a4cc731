"""Open a run, say what it is, and write down what it was: everything around the training itself."""

import contextlib
import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torchvision
from torch import nn

from distribuuuu import __version__
from distribuuuu import distributed as dist
from distribuuuu.config import ConfigError
from distribuuuu.datasets.loader import Loader, TrainLoader
from distribuuuu.launch import Launch
from distribuuuu.log import close_logging, format_duration, set_up_logging
from distribuuuu.models import count_parameters
from distribuuuu.optim import describe_lr
from distribuuuu.state import TrainState

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def open_run(cfg, launch: Launch, device: torch.device, log_name: str) -> Iterator[None]:
    """Join the processes, make OUT_DIR and start the log, for the length of the block.

    Raises:
        ConfigError: OUT_DIR cannot be made.
    """
    set_backends(cfg)
    with dist.process_group(launch, device, cfg.DIST.TIMEOUT_S, cfg.DIST.BACKEND, cfg.OUT_DIR):
        start = time.perf_counter()
        make_out_dir(cfg.OUT_DIR)
        set_up_logging(cfg.OUT_DIR, log_name)
        try:
            describe_machine(launch, device)
            yield
            logger.info("everything is in %s; %s", cfg.OUT_DIR, format_duration(time.perf_counter() - start))
        finally:
            close_logging()


def set_backends(cfg) -> None:
    """Apply CUDNN.BENCHMARK and CUDNN.DETERMINISTIC."""
    deterministic = cfg.CUDNN.DETERMINISTIC
    torch.backends.cudnn.benchmark = cfg.CUDNN.BENCHMARK and not deterministic
    torch.backends.cudnn.deterministic = deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def make_out_dir(out_dir: str) -> None:
    """Make OUT_DIR on the main process, and tell every process if that fails."""
    problem = None
    if dist.is_main():
        try:
            Path(out_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"OUT_DIR: {out_dir} cannot be made: {error.strerror}"
    problem = dist.broadcast_object(problem)
    if problem:
        raise ConfigError(problem)


def write_config(cfg) -> None:
    """Write OUT_DIR/CFG_DEST: every option, so that the file alone repeats the run."""
    if dist.is_main():
        path = Path(cfg.OUT_DIR) / cfg.CFG_DEST
        try:
            path.write_text(cfg.dump(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"OUT_DIR: {path} cannot be written: {error.strerror}") from error


def describe_machine(launch: Launch, device: torch.device) -> None:
    """Log the versions, the device and the launcher."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    logger.info("distribuuuu %s, torch %s, torchvision %s", __version__, torch.__version__, torchvision.__version__)
    logger.info("python %s; launcher: %s; backend %s", platform.python_version(), launch, dist.backend())
    logger.info("device: %s (%s), %d CPU threads", device, name, torch.get_num_threads())


def describe_model(cfg, model: nn.Module) -> None:
    """Log the model and its size."""
    logger.info("model: %s, %.3f M parameters", cfg.MODEL.ARCH, count_parameters(model) / 1e6)


def describe_training(cfg, state: TrainState, train_loader: TrainLoader, val_loader: Loader) -> None:
    """Log what is trained on what: the model, the data and the arithmetic of a step."""
    describe_model(cfg, state.model)
    data = "dummy" if cfg.MODEL.DUMMY_INPUT else cfg.DATA.NAME
    logger.info("data: %s, %d + %d images, %d classes", data, len(train_loader.images), len(val_loader.images),
                len(state.classes))  # fmt: skip
    plan = train_loader.plan
    logger.info("step: %s; %d steps an epoch", plan, train_loader.num_steps)
    logger.info("learning rate: %s; seed %d", describe_lr(cfg, plan.global_batch), state.seed)
    crop = cfg.TEST.CROP_SIZE or cfg.TRAIN.IM_SIZE
    if crop * 2 < cfg.TEST.IM_SIZE:
        logger.warning("evaluation sees %d px of an image resized to %d: is TEST.IM_SIZE too large?", crop,
                       cfg.TEST.IM_SIZE)  # fmt: skip
    if state.epoch >= cfg.OPTIM.MAX_EPOCH:
        logger.info("finished: all %d epochs are done", cfg.OPTIM.MAX_EPOCH)


def write_results(cfg, result: dict, weights: str) -> None:
    """Log an evaluation and write it to OUT_DIR/results.json."""
    crop = cfg.TEST.CROP_SIZE or cfg.TRAIN.IM_SIZE
    topk = min(cfg.TRAIN.TOPK, cfg.MODEL.NUM_CLASSES)
    logger.info("top1 %.3f  top%d %.3f  loss %.4f  of %d images", result["top1"], topk, result["topk"],
                result["loss"], result["count"])  # fmt: skip
    logger.info("weights %s; resize %d, crop %d", weights, cfg.TEST.IM_SIZE, crop)
    record = {**result, "k": topk, "im_size": cfg.TEST.IM_SIZE, "crop_size": crop, "weights": weights}
    if dist.is_main():
        path = Path(cfg.OUT_DIR) / "results.json"
        path.write_text(json.dumps({**record, "arch": cfg.MODEL.ARCH}, indent=2) + "\n", encoding="utf-8")
