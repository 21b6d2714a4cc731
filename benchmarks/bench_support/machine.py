"""Lines that every benchmark prints: the machine, the command, the spread of a measurement."""

import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from distribuuuu.records.environment import get_cpu_name


def describe_run() -> str:
    """Return two lines: the machine with its load, versions and the commit, and the command."""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    command = shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    git = shlex.join(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"])
    status, commit = subprocess.getstatusoutput(git)
    return (
        f"machine: {get_cpu_name()}, {cores} cores{load}, "
        f"python {platform.python_version()}, torch {version('torch')}, commit {'unknown' if status else commit}\n"
        f"command: {command}"
    )


def show_spread(values: Sequence[float]) -> str:
    """Return the median with the minimum and the maximum."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
