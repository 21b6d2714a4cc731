"""The message of an out-of-memory error; imported when there is one."""

import socket

import torch

from distribuuuu.config.derived import eval_crop_size, height_and_width, show_size
from distribuuuu.data.batch_plan import plan_batches
from distribuuuu.distributed import comm as dist
from distribuuuu.records.memory_limits import address_space_limit, list_memory_limits, read_sizes


def describe_lack(cfg, phase: str, batch: str | None, reason: str) -> str:
    """Return the message; arguments of `explain_out_of_memory`, and the reason that the system gave."""
    what, px = f"{phase} of {cfg.MODEL.ARCH}", cfg.TRAIN.IM_SIZE
    sharding = ["DIST.SHARD fsdp on several processes"] if cfg.DIST.SHARD != "fsdp" else []
    remedies = [*sharding, "a smaller MODEL.ARCH"]
    if batch == "test":
        px = eval_crop_size(cfg)
        what += f", TEST.BATCH_SIZE {cfg.TEST.BATCH_SIZE} images of {show_size(height_and_width(px))} px"
        remedies = ["a smaller TEST.BATCH_SIZE, which does not change the result"]
    elif batch == "train":
        plan = plan_batches(cfg.TRAIN.BATCH_SIZE, cfg.TRAIN.GLOBAL_BATCH_SIZE, dist.world_size())
        what += f", micro-batch of {plan.micro_batch} images of {show_size(height_and_width(px))} px"
        smaller = f"a TRAIN.BATCH_SIZE below {plan.micro_batch} with TRAIN.GLOBAL_BATCH_SIZE {plan.global_batch}"
        remedies = [f"{smaller}, which keeps the hyperparameters valid"]
        remedies += [] if cfg.MODEL.ACT_CHECKPOINT else ["MODEL.ACT_CHECKPOINT True"]
        remedies += ["TRAIN.AMP bf16"] if cfg.TRAIN.AMP == "none" else []
        remedies += sharding
    process = f"process {dist.rank()} on {socket.gethostname()}" if dist.is_distributed() else "this process"
    return f"out of memory in {what}: {process} has {_memory()}; fix: {'; or '.join(remedies)} ({reason})"


def _memory() -> str:
    """Return the allocated and total memory of this process's CUDA device, else of the host."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        used, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        name = torch.cuda.get_device_name()
        return f"{_gib(used)} allocated and {_gib(reserved)} reserved of {_gib(total)} on {name}"
    limit = min(address_space_limit(), *(limit for limit, _ in list_memory_limits()))
    return f"{_gib(read_sizes('/proc/self/status').get('VmRSS', 0))} resident of {_gib(limit)} of host memory"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
