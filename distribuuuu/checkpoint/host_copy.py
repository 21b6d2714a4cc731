"""Copies of tensors of GPUs in page-locked memory of the host, while the device goes on."""

from collections.abc import Callable, Sequence

import torch


def copy_to_host(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """Start to copy tensors of GPUs to the host; return a function that waits for the copies, once for each GPU.

    The copies are in page-locked memory. Tensors that are on the CPU are returned themselves.
    """
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    copies = [_copy_to_pinned(tensor) if tensor.is_cuda else tensor.cpu() for tensor in tensors]
    copied = [torch.cuda.Event(blocking=True) for _ in devices]
    for event, device in zip(copied, devices, strict=True):  # which need not be the current one
        event.record(torch.cuda.current_stream(device))

    def wait() -> list[torch.Tensor]:
        for event in copied:
            event.synchronize()
        return copies

    return wait


def _copy_to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    try:
        target = torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:  # so much memory cannot be page-locked: the copy then waits for the device
        target = torch.empty_like(tensor, device="cpu")
    return target.copy_(tensor.detach(), non_blocking=target.is_pinned())
