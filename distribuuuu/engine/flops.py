"""Utilization of a GPU by training steps: the shares of its dense peak (MFU) and of its memory bandwidth."""

import logging
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.sharding import inference, is_sharded
from distribuuuu.engine.run import Run, Training
from distribuuuu.tasks.classification import Classification

logger = logging.getLogger(__name__)

# By the name of the card: dense peaks in TFLOPS, half of those with sparsity, of bf16 and fp16 and of TF32; and the
# bandwidth of the memory in TB/s.
# https://www.nvidia.com/en-us/data-center/h200/
# https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet (H100)
# https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
CARDS = {
    "NVIDIA H200": (989.5, 494.5, 4.8),
    "NVIDIA H100 80GB HBM3": (989.5, 494.5, 3.35),
    "NVIDIA H100 PCIe": (756.5, 378.0, 2.0),
    "NVIDIA A100-SXM4-80GB": (312.0, 156.0, 2.039),
    "NVIDIA A100 80GB PCIe": (312.0, 156.0, 1.935),
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), (312.0, 156.0, 1.555)),
}


class ByteCounter(TorchDispatchMode):
    """Counts in `total` the bytes of the inputs and outputs of all operations but views, as if no cache held them."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if all(value.alias_info is None or value.alias_info.is_write for value in func._schema.returns):
            leaves = tree_leaves((args, kwargs, result))
            self.total += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        return result


def count_forward(model: nn.Module, images: torch.Tensor) -> tuple[int, int]:
    """Return the floating-point operations and the bytes of a forward pass of images (N, C, H, W).

    A multiply-add is two operations. The bytes are those of eager operations; compiled ones move fewer.
    """
    model.eval()
    counter, moved = FlopCounterMode(display=False), ByteCounter()
    with torch.compiler.set_stance("force_eager"), inference(model), counter, moved:
        model(images)
    return counter.get_total_flops(), moved.total


def utilization(card: str, amp: str, flops: float, moved: float, images_per_s: float) -> dict[str, Any]:
    """Return the shares of the dense peak (`mfu`) and the `bandwidth` of a card in use, and `utilization`, a text.

    `flops` and `moved` are those of a forward pass of an image. The backward pass counts twice (Chowdhery et al., arXiv
    2204.02311, appendix B), the optimizer does not count. Without TRAIN.AMP, the peak is that of TF32, which torch uses
    for convolutions. The larger share is the nearer roof (Williams et al., CACM 52, 2009). Empty: an unknown card.
    """
    if card not in CARDS:
        return {}
    half, single, bandwidth = (3e-12 * images_per_s / most for most in CARDS[card])
    mfu, share = flops * (single if amp == "none" else half), moved * bandwidth
    text = f"{mfu:.0%} of the dense peak (MFU), {share:.0%} of the memory bandwidth of {card}"
    text += f"; the nearer limit is the {'peak' if mfu > share else 'bandwidth'}"
    return {"mfu": mfu, "bandwidth": share, "utilization": text}


def measure_utilization(training: Training, images_per_s: float) -> dict[str, Any]:
    """Return the `utilization` by a process that trains some images per second; empty if not known or not defined.

    It is unknown off CUDA, of a sharded model, frozen weights or several image sizes, or if a step is not one pass.
    """
    cfg, loader, task = training.cfg, training.train_loader, training.task
    is_plain = type(task).train_step is Classification.train_step and type(task).update is Classification.update
    is_plain &= all(weight.requires_grad for weight in training.state.model.parameters())
    if loader.device.type != "cuda" or not is_plain or is_sharded(training.state.model) or cfg.TRAIN.IM_SIZE_START:
        return {}
    with task.autocast():
        counts = count_forward(training.state.model, loader.zero_images(loader.plan.micro_batch))
    flops, moved = (count / loader.plan.micro_batch for count in counts)
    return utilization(torch.cuda.get_device_name(loader.device), cfg.TRAIN.AMP, flops, moved, images_per_s)


def log_utilization(run: Run) -> None:
    """Log the utilization by a run over all its starts, where it is known."""
    timing = run.state.timing
    if found := measure_utilization(run, timing["images"] / timing["seconds"] / dist.world_size()):
        logger.info("utilization: %s", found["utilization"])
