"""Environment of a run: hardware, versions, git commit."""

import os
import platform
import socket
import subprocess
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torchvision

from distribuuuu import __version__
from distribuuuu.config.errors import counted
from distribuuuu.distributed import comm as dist
from distribuuuu.launch.host import count_cores

PACKAGE = Path(__file__).parents[1]
# Timeout of a git command in seconds; git may be slow on a network drive.
GIT_TIMEOUT_S = 5.0


def describe_hardware(device: torch.device) -> str:
    """Return the hardware of all processes, e.g. '8 x NVIDIA H100' or 'AMD EPYC 7B13, 2 cores'. A collective."""
    found = set(dist.gather_objects(_describe_local_hardware(device)))
    counts = Counter(name for _, name in found)
    return " + ".join(f"{num} x {name}" if num > 1 else name for name, num in sorted(counts.items()))


def _describe_local_hardware(device: torch.device) -> tuple[str, str]:
    """Return an identifier, equal for processes on the same hardware, and a display name."""
    host = socket.gethostname()
    if device.type == "cuda":
        card = getattr(torch.cuda.get_device_properties(device), "uuid", f"of process {dist.rank()}")
        return f"{host} {card}", torch.cuda.get_device_name(device)
    return host, f"{get_cpu_name()}, {counted(count_cores(), 'core')}{', MPS' if device.type == 'mps' else ''}"


def get_cpu_name() -> str:
    """Return the model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def list_versions() -> dict[str, str | None]:
    """Return the versions of the software that determines the results; None: not installed or not used."""
    try:
        timm = version("timm")
    except PackageNotFoundError:
        timm = None
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {
        "distribuuuu": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "cudnn": None if cudnn is None else str(cudnn),
    }


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return what else may change the last bits of a result: device, threads, vector instructions, image libraries."""
    return {
        "device": device.type,
        "deterministic": device.type == "cpu" or torch.backends.cudnn.deterministic,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "numpy": version("numpy"),
        "pillow": version("pillow"),
    }


def find_commit(folder: Path = PACKAGE) -> str | None:
    """Return the git commit of the package's code, with '+changes' if the code has uncommitted changes.

    None: git does not track the code, is not installed or takes longer than `GIT_TIMEOUT_S`.
    """
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # `status` locks no index

    def run_git(*args: str) -> str:
        command = ["git", "-C", str(folder), *args]
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
                              timeout=GIT_TIMEOUT_S)  # fmt: skip
        return done.stdout.strip()

    try:
        # The package may be installed inside another repository that does not track it, e.g. in a virtual environment.
        if not run_git("ls-files", "."):
            return None
        return run_git("rev-parse", "HEAD") + ("+changes" if run_git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
