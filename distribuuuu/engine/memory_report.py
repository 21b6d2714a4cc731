"""The message of an out-of-memory error; imported when there is one."""

import socket

from distribuuuu.config.derived import eval_crop_size, height_and_width, show_size
from distribuuuu.data.batch_plan import plan_batches
from distribuuuu.distributed import comm as dist


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
    return f"out of memory in {what}, on {process}; fix: {'; or '.join(remedies)} ({reason})"
