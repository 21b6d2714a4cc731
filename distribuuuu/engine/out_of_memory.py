"""Failed allocations of memory, on the host or on a device, with the options that need less."""

import re
import socket
import traceback

import torch

from distribuuuu.config import ConfigError
from distribuuuu.distributed import comm as dist

# Messages of torch's plain RuntimeErrors: the CPU allocator, MPS, the CUDA runtime and its libraries, oneDNN.
_MESSAGES = re.compile(r"CPUAllocator|out of memory|not enough memory|_STATUS_ALLOC_FAILED|create a primitive(?! desc)")
_REMEDY = (
    "a smaller TRAIN.BATCH_SIZE with TRAIN.GLOBAL_BATCH_SIZE, which keeps the hyperparameters valid, or a smaller "
    "TEST.BATCH_SIZE; or MODEL.ACT_CHECKPOINT True, TRAIN.AMP bf16, DIST.SHARD fsdp on several processes, or a smaller "
    "MODEL.ARCH"
)


class OutOfMemory(ConfigError):
    """A failed allocation of this process; the message names options that need less memory."""

    status = 1


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception reports a failed allocation of host or device memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_MESSAGES.search(str(error)))


def explain(error: BaseException, arch: str) -> None:
    """Raise an out-of-memory error of a model as `OutOfMemory`, and release the memory that its frames hold."""
    if is_out_of_memory(error):
        traceback.clear_frames(error.__traceback__)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        place = f"{arch}, process {dist.rank()} on {socket.gethostname()}"
        raise OutOfMemory(f"out of memory: {place}; fix: {_REMEDY} ({reason})") from None
