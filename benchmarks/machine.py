"""Say on what machine and with what command a benchmark ran."""

import os
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path


def describe_run() -> str:
    """Return two lines: the machine with its versions and load, and the command."""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    words = shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"machine: {cpu_model()}, {cores} cores{load}, python {platform.python_version()}, torch {version('torch')}\n"
        f"command: {words}"
    )


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
