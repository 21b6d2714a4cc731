"""The Python API, for programs and notebooks: `train`, `evaluate`, `open_evaluation` and `predict`.

Errors are exceptions, nothing exits the process, and a training or an evaluation leaves the state of the process as it
was: random numbers, signal handlers, loggers, settings of torch.
"""

import contextlib
import ctypes
import dataclasses
import functools
import gc
import logging
import os
import random
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distribuuuu.checkpoint.weights_files import RAW, common_kind, find_best
from distribuuuu.config import Config, ConfigError, Problem, get_cfg
from distribuuuu.config.config_node import changed
from distribuuuu.config.model_names import is_published
from distribuuuu.config.reader import COMMAND_LINE, CfgFiles, read_cfg
from distribuuuu.engine.preflight import find_run_problems, resolve_num_classes
from distribuuuu.launch.detect import detect_launch
from distribuuuu.launch.signals import RunStopped, SignalState, is_first_process

if TYPE_CHECKING:
    import torch
    from torch import nn

    from distribuuuu.data.loader import Loader, TrainLoader
    from distribuuuu.inference.loaded_run import LoadedRun, Prediction
    from distribuuuu.tasks.base import Task

Overrides = Mapping[str, Any] | Sequence[Any]

# A process has one default process group, one log and one set of random number generators.
_ACTIVE_RUN = threading.Lock()


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The results of a training.

    Attributes:
        out_dir: OUT_DIR, which `evaluate` and `load_run` accept.
        best: the best value of the first metric, in percent.
        weights: the file of the best weights, of the moving average if there is one; None: no epoch was evaluated.
        metrics: loss and metrics of the last epoch, e.g. {"loss": 0.1, "top1": 98.4}; of the same kind of weights.
        results: the content of results.json; it and `metrics` are empty on processes other than the first.
    """

    out_dir: Path
    best: float
    weights: Path | None
    metrics: dict[str, float]
    results: dict[str, Any] = dataclasses.field(repr=False)


def train(config: CfgFiles | os.PathLike = None, overrides: Overrides = ()) -> TrainResult:
    """Train a model, or resume the run in OUT_DIR, like the command `distribuuuu train`.

    In the main thread, the first Ctrl-C stops the run after the current step with a checkpoint; a second one stops it
    at once. The same call resumes the run. In another thread, signals are not handled.

    Args:
        config: a file or name as for --cfg, a list of them, or a config; None: the defaults.
        overrides: options that take precedence: {"OPTIM.BASE_LR": 0.4} or ["OPTIM.BASE_LR", 0.4].

    Raises:
        ConfigError: everything that the user has to change, found before the start where possible.
        KeyboardInterrupt: stopped by Ctrl-C.
        RunStopped: stopped, with a checkpoint, by another signal or CHECKPOINT.MAX_HOURS.
    """
    source = os.fspath(config) if isinstance(config, os.PathLike) else config
    with _run_of_program():
        cfg = _load_checked(source, _as_pairs(overrides), is_training=True)

        from distribuuuu.config.run_files import RESULTS
        from distribuuuu.records.read_results import read_results
        from distribuuuu.trainer import train_model

        best = train_model(cfg)
        path = Path(cfg.OUT_DIR) / RESULTS
        results = read_results(path) if is_first_process() and path.exists() else {}
    accuracy = results.get("accuracy", {})
    last = accuracy.get(common_kind([accuracy]), {}).get("last", {})
    metrics = {name: value for name, value in last.items() if name != "epoch"}
    weights = find_best(cfg.OUT_DIR, cfg.EMA.HALF_LIFE > 0)
    return TrainResult(Path(cfg.OUT_DIR), best, weights, _with_labels(metrics, cfg), results)


def evaluate(
    run: "str | os.PathLike | Config | TrainResult | LoadedRun", overrides: Overrides = ()
) -> dict[str, float]:
    """Return loss, metrics in percent and the number of images of an evaluation, like the command `distribuuuu test`.

    Args:
        run: the OUT_DIR of a run, the result of `train`, a checkpoint below OUT_DIR, what `load_run` has returned, or a
            config as for `train`, which names the weights.
        overrides: as for `train`, e.g. {"TEST.DATASET": "other_images"}.

    Raises:
        ConfigError: everything that the user has to change, e.g. there are no weights.
    """
    source, own_overrides = _find_config(run)
    with _run_of_program():
        cfg = _load_checked(source, [*own_overrides, *_as_pairs(overrides)], is_training=False)

        from distribuuuu.trainer import evaluate_weights

        return _with_labels(evaluate_weights(cfg), cfg)


class WeightsEvaluation:
    """Evaluates weights of one model; made by `open_evaluation`. `model` has the last ones, on its device."""

    def __init__(self, task: "Task", model: "nn.Module", loader: "Loader"):
        self.cfg, self.model = task.cfg, model
        self._task, self._loader = task, loader

    def evaluate(
        self, state_dict: "Mapping[str, torch.Tensor]", kind: str = RAW, recalibrate: int = 0
    ) -> dict[str, float]:
        """Return loss, metrics in percent and the number of images; every process calls it with the same weights.

        It writes a line of the log and no other file. `model.state_dict()` holds the recomputed statistics.

        Args:
            state_dict: tensors by name, on any device.
            kind: what they are, for the log and for messages, e.g. "soup".
            recalibrate: first compute the statistics of batch norm over at least this many training images, as
                MODEL.PRECISE_BN does after the first epoch; 0: those of the weights.

        Raises:
            ConfigError: the weights do not match the model, or there are no training images.
        """
        from distribuuuu.checkpoint.io import load_state_dict
        from distribuuuu.engine import evaluator
        from distribuuuu.engine.precise_bn import compute_precise_statistics
        from distribuuuu.records.metric_writers import format_result

        load_state_dict(self.model, dict(state_dict), f"{kind} weights")
        if recalibrate:
            images = self._train_loader.iter_images(self.cfg.RNG_SEED or 0, 0, recalibrate)
            compute_precise_statistics(self.model, images, self._task.autocast, self._task.train_mode)
        result = _with_labels(evaluator.evaluate(self._task, self.model, self._loader), self.cfg)
        evaluator.check_finite(result, "evaluate")
        shown = {name: name for name in result if name not in ("count", "loss")}
        logging.getLogger(__name__).info("validation of %s weights: %s", kind, format_result(result, shown, 3))
        return result

    @functools.cached_property
    def _train_loader(self) -> "TrainLoader":
        """The training loader; its workers are threads, as the process group exists already."""
        from distribuuuu.data.loader import build_loader

        cfg = changed(self.cfg, {"DATA.WORKER_KIND": "thread"})
        return build_loader(cfg, detect_launch(), self._loader.device, train=True)


@contextlib.contextmanager
def open_evaluation(
    run: "str | os.PathLike | Config | TrainResult | LoadedRun", overrides: Overrides = ()
) -> Iterator[WeightsEvaluation]:
    """Open the evaluation of a run or a config for any weights of its model, e.g. averages of several runs.

    Processes, data and model are set up once: `with open_evaluation("exp/r50") as run: run.evaluate(state_dict)`.

    Args:
        run: as for `evaluate`; its own weights are not read.
        overrides: as for `train`.

    Raises:
        ConfigError: everything that the user has to change.
    """
    source, own_overrides = _find_config(run)
    with _run_of_program():
        words = [*own_overrides, *_as_pairs(overrides)]
        cfg = _load_checked(source, words, is_training=False, needs_weights=False)

        from distribuuuu.engine import evaluator

        with evaluator.open_evaluation(cfg) as opened:
            yield WeightsEvaluation(*opened)


def predict(
    run: "str | os.PathLike | TrainResult | LoadedRun",
    images: Any,
    topk: int | None = None,
    threshold: float | None = None,
    skip_bad: bool = False,
) -> "list[Prediction]":
    """Return the prediction of each image, in order, like the command `distribuuuu predict`.

    Args:
        run: as for `evaluate`, but no config; or an exported folder, or the name of published weights, e.g.
            `timm/NAME`. What `load_run` has returned is read and built once for many calls.
        images: as for `LoadedRun.predict`, like the other arguments.

    Raises:
        ConfigError, BadImageError: there is no model, or as `LoadedRun.predict`.
    """
    from distribuuuu.inference.load_run import load_run

    source: Any = run.out_dir if isinstance(run, TrainResult) else run
    loaded: Any = run if hasattr(run, "predict") else load_run(source)
    return loaded.predict(images, topk, threshold, skip_bad)


# -------------------------------------------------------------------------------------------- config


def _as_pairs(overrides: Overrides) -> list[str]:
    """Return the texts of a command line for overrides from Python."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: got the text {overrides!r}; expected a dict or a list, e.g. ['OUT_DIR', 'exp']")
    items = [item for pair in overrides.items() for item in pair] if isinstance(overrides, Mapping) else overrides
    return [os.fspath(item) if isinstance(item, os.PathLike) else str(item) for item in items]


def _load_checked(source: CfgFiles, pairs: list[str], is_training: bool, needs_weights: bool = True) -> Config:
    """Return the frozen config with its number of classes; raise ConfigError with every problem of options and data."""
    cfg, problems = read_cfg(source, pairs)
    problems += find_run_problems(cfg, is_training, set_keys_only=bool(problems), needs_weights=needs_weights)
    if problems:
        raise ConfigError([_renamed(problem) for problem in problems])
    return resolve_num_classes(cfg)


def _renamed(problem: Problem) -> Problem:
    """Return a problem whose options were set in Python, not on a command line."""
    origins = {key: origin.replace(COMMAND_LINE, "overrides") for key, origin in problem.origins.items()}
    key = "overrides" if problem.key == COMMAND_LINE else problem.key
    key = key.removeprefix("--cfg ") if isinstance(key, str) else key
    return dataclasses.replace(problem, key=key, origins=origins)


def _find_config(run: Any) -> tuple[str | Config, list[str]]:
    """Return the config that evaluates a run, and overrides with OUT_DIR and weights; ConfigError: there is none."""
    if isinstance(run, Config):
        return run, []
    if not hasattr(run, "cfg"):
        path = os.fspath(run.out_dir if isinstance(run, TrainResult) else run)
        if path.endswith((".yaml", ".yml")) or not (os.path.exists(path) or is_published(path)):
            return path, []
        from distribuuuu.inference.locate_run import locate_run

        files = locate_run(path)
        if not (files.is_export or files.is_published):
            best = ("OUT_DIR", str(files.folder), "MODEL.WEIGHTS", str(files.weights))
            return files.config, [*best, "MODEL.PRETRAINED", "False"]
        from distribuuuu.inference.load_run import find_run

        run = find_run(path)
    named = () if os.path.isfile(run.source) else ("MODEL.ARCH", run.source, "OUT_DIR", get_cfg().OUT_DIR)
    return run.cfg, [*named, "MODEL.WEIGHTS", run.source]


# ------------------------------------------------------------------------------------------- results


def _with_labels(values: dict[str, float], cfg: Config) -> dict[str, float]:
    """Return metrics under their display names, e.g. 'top5' for 'topk'."""
    from distribuuuu.tasks.metrics import METRICS

    def label(name: str) -> str:
        return METRICS.get(name)(cfg.MODEL.NUM_CLASSES, cfg.TRAIN.TOPK).label(name) if name in METRICS else name

    return {label(name): value for name, value in values.items()}


# ------------------------------------------------------------------------------- state of the process


@contextlib.contextmanager
def _run_of_program() -> Iterator[None]:
    """Let the only run of this process raise exceptions instead of exiting, and restore the process afterwards."""
    if not _ACTIVE_RUN.acquire(blocking=False):
        raise ConfigError("a run is active in this process; fix: wait for its end, or start another process")
    try:
        _import_torch()
        with _preserved_state():
            SignalState.current = SignalState(on_second_signal=_interrupt_main_thread)
            try:
                yield
            except Exception:  # of any kind, as it is raised again
                if SignalState.current.is_ending:  # of several processes: the launcher ends this one soon
                    traceback.print_exc()
                raise
    except (ConfigError, RunStopped, KeyboardInterrupt) as error:
        traceback.clear_frames(error.__traceback__)  # a notebook keeps the traceback, and with it model and workers
        if isinstance(error, RunStopped) and str(error) == "SIGINT":
            raise KeyboardInterrupt("stopped; a checkpoint was saved, and the same call resumes the run") from None
        raise
    finally:
        gc.collect()  # ends the loader workers: the bars of a notebook have reference cycles
        _ACTIVE_RUN.release()


def _interrupt_main_thread(signum: int) -> None:
    """Raise KeyboardInterrupt in the main thread; called from the thread that receives signals."""
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(KeyboardInterrupt))


def _import_torch() -> None:
    """Import torch with threads that do not spin while they wait, as loader workers need the cores."""
    is_set = "OMP_WAIT_POLICY" in os.environ
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch  # noqa: F401

    if not is_set:
        del os.environ["OMP_WAIT_POLICY"]


@contextlib.contextmanager
def _preserved_state() -> Iterator[None]:
    """Restore the random numbers and the settings of torch, PIL, threading and logging that a run changes."""
    import numpy as np
    import PIL.Image
    import torch

    from distribuuuu.distributed.comm import GroupState

    cudnn, logger = torch.backends.cudnn, logging.getLogger("distribuuuu")
    places: list[tuple[Any, str]] = [
        (cudnn, "benchmark"), (cudnn, "deterministic"), (logger, "handlers"), (logger, "propagate"),
        (SignalState, "current"), (GroupState, "local_rank"), (PIL.Image, "MAX_IMAGE_PIXELS"),
    ]  # fmt: skip
    values = [getattr(owner, name) for owner, name in places]
    on, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    precision, level, workspace = torch.get_float32_matmul_precision(), logger.level, "CUBLAS_WORKSPACE_CONFIG"
    num_threads = torch.get_num_threads()
    has_workspace, generators = workspace in os.environ, (random.getstate(), np.random.get_state())
    # Otherwise, this call would create a CUDA context, whose memory the trials of TRAIN.AMP auto would lack.
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    logger.handlers = []  # a run has its own
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        for (owner, name), value in zip(places, values, strict=True):
            setattr(owner, name, value)
        torch.use_deterministic_algorithms(on, warn_only=warns)
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(num_threads)
        logger.setLevel(level)
        if not has_workspace:
            os.environ.pop(workspace, None)
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        for gpu in gpus:
            torch.cuda.set_device(gpu)
        if torch.cuda.is_initialized() and not gpus:  # as at the first use of CUDA
            torch.cuda.manual_seed_all(torch.initial_seed())
