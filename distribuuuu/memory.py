"""How this process's memory is handed out."""

import ctypes

# Names of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Older versions of glibc take no more than 32 MiB for the latter.
_LARGE, _LARGE_IN_OLD_GLIBC = 1 << 30, 1 << 25


def keep_freed_memory() -> None:
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
