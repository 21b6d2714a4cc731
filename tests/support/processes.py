"""Functions run on several processes, the end of a training's processes, and free ports."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_support.training_process import TrainingProcess

from distribuuuu.launch.nproc import find_free_port as free_port
from distribuuuu.testing import RESULT_S, on_processes

__all__ = ["RESULT_S", "free_port", "on_processes"]

# Limits that catch a hang: a result, or the end of a run, takes seconds.
END_S = 60


def ends(run: TrainingProcess, timeout_s: float = END_S) -> bool:
    """Wait until no process of a run is left; return False if some are left after the timeout."""
    try:
        wait_for(lambda: not run.list_pids(), timeout_s=timeout_s)
    except AssertionError:
        return False
    return True


def wait_for(condition: Callable[[], Any], *processes: subprocess.Popen, timeout_s: float = RESULT_S) -> None:
    """Poll until a condition is true; the processes must not end before."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.02)


def list_trackers(out: Path) -> list[int]:
    """Return the processes that follow a run, started by this process."""
    found = []
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        found += [int(pid)] if b"--follow" in words and str(out).encode() in words else []
    return found
