"""Full tensors, of which checkpoints consist, and the rows of them that a process holds if they are sharded."""

from typing import Any

import torch


class FullStateDict(dict):
    """State dict of full CPU tensors that nothing else refers to; without tensors on all but the main process."""


def to_local(tensor: Any) -> torch.Tensor:
    """Return this process's rows of a sharded tensor, which share its memory; any other tensor unchanged."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor
