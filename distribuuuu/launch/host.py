"""Resources of this machine: its CPU cores and memory allocation."""

import contextlib
import ctypes
import math
import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD = 1 << 30


def count_cores() -> int:
    """Return the number of CPU cores that this process may use: its affinity, limited by its control groups' quotas."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, round(min(allowed, *_list_quotas())))


def _list_quotas() -> Iterator[float]:
    """Yield the limits, in cores, of the control groups (v1, v2) of this process and of those above, then infinity."""
    with contextlib.suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            own = _GROUPS.joinpath(controllers, group.lstrip("/"))  # of a container, it may be the root
            for folder in (own, *own.parents):
                with contextlib.suppress(OSError, ValueError):  # no quota: `max` is no number, -1 is no limit
                    quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
                    yield quota / period if quota > 0 else math.inf
    yield math.inf


def tune_malloc() -> None:
    """Let glibc reuse freed memory in this process and its forks; elsewhere do nothing.

    A step frees what the next one allocates. By default glibc returns large blocks to the kernel each time, and mapping
    and zeroing their pages again takes longer than, say, normalizing a batch. The process keeps its peak size.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
