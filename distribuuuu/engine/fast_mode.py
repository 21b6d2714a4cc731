"""The fastest mode of a model on this machine: memory format and mixed precision, measured in some seconds.

A mode is used only if the norm of the difference of its logits from those of the plainest one is, for each image, at
most 0.14 of the root mean square of the norms. The result is kept in the user's cache folder, by machine and model.
"""

import contextlib
import copy
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.benchmark import Timer

from distribuuuu import __version__
from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.config import Config, ConfigError, Problem
from distribuuuu.config.config_node import changed, get_value
from distribuuuu.config.declaration import AUTO
from distribuuuu.config.derived import height_and_width
from distribuuuu.config.locate import FoundConfig
from distribuuuu.config.plugins import import_plugins
from distribuuuu.config.reader import COMMAND_LINE, read_cfg
from distribuuuu.distributed.comm import PeerError
from distribuuuu.distributed.ddp import compile_model
from distribuuuu.distributed.process_group import pick_device
from distribuuuu.distributed.rendezvous import exchange
from distribuuuu.distributed.sharding import inference, sum_output
from distribuuuu.engine.build import set_backends
from distribuuuu.engine.trial_run import in_fresh_process, read_peak
from distribuuuu.files.cache_folder import keep_cached, load_cached
from distribuuuu.launch.detect import Launch, detect_launch, list_jobs
from distribuuuu.launch.host import count_cores
from distribuuuu.models.build import build_model
from distribuuuu.models.freeze import freeze_parts
from distribuuuu.optim.precision import Precision
from distribuuuu.records.environment import get_cpu_name

# The values of each option, the plainest first.
CHOICES: dict[str, tuple[Any, ...]] = {"TRAIN.AMP": ("none", "bf16"), "MODEL.CHANNELS_LAST": (False, True)}
AUTO_MODE = dict.fromkeys(CHOICES, AUTO)
# Seconds per mode and round; a mode must be this much faster than a plainer one, and its logits be this close.
_SECONDS, _MIN_GAIN, _MAX_DISTANCE = 0.5, 1.1, 0.14
# Images of a pass: on a CPU, more of them take longer and are as fast.
_CPU_IMAGES, _MAX_IMAGES = 16, 256


class Measured(NamedTuple):
    """A mode, its seconds for an image, its logits (N, values) as an array, and the peak memory of its process."""

    options: dict[str, Any]
    seconds: float
    logits: Any
    peak: float = 0.0


def list_modes(cfg: Config | None = None) -> list[dict[str, Any]]:
    """Return the options of each mode that a config leaves open, the plainest first; without a config, of all."""
    known = {key: value for key in CHOICES if cfg and (value := get_value(cfg, key)) != AUTO}
    values = ((known[key],) if key in known else CHOICES[key] for key in CHOICES)
    return [dict(zip(CHOICES, mode, strict=True)) for mode in itertools.product(*values)]


def agrees(mode: Measured, plainest: Measured) -> bool:
    """Tell whether the logits of each image agree with those of the plainest mode; not if one is not finite."""
    logits, expected = (torch.as_tensor(one.logits) for one in (mode, plainest))
    usual = expected.norm() / len(expected) ** 0.5
    return bool(((logits - expected).norm(dim=1) <= _MAX_DISTANCE * usual).all())


def choose_mode(measured: Sequence[Measured]) -> dict[str, Any]:
    """Return the options of the fastest mode, its `speedup` over the first one, and the seconds of an image."""
    first = best = measured[0]
    for mode in measured[1:]:
        if _MIN_GAIN * mode.seconds < best.seconds and agrees(mode, first):
            best = mode
    return {**best.options, "speedup": round(first.seconds / best.seconds, 2), "image_s": best.seconds}


def measure_modes(
    model: nn.Module, images: torch.Tensor, modes: Sequence[dict[str, Any]], trains: bool = False
) -> list[Measured]:
    """Return the measurements of modes, which may have MODEL.COMPILE: of several, the shorter time of two rounds.

    Args:
        model: a model on the device; it is not changed.
        images: normalized images (N, C, H, W) on the device.
        trains: time the forward and the backward pass of a training.
    """
    rounds = [[_measure_mode(model, images, mode, trains) for mode in modes] for _ in range(min(2, len(modes)))]
    return [min(same, key=lambda mode: mode.seconds) for same in zip(*rounds, strict=True)]


def _measure_mode(model: nn.Module, images: torch.Tensor, options: dict[str, Any], trains: bool) -> Measured:
    layout = torch.channels_last if options["MODEL.CHANNELS_LAST"] else torch.contiguous_format
    own, inputs = copy.deepcopy(model).to(memory_format=layout), images.contiguous(memory_format=layout)
    if "MODEL.COMPILE" in options:
        compile_model(own, options["MODEL.COMPILE"])
    autocast = Precision(options["TRAIN.AMP"], images.device).autocast
    with inference(own.eval()), autocast():  # several outputs side by side
        parts = [leaf for leaf in tree_leaves(own(inputs)) if getattr(leaf, "shape", ())[:1] == images.shape[:1]]
        logits = torch.cat([part.float().reshape(len(images), -1) for part in parts], 1).cpu().numpy()

    def take_pass() -> None:
        with autocast():
            output = own(inputs)
        if trains:
            own.zero_grad()
            sum_output(output).backward()

    own.train(trains)
    with contextlib.nullcontext() if trains else inference(own):
        take_pass()  # allocates and compiles
        timer = Timer("take_pass()", globals={"take_pass": take_pass}, num_threads=torch.get_num_threads())
        seconds = timer.blocked_autorange(min_run_time=_SECONDS).median  # it waits for the device
    return Measured(options, seconds / len(images), logits, read_peak(images.device))


# ------------------------------------------------------------------------------- the mode of a training


def resolve_mode(cfg: Config, trains: bool) -> Config:
    """Return the config with values for TRAIN.AMP or MODEL.CHANNELS_LAST auto, the same on all processes.

    A run that is resumed or evaluated keeps its mode. For a new one, the first process measures a training. An
    evaluation without a run takes the plainest mode.
    """

    def decide() -> tuple[dict[str, Any], str]:
        if kept := read_kept(cfg if trains else changed(cfg, {"TRAIN.AUTO_RESUME": True})):
            mode = {key: get_value(kept, key) for key in CHOICES}
            if AUTO in mode.values():
                raise ConfigError(f"TRAIN.AMP: got auto, as in {cfg.OUT_DIR}/{cfg.CFG_DEST}; fix: write its mode there")
            return mode, "kept from the run in OUT_DIR"
        modes = list_modes(cfg)
        if not trains:
            return modes[0], "as there is no run in OUT_DIR"
        return recall(cfg, "training", lambda: choose_mode(measure_training(cfg, modes))), ""

    return with_mode(cfg, *decide_for_all(cfg, detect_launch(), decide))


def decide_for_all(cfg: Config, launch: Launch, decide: Callable[[], tuple]) -> Sequence[Any]:
    """Return decide() of the first process, as JSON passes it on, on every process, before the process group.

    Raises:
        PeerError: the first process has failed; there, its ConfigError is raised.
    """
    decided: Any = None
    try:
        if launch.rank == 0:
            decided = decide()
    except ConfigError as error:
        error.one_process = True
        raise
    finally:
        decided = exchange(launch, decided, cfg.DIST.TIMEOUT_S, cfg.DIST.STARTUP_TIMEOUT_S)[0]
    if not decided:
        raise PeerError("TRAIN.AMP: got auto, but the process that finds a value has failed")
    return decided


def read_kept(cfg: Config) -> Config | None:
    """Return the config of the run in OUT_DIR that is resumed; None: there is none."""
    path = Path(cfg.OUT_DIR) / cfg.CFG_DEST
    jobs = None if cfg.TRAIN.AUTO_RESUME else list_jobs(only_restarted=True)
    is_resumed = path.is_file() and CheckpointManager(cfg.OUT_DIR).has_any(jobs)
    return read_cfg(FoundConfig(path))[0] if is_resumed else None


def with_mode(cfg: Config, mode: dict[str, Any], reason: str = "") -> Config:
    """Return a frozen copy with a mode, which was found for the reason, where the config says auto.

    To records, it is as if the command line had set it: the results do depend on it.
    """
    own = {key: mode[key] for key in CHOICES if get_value(cfg, key) == AUTO}
    chosen, found = changed(cfg, own, COMMAND_LINE), ", ".join(f"{key} {value}" for key, value in own.items())
    reason = reason or f"the fastest mode of this machine, {mode['speedup']} x the plainest"
    chosen.notes.append((logging.INFO, f"{found}: {AUTO}, {reason}"))
    return chosen


def measure_training(cfg: Config, modes: Sequence[dict[str, Any]]) -> list[Measured]:
    """Return the measurements of modes in a new process, of the model of a config with random weights.

    Raises:
        ConfigError: memory does not suffice, or the model fails.
    """
    found = in_fresh_process(_measure_here, changed(cfg, {**modes[0]}), modes)
    if isinstance(found, str):
        fix = "fix: a smaller TRAIN.BATCH_SIZE"
        raise ConfigError(Problem("TRAIN.AMP", f"a mode does not fit into memory: {found}; {fix}", cfg.origins))
    return found


def _measure_here(folder: str, cfg: Config, modes: Sequence[dict[str, Any]]) -> list[Measured]:
    import_plugins(cfg.PLUGINS)
    device = pick_device(detect_launch().local_rank)
    set_backends(cfg, device)
    torch.manual_seed(0)
    most = _CPU_IMAGES if device.type == "cpu" else _MAX_IMAGES
    images = torch.randn(min(most, cfg.TRAIN.BATCH_SIZE), cfg.DATA.CHANNELS, *height_and_width(cfg.TRAIN.IM_SIZE))
    freeze_parts(cfg, model := build_model(cfg))
    return measure_modes(model.to(device), images.to(device), modes, trains=True)


def recall(cfg: Config, what: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the mode that was measured before on this machine, for this model and `what`; else measure and keep it."""
    device = pick_device(0)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else get_cpu_name()
    threads = count_cores(), torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    model = {key: value for key, value in cfg.MODEL.items() if key not in ("CHANNELS_LAST", "COMPILE")}
    size = cfg.TRAIN.IM_SIZE, cfg.TRAIN.BATCH_SIZE, cfg.TEST.CROP_SIZE, cfg.DATA.CHANNELS
    trained = what, cfg.FINETUNE.FREEZE, cfg.FINETUNE.LORA
    identity = __version__, torch.__version__, machine, threads, model, size, trained, list_modes(cfg)
    if not (mode := load_cached("modes/mode", identity)):
        mode = measure()
        keep_cached("modes/mode", identity, mode)
    return mode
