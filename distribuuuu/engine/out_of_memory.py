"""Out-of-memory errors that name the batch, the memory and the options that reduce it, see memory_report.py."""

import functools
import re
from collections.abc import Callable

import torch

from distribuuuu.config import ConfigError

# Messages of torch's plain RuntimeErrors: the CPU allocator, MPS, the CUDA runtime and its libraries, oneDNN.
_MESSAGES = re.compile(r"CPUAllocator|out of memory|not enough memory|_STATUS_ALLOC_FAILED|create a primitive(?! desc)")


class OutOfMemory(ConfigError):
    """A failed allocation of this process; the message names options that need less memory."""

    status = 1


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception reports a failed allocation of host or device memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_MESSAGES.search(str(error)))


def explain_out_of_memory(phase: str, batch: str | None = "train") -> Callable[[Callable], Callable]:
    """Return a decorator that turns out-of-memory errors of a function of (cfg, ...) or (run, ...) into `OutOfMemory`.

    Args:
        phase: what the function does, e.g. "a training step".
        batch: the images that take memory: "train" (micro-batches), "test", or None for the model alone.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def explained(run, *args, **kwargs):
            try:
                return function(run, *args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                lines = str(error).strip().splitlines() or [type(error).__name__]
                from distribuuuu.engine.memory_report import describe_lack

                message = describe_lack(getattr(run, "cfg", run), phase, batch, lines[0][:300])
            raise OutOfMemory(message)  # outside the except block the error's frames and their tensors are released

        return explained

    return decorate
