"""Say on what machine and with what command a benchmark ran."""

import os
import platform
import shlex
import sys
from importlib.metadata import version

from distribuuuu.report.environment import name_cpu


def describe_run() -> str:
    """Return two lines: the machine with its versions and load, and the command."""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    words = shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"machine: {name_cpu()}, {cores} cores{load}, python {platform.python_version()}, torch {version('torch')}\n"
        f"command: {words}"
    )
