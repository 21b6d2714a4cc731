"""Memory that this process may use: of its control groups, its machine and its address space."""

import contextlib
import os
import resource
from pathlib import Path

# Bytes of memory that no machine has: there is no limit.
NO_LIMIT = 1 << 62
_GROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def read_sizes(path: str | os.PathLike) -> dict[str, int]:
    """Return the sizes in bytes of a file of /proc with lines such as `VmHWM: 123 kB`; {} if there is no such file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [line.split() for line in file]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}


def list_memory_limits() -> list[tuple[int, int]]:
    """Return the limits on the memory of this process in bytes as (limit, free): of its control groups and machine."""
    found = []
    for folder in _list_memory_groups():
        for names in _GROUP_FILES:
            with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
                limit, used = (int((folder / name).read_text()) for name in names)
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                cache = int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
                found.append((limit, limit - used + cache))
    machine = read_sizes("/proc/meminfo")
    total = machine.get("MemTotal", NO_LIMIT)
    return [*found, (total, machine.get("MemAvailable", total))]


def _list_memory_groups() -> list[Path]:
    """Return the folders of the control groups of version 1 and 2 that limit the memory of this process."""
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, name in lines:
        if controllers in ("", "memory"):
            root = Path("/sys/fs/cgroup", controllers)
            group = root / name.lstrip("/")  # a container may see only the root
            found += [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return found


def address_space_limit() -> int:
    """Return the limit on the virtual memory of this process in bytes (`ulimit -v`)."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return NO_LIMIT if limit == resource.RLIM_INFINITY else limit
