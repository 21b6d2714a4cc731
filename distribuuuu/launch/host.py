"""Host memory: freed blocks that are kept for reuse, and page-locked copies on their way to a GPU."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Names of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Older versions of glibc take no more than 32 MiB for the latter.
_LARGE, _LARGE_IN_OLD_GLIBC = 1 << 30, 1 << 25


def count_cores() -> int:
    """Return the CPU cores that this process may use: its affinity, limited by the quota of its control group."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, round(int(quota) / int(period))))


def tune_malloc() -> None:
    """Let what is freed be used again by this process, and by those it forks, in place of new pages from the kernel.

    A step frees what the next one takes, and by default glibc gives large blocks back each time: zeroing and mapping
    their pages again takes longer than, say, normalising a batch does. A process stays as large as it once was. Does
    nothing where there is no glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    if not mallopt(_M_MMAP_THRESHOLD, _LARGE):
        mallopt(_M_MMAP_THRESHOLD, _LARGE_IN_OLD_GLIBC)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device without waiting for the work that a GPU still has.

    A copy from pageable memory would wait for it. torch's allocator keeps the page-locked copy until the transfer ends.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
