"""Copies of a training state on the CPU, and the search for values that are not finite."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from distribuuuu.config import ConfigError
from distribuuuu.distributed.comm import FullStateDict, to_local


class NonFiniteError(ConfigError):
    """The training loss or the weights are infinite or NaN; raised by every process at the same place."""

    on_all_processes = True

    def located(self, position: str, remedy: str) -> "NonFiniteError":
        """Return the error with the position in the run and a remedy besides a lower learning rate."""
        return NonFiniteError(f"{self} {position}; fix: lower OPTIM.BASE_LR, lengthen OPTIM.WARMUP_EPOCHS, or {remedy}")


def snapshot(value: Any) -> Any:
    """Return a copy of nested content with every tensor on the CPU, unaffected by later steps.

    Tensors of a GPU are copied together, and the host waits for them once.
    """
    tensors = [tensor for _, tensor in _iter_tensors(value, "") if tensor.is_cuda]
    copies = map(with_own_storage, copy_to_host(tensors)()) if tensors else ()
    return _copy(value, dict(zip(map(id, tensors), copies, strict=True)))


def _copy(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Return a copy of nested content; `copies` are those of some tensors, by their `id`."""
    if isinstance(value, FullStateDict):
        return dict(value)
    if isinstance(value, torch.Tensor):
        return copies[id(value)] if id(value) in copies else value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy(item, copies) for key, item in value.items()}
    return type(value)(_copy(item, copies) for item in value) if isinstance(value, (list, tuple)) else value


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor in the same memory, whose storage is only that: torch saves storages, not tensors."""
    start, size = tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()[start : start + size]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())


def find_nonfinite(value: Any) -> str | None:
    """Return the path, e.g. 'state_dict/fc.weight', of the first tensor with an infinity or a NaN, or None."""
    for path, tensor in _iter_tensors(value, ""):
        if tensor.is_floating_point() and not torch.isfinite(to_local(tensor)).all():
            return path
    return None


def hash_tensors(value: Any) -> str:
    """Return the SHA-256 of names, types, shapes and bytes of all tensors, sorted by name: that of any file format."""
    digest = hashlib.sha256()
    for path, tensor in sorted(_iter_tensors(value, ""), key=lambda entry: entry[0]):
        digest.update(f"{path} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _iter_tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _iter_tensors(item, f"{name}/{key}" if name else str(key))


def copy_to_host(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """Start to copy tensors of the current GPU to the host; return a function that waits for the copies, once.

    The copies share one page-locked buffer. Tensors that are on the CPU are returned themselves.
    """
    if not any(tensor.is_cuda for tensor in tensors):
        copies = [tensor.cpu() for tensor in tensors]
        return lambda: copies
    copies, copied = copy_into_buffer(tensors, pin_memory=True), torch.cuda.Event(blocking=True)
    copied.record()

    def wait() -> list[torch.Tensor]:
        copied.synchronize()
        return copies

    return wait


def copy_into_buffer(tensors: Sequence[torch.Tensor], pin_memory: bool) -> list[torch.Tensor]:
    """Return copies of tensors, with their memory formats, in one buffer of the host; asynchronous if it is pinned."""
    starts, size = [], 0
    for tensor in tensors:  # aligned for each type, and no two at one address
        starts.append(size)
        size += max(1, -(-tensor.numel() * tensor.element_size() // 64)) * 64
    try:
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory)
    except RuntimeError:  # so much memory cannot be page-locked: each copy then waits for the device
        buffer, pin_memory = torch.empty(size, dtype=torch.uint8), False
    copies = []
    for tensor, start in zip(tensors, starts, strict=True):
        part = buffer[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype)
        strides = torch.empty_like(tensor, device="meta").stride()
        copies.append(part.as_strided(tensor.shape, strides, part.storage_offset()))
        copies[-1].copy_(tensor.detach(), non_blocking=pin_memory)
    return copies
