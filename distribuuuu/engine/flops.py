"""Model FLOP utilization (MFU): the share of the dense peak of a GPU that a training uses."""

import logging

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.sharding import inference, is_sharded
from distribuuuu.engine.run import Run, Training
from distribuuuu.tasks.classification import Classification

logger = logging.getLogger(__name__)

# Dense peaks in TFLOPS, of bf16 and fp16 and of TF32, by the name of the card; half of those with sparsity.
# https://www.nvidia.com/en-us/data-center/h200/
# https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet (H100)
# https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
PEAKS = {
    "NVIDIA H200": (989.5, 494.5),
    "NVIDIA H100 80GB HBM3": (989.5, 494.5),
    "NVIDIA H100 PCIe": (756.5, 378.0),
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB",
                     "NVIDIA A100 80GB PCIe"), (312.0, 156.0)),
}  # fmt: skip


def count_flops(model: nn.Module, image: torch.Tensor) -> int:
    """Return the floating-point operations of the forward pass of an image (1, C, H, W); a multiply-add is two."""
    model.eval()
    with torch.compiler.set_stance("force_eager"), inference(model), FlopCounterMode(display=False) as counter:
        model(image)
    return counter.get_total_flops()


def utilization(card: str, amp: str, flops: float, images_per_s: float) -> float | None:
    """Return the MFU of a training from the operations of a forward pass; None if the peak of the card is not known.

    The backward pass counts twice (Chowdhery et al., arXiv 2204.02311, appendix B). Without TRAIN.AMP, the peak is that
    of TF32, which torch uses for convolutions.
    """
    peaks = PEAKS.get(card)
    return peaks and 3 * flops * images_per_s / (1e12 * peaks[amp == "none"])


def measure_utilization(training: Training, images_per_s: float) -> float | None:
    """Return the MFU of a process that trains some images per second; None where it is not known or not defined.

    It is not known off CUDA, of a sharded model, of several image sizes, or if a step is not one pass of each image.
    """
    cfg, loader, task = training.cfg, training.train_loader, training.task
    is_plain = type(task).train_step is Classification.train_step and type(task).update is Classification.update
    if loader.device.type != "cuda" or not is_plain or is_sharded(training.state.model) or cfg.TRAIN.IM_SIZE_START:
        return None
    flops = count_flops(training.state.model, loader.zero_images(1))
    return utilization(torch.cuda.get_device_name(loader.device), cfg.TRAIN.AMP, flops, images_per_s)


def log_utilization(run: Run) -> None:
    """Log the MFU of a run over all its starts, where it is known."""
    timing = run.state.timing
    share = measure_utilization(run, timing["images"] / timing["seconds"] / dist.world_size())
    if share:
        card = torch.cuda.get_device_name(run.train_loader.device)
        logger.info("model FLOP utilization: %.0f%% of the dense peak of %s", 100 * share, card)
