"""Child processes that die with their parent."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distribuuuu.launch.detect import NPROC_MARK
from distribuuuu.launch.signals import ignore_signals

_PR_SET_PDEATHSIG = 1


def die_with_parent(signum: int | None = None) -> None:
    """Make the kernel send a signal (SIGKILL) to this process when its parent exits (Linux).

    A process of multiprocessing whose parent has exited before the call exits at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL if signum is None else signum))
    import multiprocessing.process  # here: with pickle it takes milliseconds, which every error message would wait for

    parent = multiprocessing.process.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


def has_lost_launcher() -> bool:
    """Tell whether the launcher of this process has exited, so that the process has another parent."""
    if NPROC_MARK in os.environ:
        return os.getppid() != int(os.environ[NPROC_MARK].split()[0])
    if os.getppid() != 1:
        return False
    try:  # torchrun does not pass its process id; in a container it may be process 1 itself
        return b"torch" not in Path("/proc/1/cmdline").read_bytes()
    except OSError:
        return True


def set_up_worker() -> None:
    """Let a process that serves a run, e.g. a loader worker, ignore signals to the run, but exit with its parent.

    Slurm signals every process of a step, the terminal every process in the foreground.
    """
    ignore_signals()
    die_with_parent()


def start_child(command: Sequence[str], name: str, env: dict[str, str], **streams: Any) -> subprocess.Popen:
    """Start a command of this package that exits with this process, see `has_lost_launcher`.

    It has a session of its own: only this process receives a Ctrl-C. `name` tells its run from others; `streams` are
    arguments of `subprocess.Popen`.
    """
    env = {**os.environ, **env, NPROC_MARK: f"{os.getpid()} {name}"}
    return subprocess.Popen(command, env=env, start_new_session=True, **streams)
