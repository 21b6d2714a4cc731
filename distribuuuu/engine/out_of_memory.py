"""Out-of-memory errors in terms of the config: the batch, the memory there is, and the options that reduce it."""

import contextlib
import functools
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import torch

from distribuuuu.config import ConfigError
from distribuuuu.data.batch_plan import plan_batches
from distribuuuu.distributed import comm as dist

# What torch says where it raises a plain RuntimeError: the CPU allocator, MPS, CUDA's own calls and libraries.
_TEXTS = re.compile(r"DefaultCPUAllocator|out of memory|not enough memory|_STATUS_ALLOC_FAILED")
# Above it a cgroup has no limit.
_MOST_LIMIT = 1 << 60


class OutOfMemory(ConfigError):
    """An allocation of this process failed; says what would need less memory."""

    status = 1


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception says that memory, of the host or of a device, could not be allocated."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_TEXTS.search(str(error)))


def explain_out_of_memory(phase: str, batch: str | None = "train") -> Callable[[Callable], Callable]:
    """Return a decorator for functions of (cfg, ...) that raises `OutOfMemory` where they run out of memory.

    Args:
        phase: what the function does, e.g. "a training step".
        batch: the images it takes, "train" (micro-batches) or "test"; None: none, the model alone takes the memory.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def explained(cfg, *args, **kwargs):
            try:
                return function(cfg, *args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                lines = str(error).strip().splitlines() or [type(error).__name__]
                message = _describe(cfg, phase, batch, lines[0][:300])
            raise OutOfMemory(message)  # out here the frames of the error, and their tensors, are released

        return explained

    return decorate


def _describe(cfg, phase: str, batch: str | None, said: str) -> str:
    what, remedies = f"{phase} of {cfg.MODEL.ARCH}", [*_sharing(cfg), "a smaller MODEL.ARCH"]
    if batch == "test":
        px = cfg.TEST.CROP_SIZE or cfg.TRAIN.IM_SIZE
        what += f", TEST.BATCH_SIZE {cfg.TEST.BATCH_SIZE} images of {px} x {px} px"
        remedies = ["a smaller TEST.BATCH_SIZE, which leaves the result as it is"]
    elif batch == "train":
        plan = plan_batches(cfg.TRAIN.BATCH_SIZE, cfg.TRAIN.GLOBAL_BATCH_SIZE, dist.world_size())
        what += f", micro-batch of {plan.micro_batch} images of {cfg.TRAIN.IM_SIZE} x {cfg.TRAIN.IM_SIZE} px"
        smaller = f"a TRAIN.BATCH_SIZE below {plan.micro_batch} with TRAIN.GLOBAL_BATCH_SIZE {plan.global_batch}"
        remedies = [f"{smaller}, which keeps the recipe", *_cheaper_steps(cfg), *_sharing(cfg)]
    where = f"process {dist.rank()} on {socket.gethostname()}" if dist.is_distributed() else "this process"
    return f"out of memory in {what}: {where} has {_memory()}; fix: {'; or '.join(remedies)} ({said})"


def _cheaper_steps(cfg) -> list[str]:
    found = {"MODEL.ACT_CHECKPOINT True": not cfg.MODEL.ACT_CHECKPOINT, "TRAIN.AMP bf16": cfg.TRAIN.AMP == "none"}
    return [remedy for remedy, is_new in found.items() if is_new]


def _sharing(cfg) -> list[str]:
    return ["DIST.SHARD fsdp on several processes"] if cfg.DIST.SHARD != "fsdp" else []


def _memory() -> str:
    """Return what the device of this process has and what is allocated; without CUDA, the same of the host."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        used, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        name = torch.cuda.get_device_name()
        return f"{_gib(used)} allocated and {_gib(reserved)} reserved of {_gib(total)} on {name}"
    return f"{_gib(_resident_bytes())} resident of {_gib(_host_limit())} of host memory"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _resident_bytes() -> int:
    with contextlib.suppress(AttributeError, OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _host_limit() -> int:
    """Return the bytes that this process may have: of the machine, its cgroup or its own limit (ulimit -v)."""
    limits = [_MOST_LIMIT]
    with contextlib.suppress(AttributeError, ValueError, OSError):  # AttributeError: Windows
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max": none
            limits.append(int(Path(path).read_text()))
    with contextlib.suppress(ImportError):
        import resource

        limits.append(resource.getrlimit(resource.RLIMIT_AS)[0])
    return min(limit for limit in limits if 0 < limit <= _MOST_LIMIT)
