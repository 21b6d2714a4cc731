"""Trial runs in fresh processes: what a training takes on this machine, measured before it starts."""

import contextlib
import logging
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

import torch

from distribuuuu.config import Config, ConfigError
from distribuuuu.config.config_node import changed
from distribuuuu.config.plugins import import_plugins
from distribuuuu.data.batch import LoaderWorkerError
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.loader import build_loaders
from distribuuuu.distributed.process_group import pick_device
from distribuuuu.engine.build import build_run, set_backends
from distribuuuu.engine.out_of_memory import OutOfMemory, is_out_of_memory
from distribuuuu.engine.run import Run
from distribuuuu.engine.state import local_peak_bytes
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.host import tune_malloc
from distribuuuu.launch.processes import die_with_parent

T = TypeVar("T")
# Messages of other errors that a lack of memory causes.
_NO_MEMORY = ("can't start new thread", "Cannot allocate memory", "bad_alloc")


@contextlib.contextmanager
def trial_run(cfg: Config, launch: Launch, plan: BatchPlan, folder: str) -> Iterator[Run]:
    """Yield a run as in training, but with random weights and one process that takes its share of each step."""
    import_plugins(cfg.PLUGINS)  # in a new process
    batch = {"TRAIN.BATCH_SIZE": plan.micro_batch, "TRAIN.GLOBAL_BATCH_SIZE": plan.per_process}
    random = {"MODEL.WEIGHTS": None, "MODEL.PRETRAINED": False, "FINETUNE.WEIGHTS": "", "FINETUNE.HEAD": ""}
    cfg = changed(cfg, {**batch, **random, "OUT_DIR": folder, "LOG.TRACKERS": ()})
    device = pick_device(launch.local_rank)
    set_backends(cfg, device)
    run = build_run(cfg, *build_loaders(cfg, launch, device))
    with run.log:
        yield run


def read_peak(device: torch.device) -> int:
    """Return the peak memory of this process so far, in bytes: allocated on its GPU, else resident on the host."""
    peak = local_peak_bytes(device)
    # Not `ru_maxrss`: it includes the memory that the parent had when it started this process.
    return peak if device.type == "cuda" else _read_sizes("/proc/self/status").get("VmHWM", peak)


def available_memory() -> float:
    """Return the bytes of host memory that this process and those that it starts may still take."""
    return _read_sizes("/proc/meminfo").get("MemAvailable", float("inf"))


def _read_sizes(path: str) -> dict[str, int]:
    """Return the sizes in bytes of a file of /proc with lines such as `VmHWM: 123 kB`; {} if there is no such file."""
    try:
        lines = [line.split() for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}


def in_fresh_process(function: Callable[..., T], *args: Any) -> T | str:
    """Return function(folder, *args) of a new process, where `folder` is temporary; a text if memory did not suffice.

    If the system runs out of memory, it ends that process, not this one.

    Raises:
        ConfigError: as raised by the function, or it failed with another exception.
    """
    with (
        tempfile.TemporaryDirectory(prefix="distribuuuu_trial_") as folder,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin_trial) as pool,
    ):
        try:
            return pool.submit(function, folder, *args).result()
        except BrokenProcessPool:
            return "the system ended the trial"
        except Exception as error:
            in_memory = isinstance(error, (OutOfMemory, LoaderWorkerError)) or is_out_of_memory(error)
            text = str(error).strip().partition("\n")[0][:300]
            if in_memory or any(message in str(error) for message in _NO_MEMORY):
                return text
            raise error if isinstance(error, ConfigError) else ConfigError(f"{type(error).__name__}: {text}") from None


def _begin_trial() -> None:
    die_with_parent()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    tune_malloc()
    logging.getLogger("distribuuuu").addHandler(logging.NullHandler())
    logging.getLogger("distribuuuu").propagate = False
