"""Conflicts of DIST.SHARD with other options."""

from collections.abc import Iterator

from distribuuuu.config.config_node import Config
from distribuuuu.config.errors import Problem
from distribuuuu.config.options import GRAPH_MODES

# Optimizers that give the same weights with FSDP as without, with any of the suffixes. Others need more of a weight
# than the rows of one process, in operations that torch's sharded tensors do not support.
_FSDP_OPTIMIZERS = (
    "adabelief", "adadelta", "adagrad", "adam", "adamax", "adamw", "adan", "adopt", "lamb", "laprop", "larc", "lars",
    "lion", "madgrad", "momentum", "nadam", "nesterov", "nlarc", "nlars", "radabelief", "radam", "rmsprop", "rmsproptf",
    "sgd",
)  # fmt: skip
_SUFFIXES = ("", "c", "cd", "cw", "w", "legacy")
# These scale a step by the norm of all gradients, or use random numbers; a process has its own share only.
_NOT_FOR_ZERO1 = ("clamb", "kron", "lamb")


def find_sharding_problems(cfg: Config) -> Iterator[Problem]:
    """Yield a problem for each option that does not work with DIST.SHARD zero1 or fsdp."""
    shard, name = cfg.DIST.SHARD, cfg.OPTIM.NAME.lower()
    if shard == "zero1" and name.startswith(_NOT_FOR_ZERO1):
        message = f"{name} needs all gradients, but DIST.SHARD zero1 gives it a part; set DIST.SHARD fsdp or none"
        yield Problem("OPTIM.NAME", message)
    if shard != "fsdp":
        return
    if name not in [base + suffix for base in _FSDP_OPTIMIZERS for suffix in _SUFFIXES]:
        message = f"{name} does not work with DIST.SHARD fsdp; set DIST.SHARD zero1, or one of"
        yield Problem("OPTIM.NAME", f"{message} {', '.join(_FSDP_OPTIMIZERS)}")
    if cfg.MODEL.COMPILE in GRAPH_MODES:  # the weights are gathered in other memory in each step
        message = f"got {cfg.MODEL.COMPILE}, which replays CUDA graphs, with DIST.SHARD fsdp; expected none or default"
        yield Problem("MODEL.COMPILE", f"{message}; fix: set it to default, or DIST.SHARD to zero1 or none")
    if cfg.TRAIN.AMP == "fp16":
        message = "fp16 does not work with DIST.SHARD fsdp, where each process would scale its loss alone; use bf16"
        yield Problem("TRAIN.AMP", message)
