"""Host resources: the number of CPU cores, memory allocation, and copies to a device."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Older versions of glibc limit the latter to 32 MiB.
_MMAP_THRESHOLD, _MMAP_THRESHOLD_IN_OLD_GLIBC = 1 << 30, 1 << 25


def count_cores() -> int:
    """Return the number of CPU cores that this process may use: its affinity, limited by its control group's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, round(int(quota) / int(period))))


def tune_malloc() -> None:
    """Let glibc reuse freed memory in this process and its forks; elsewhere do nothing.

    A step frees what the next one allocates. By default glibc returns large blocks to the kernel each time, and mapping
    and zeroing their pages again takes longer than, say, normalizing a batch. The process keeps its peak size.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    if not mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD):
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_IN_OLD_GLIBC)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device without waiting for pending work of a GPU, as a copy from pageable memory would.

    torch's allocator keeps the page-locked copy until the transfer ends.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
