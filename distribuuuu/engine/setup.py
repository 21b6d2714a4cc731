"""Set-up, description and results of a run."""

import contextlib
import logging
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torchvision
from torch import nn

from distribuuuu import __version__
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.config.rules import find_unused_options
from distribuuuu.data.loader import Loader, TrainLoader
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.process_group import process_group
from distribuuuu.engine.run_lock import lock_out_dir
from distribuuuu.engine.state import TrainState
from distribuuuu.launch.detect import Launch
from distribuuuu.models import count_parameters
from distribuuuu.optim.optimizer import describe_lr
from distribuuuu.report import results
from distribuuuu.report.environment import describe_hardware, find_commit, list_versions
from distribuuuu.report.run_log import append_to_log, format_duration, logging_to
from distribuuuu.tasks.metrics import metric_names

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def open_run(cfg, launch: Launch, device: torch.device, log_name: str, locks: bool = False) -> Iterator[float]:
    """Join the processes, make OUT_DIR and start the log, for the length of the block; yields its time.perf_counter().

    Args:
        cfg: the config.
        launch: where this process stands.
        device: its device.
        log_name: of the log in OUT_DIR, which also gets what ends the block; empty: none.
        locks: let no other run that does so use OUT_DIR meanwhile.

    Raises:
        ConfigError: OUT_DIR cannot be made, or another run uses it.
    """
    set_backends(cfg, device)
    settings = cfg.DIST
    has_log = False
    limits = {"timeout_s": settings.TIMEOUT_S, "startup_timeout_s": settings.STARTUP_TIMEOUT_S}
    group = process_group(
        launch, device, backend=settings.BACKEND, report_dir=cfg.OUT_DIR, shard=settings.SHARD, **limits
    )
    try:
        with group:
            start = time.perf_counter()
            make_out_dir(cfg.OUT_DIR)
            with lock_out_dir(cfg.OUT_DIR) if locks else contextlib.nullcontext():
                has_log = bool(log_name)
                with logging_to(cfg.OUT_DIR, log_name):
                    describe_machine(launch, device)
                    yield start
                    logger.info("finished in %s; files: %s", format_duration(time.perf_counter() - start), cfg.OUT_DIR)
    except ConfigError as error:
        if has_log and (launch.rank == 0 or error.one_process):  # the terminal gets it from the tool
            append_to_log(cfg.OUT_DIR, log_name, *map(str, error.problems))
        raise


def set_backends(cfg, device: torch.device) -> None:
    """Apply CUDNN.BENCHMARK, CUDNN.DETERMINISTIC and, on CUDA, TRAIN.MATMUL_PRECISION."""
    if device.type == "cuda":  # torch applies it to some CPUs too, whose results are to stay bitwise the same
        torch.set_float32_matmul_precision(cfg.TRAIN.MATMUL_PRECISION)
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
    """Write OUT_DIR/CFG_DEST: every option, so that the file alone repeats the run.

    Only once the run is sure to go on from what is in OUT_DIR: until then the file tells how to evaluate that.
    """
    if dist.is_main():
        path = Path(cfg.OUT_DIR) / cfg.CFG_DEST
        try:
            results.write_whole(path, cfg.dump())
        except OSError as error:
            raise ConfigError(f"OUT_DIR: {path} cannot be written: {error.strerror}") from error


def describe_machine(launch: Launch, device: torch.device) -> None:
    """Log the versions, the device and the launcher."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    logger.info("distribuuuu %s, torch %s, torchvision %s", __version__, torch.__version__, torchvision.__version__)
    logger.info("python %s; launcher: %s; backend %s", platform.python_version(), launch, dist.backend())
    logger.info("device: %s (%s), %s", device, name, counted(torch.get_num_threads(), "CPU thread"))


def describe_model(cfg, model: nn.Module, *loaders: Loader) -> None:
    """Log the model and its size, and on the main process what there is to warn of in its data."""
    for note in dict.fromkeys(note for loader in loaders for note in loader.notes):
        if dist.is_main():
            logger.warning("%s", note)
    logger.info("model: %s, %.3f M parameters", cfg.MODEL.ARCH, count_parameters(model) / 1e6)


def describe_training(cfg, state: TrainState, train_loader: TrainLoader, val_loader: Loader) -> None:
    """Log what is trained on what: the model, the data and the arithmetic of a step."""
    describe_model(cfg, state.model, train_loader, val_loader)
    data = "dummy" if cfg.MODEL.DUMMY_INPUT else cfg.DATA.NAME
    num_train, num_val = (counted(len(loader.images), "image") for loader in (train_loader, val_loader))
    classes = counted(len(state.classes), "class")
    logger.info("data: %s; train: %s, validation: %s, %s", data, num_train, num_val, classes)
    if cfg.TEST.DATASET != cfg.TRAIN.DATASET:
        logger.info("validation data: %s (TEST.DATASET), training data: %s", cfg.TEST.DATASET, cfg.TRAIN.DATASET)
    plan = train_loader.plan
    logger.info("step: %s; %s per epoch", plan, counted(train_loader.num_steps, "step"))
    logger.info("learning rate: %s; seed %d", describe_lr(cfg, plan.global_batch), state.seed)
    for problem in find_unused_options(cfg):
        logger.warning("%s", problem)
    crop = cfg.TEST.CROP_SIZE or cfg.TRAIN.IM_SIZE
    if crop * 2 < cfg.TEST.IM_SIZE:
        logger.warning("TEST.IM_SIZE: validation images are resized to %d px, but cropped to %d px; is it too large?",
                       cfg.TEST.IM_SIZE, crop)  # fmt: skip
    if state.epoch >= cfg.OPTIM.MAX_EPOCH:
        done = counted(state.epoch, "epoch")
        logger.info("nothing to train: %s finished, OPTIM.MAX_EPOCH is %d", done, cfg.OPTIM.MAX_EPOCH)


def describe_end(cfg, state: TrainState, bests: Mapping[str, Path], started: float) -> None:
    """Log the best weights of each kind, how to evaluate them, and the time of the run over all its starts.

    Args:
        cfg: the config.
        state: the state at the end.
        bests: the file of the best weights of each kind.
        started: what `open_run` has yielded.
    """
    script = Path(sys.argv[0]).with_name("test_net.py")
    script = script if script.exists() else Path("tools/test_net.py")
    primary_metric = next(iter(metric_names(cfg).values()))
    for kind in state.models:
        best, path, name = state.bests[kind], bests[kind], "" if kind == "raw" else f"{kind} "
        if dist.is_main() and path.exists():
            command = shlex.join(
                ["python", str(script), "--cfg", str(Path(cfg.OUT_DIR) / cfg.CFG_DEST), "MODEL.WEIGHTS", str(path)]
            )
            logger.info("best %s%s: %s; weights: %s", name, primary_metric, best, path)
            logger.info("to evaluate: %s", command)
    if state.seconds > time.perf_counter() - started:
        logger.info("time of all starts: %s", format_duration(state.seconds))


def describe_facts(cfg, device: torch.device, model: nn.Module | None) -> dict:
    """Return what results.json says of a run whatever comes of it. Every process must call it."""
    is_drawn = cfg.MODEL.DUMMY_INPUT or cfg.DATA.NAME in ("dummy", "shapes")
    return {
        "config": results.name_config(cfg),
        "overrides": results.list_overrides(cfg),
        "config_hash": results.hash_config(cfg),
        "model": {"arch": cfg.MODEL.ARCH, "params_m": count_parameters(model) / 1e6 if model else None},
        "data": {
            "name": "dummy" if cfg.MODEL.DUMMY_INPUT else cfg.DATA.NAME,
            "folder": None if is_drawn else Path(cfg.TRAIN.DATASET).absolute().name,
            "num_classes": cfg.MODEL.NUM_CLASSES,
        },
        "evaluation": results.describe_evaluation(cfg),
        "hardware": describe_hardware(device),
        "versions": list_versions(),
        "commit": find_commit() if dist.is_main() else None,
    }


class RunResults:
    """OUT_DIR/results.json of a training run, written anew after every evaluation. Every process has one.

    Args:
        cfg: the config of the run.
        device: this process's device.
        state: where the run starts: what an older run left is set aside by a run that starts from nothing.
        train_loader, val_loader: its data.
    """

    def __init__(self, cfg, device: torch.device, state: TrainState, train_loader: TrainLoader, val_loader: Loader):
        self.out_dir = cfg.OUT_DIR
        facts = describe_facts(cfg, device, state.model)
        images = {"num_train": len(train_loader.images), "num_val": len(val_loader.images)}
        self.facts = {
            **facts,
            "seed": state.seed,
            "data": {**facts["data"], **images},
            "training": {
                "px": cfg.TRAIN.IM_SIZE,
                "epochs_planned": cfg.OPTIM.MAX_EPOCH,
                "global_batch": train_loader.plan.global_batch,
                "processes": train_loader.plan.world_size,
            },
            "peak_memory": {"of": "cuda" if device.type == "cuda" else "host"},
        }
        self._unwritten: tuple[results.Progress, dict[str, dict]] | None = None
        if dist.is_main() and (state.epoch, state.step) == (0, 0):
            results.set_results_aside(self.out_dir)

    def write(self, state: TrainState, images_per_s: float | None, evaluations: dict[str, dict]) -> None:
        """Write what the evaluation of the state's last epoch found; every process must call it.

        What the disk refuses is told, and tried again by the next call and by `finish`.

        Args:
            state: after `finish_epoch`.
            images_per_s: of the training steps of all starts, over all processes; None: none were timed.
            evaluations: what `evaluate` returned for each kind of weights, "raw" and maybe "ema".
        """
        progress = results.Progress(
            epochs=state.epoch,
            hours=state.seconds / 3600,
            images_per_s=images_per_s,
            peak_memory_mib=state.peak_memory_mib(),
            bests={
                kind: (best.top1, best.epoch + 1 if best.epoch >= 0 else None)
                for kind, best in state.bests.items()
                if best.epoch >= 0 or best.top1 > 0
            },
        )
        self._unwritten = progress, evaluations
        self.finish()

    def finish(self) -> None:
        """Write what the disk has refused so far, if anything."""
        if dist.is_main() and self._unwritten and results.write_results(self.out_dir, self.facts, *self._unwritten):
            self._unwritten = None


def write_test_results(cfg, device: torch.device, model: nn.Module, weights: str, evaluations: dict[str, dict]) -> None:
    """Log evaluations and write them to OUT_DIR/test_results.json; every process must call it.

    Args:
        cfg: the config.
        device: this process's device.
        model: the model that was evaluated.
        weights: the file that its weights come from.
        evaluations: what `evaluate` returned for each kind of weights, e.g. {"raw": result}.
    """
    facts = describe_facts(cfg, device, model)
    seen = facts["evaluation"]
    logger.info("weights: %s; images: resized to %d px, cropped to %d px", weights, seen["resize"], seen["crop"])
    for kind, result in evaluations.items():
        images = counted(result["count"], "image") + ("" if kind == "raw" else f", {kind} weights")
        measures = " ".join(f"{called} {result[name]:.3f}" for name, called in metric_names(cfg).items())
        logger.info("validation of %s: %s loss %.4f", images, measures, result["loss"])
    if dist.is_main():
        results.write_test_results(cfg.OUT_DIR, facts, weights, evaluations)
