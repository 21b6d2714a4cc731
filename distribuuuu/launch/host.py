"""Host resources: the number of CPU cores, memory allocation, and copies to a device."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
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


def copy_to_host(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """Start to copy tensors of the current GPU to the host; return a function that waits for the copies, once.

    The copies share one page-locked buffer. Tensors that are on the CPU are returned themselves.
    """
    import torch

    if not any(tensor.is_cuda for tensor in tensors):
        copies = [tensor.cpu() for tensor in tensors]
        return lambda: copies
    copies, copied = copy_into_buffer(tensors, pin_memory=True), torch.cuda.Event(blocking=True)
    copied.record()

    def wait() -> list[torch.Tensor]:
        copied.synchronize()
        return copies

    return wait


def copy_into_buffer(tensors: Sequence[torch.Tensor], pin_memory: bool) -> list[torch.Tensor]:
    """Return copies of tensors, with their memory formats, in one buffer of the host; asynchronous if it is pinned."""
    import torch

    starts, size = [], 0
    for tensor in tensors:  # aligned for each type, and no two at one address
        starts.append(size)
        size += max(1, -(-tensor.numel() * tensor.element_size() // 64)) * 64
    try:
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory)
    except RuntimeError:  # so much memory cannot be page-locked: each copy then waits for the device
        buffer, pin_memory = torch.empty(size, dtype=torch.uint8), False
    copies = []
    for tensor, start in zip(tensors, starts, strict=True):
        part = buffer[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype)
        strides = torch.empty_like(tensor, device="meta").stride()
        copies.append(part.as_strided(tensor.shape, strides, part.storage_offset()))
        copies[-1].copy_(tensor.detach(), non_blocking=pin_memory)
    return copies
