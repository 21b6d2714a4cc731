"""What the numbers of a run come from: the hardware, the versions, the commit, and how much memory it took."""

import os
import platform
import socket
import subprocess
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torchvision

from distribuuuu import __version__
from distribuuuu.config.errors import counted
from distribuuuu.distributed import comm as dist
from distribuuuu.launch.host import count_cores

PACKAGE = Path(__file__).parents[1]
# Seconds that git may take, e.g. on a slow network drive.
GIT_TIMEOUT_S = 5.0


def describe_hardware(device: torch.device) -> str:
    """Return what the processes run on, e.g. '8 x NVIDIA H100' or 'AMD EPYC 7B13, 2 cores'. All must call it."""
    found = set(dist.gather_objects(_own_hardware(device)))
    counts = Counter(name for _, name in found)
    return " + ".join(f"{num} x {name}" if num > 1 else name for name, num in sorted(counts.items()))


def _own_hardware(device: torch.device) -> tuple[str, str]:
    """Return an identity, which processes on the same hardware share, and the name."""
    host = socket.gethostname()
    if device.type == "cuda":
        card = getattr(torch.cuda.get_device_properties(device), "uuid", f"of process {dist.rank()}")
        return f"{host} {card}", torch.cuda.get_device_name(device)
    return host, f"{name_cpu()}, {counted(count_cores(), 'core')}{', MPS' if device.type == 'mps' else ''}"


def name_cpu() -> str:
    """Return the model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def list_versions() -> dict[str, str | None]:
    """Return the versions of what decides the numbers; None: not there."""
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


def find_commit(folder: Path = PACKAGE) -> str | None:
    """Return the git commit of the package's code, with '+changes' if the code is not what was committed.

    None: git is not there, does not know the code, or takes longer than `GIT_TIMEOUT_S`.
    """
    # In a hook of another repository these would point there. A status that refreshes the index would take its lock.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env["GIT_OPTIONAL_LOCKS"] = "0"

    def ask(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
                              timeout=GIT_TIMEOUT_S)  # fmt: skip
        return done.stdout.strip()

    try:
        # A package that lies in somebody else's repository, e.g. in an environment in its folder, is not its code.
        if not ask("ls-files", "."):
            return None
        return ask("rev-parse", "HEAD") + ("+changes" if ask("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None


def own_peak_bytes(device: torch.device) -> int:
    """Return the most memory that this process has had: on its CUDA device, else of the machine; 0: not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_memory_mib(device: torch.device) -> float | None:
    """Return the peak so far in MiB: on CUDA the greatest of all processes, else this process's own.

    Every process must call it.
    """
    own = own_peak_bytes(device)
    peak = dist.all_reduce_max([own])[0] if device.type == "cuda" else own
    return round(peak / 2**20, 1) or None
