"""Resources of this machine: its CPU cores, memory allocation, TCP ports."""

import ctypes
import os
import socket

LOOPBACK = "127.0.0.1"

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


def find_free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def find_port_problem(address: str, port: int) -> str | None:
    """Return why this machine cannot listen on a port; None if it can."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return f"MASTER_PORT {port} on {address}: {error.strerror}; fix: set MASTER_PORT to a free port"
    return None
