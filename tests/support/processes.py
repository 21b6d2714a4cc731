"""Functions run on several processes, the end of a training's processes, and free ports."""

import os
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from distribuuuu.launch.host import find_free_port as free_port
from distribuuuu.testing import RESULT_S, on_processes

__all__ = ["RESULT_S", "free_port", "on_processes"]

# Limits that catch a hang: a result, or the end of a run, takes seconds.
END_S = 60


class HasProcesses(Protocol):
    """A run whose processes can be listed."""

    def list_pids(self) -> list[int]:
        """Return the processes that are left."""
        ...


def ends(run: HasProcesses, timeout_s: float = END_S) -> bool:
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


def list_children(pid: int) -> list[int]:
    """Return the processes that a process has started (Linux)."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def list_trackers(out: Path) -> list[int]:
    """Return the processes that follow a run, started by this process."""
    found = []
    for pid in list_children(os.getpid()):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        found += [pid] if b"--follow" in words and str(out).encode() in words else []
    return found


def have_ended(pids: Iterable[int]) -> bool:
    """Tell whether none of these processes exists any more."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)
