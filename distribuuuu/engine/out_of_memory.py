"""Out-of-memory errors that name the phase, the process and the options that need less memory."""

import functools
import re
import socket
from collections.abc import Callable

import torch

from distribuuuu.config import ConfigError
from distribuuuu.distributed import comm as dist

# Messages of torch's plain RuntimeErrors: the CPU allocator, MPS, the CUDA runtime and its libraries, oneDNN.
_MESSAGES = re.compile(r"CPUAllocator|out of memory|not enough memory|_STATUS_ALLOC_FAILED|create a primitive(?! desc)")


# What helps, by the images that take the memory.
_REMEDIES = {
    "train": "a smaller TRAIN.BATCH_SIZE with TRAIN.GLOBAL_BATCH_SIZE, which keeps the hyperparameters valid; or "
             "MODEL.ACT_CHECKPOINT True, TRAIN.AMP bf16, or DIST.SHARD fsdp on several processes",
    "test": "a smaller TEST.BATCH_SIZE, which does not change the result",
    None: "DIST.SHARD fsdp on several processes; or a smaller MODEL.ARCH",
}  # fmt: skip


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
                reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            # Outside of the except block, the error's frames and their tensors are released.
            what = f"{phase} of {getattr(run, 'cfg', run).MODEL.ARCH}, process {dist.rank()} on {socket.gethostname()}"
            raise OutOfMemory(f"out of memory in {what}; fix: {_REMEDIES[batch]} ({reason})")

        return explained

    return decorate
