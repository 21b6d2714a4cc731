"""Random numbers of torch in a thread, from a generator of its own; the default one belongs to the main thread."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distribuuuu.config import ConfigError

# The in-place operation that fills what these return; only newer versions of torch give them a generator.
_LIKE: dict[str, Callable] = {
    "rand_like": torch.Tensor.uniform_,
    "randn_like": torch.Tensor.normal_,
    "randint_like": torch.Tensor.random_,
}


class ThreadGenerator(TorchDispatchMode):
    """Context in which everything that this thread draws from torch on the CPU comes from a generator seeded here.

    The numbers are those of the default generator after the same seed.

    Raises:
        ConfigError: an operation cannot use a generator.
    """

    def __init__(self, seed: int):
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not _is_random(operation):
            return operation(*args, **kwargs)
        variant, position = _find_variant(operation)
        if variant:
            is_given = len(args) > position or kwargs.get("generator") is not None
            return variant(*args, **kwargs if is_given else {**kwargs, "generator": self._generator})
        name = operation.overloadpacket.__name__
        if fill := _LIKE.get(name):
            return fill(torch.empty_like(args[0], **kwargs), *args[1:], generator=self._generator)
        if operation.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:
                return operation.decompose(*args, **kwargs)
        fix = "set DATA.WORKER_KIND process, or draw with another function"
        raise ConfigError(f"DATA.WORKER_KIND: threads share the generator of torch.{name}; fix: {fix}")


@functools.cache
def _is_random(operation: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operation.tags


@functools.cache
def _find_variant(operation: Any) -> tuple[Any, int]:
    """Return the form of an operation that takes a generator, if there is one, and the position of the argument."""
    packet = operation.overloadpacket
    names = [argument.name for argument in operation._schema.arguments]
    for variant in (operation, *(getattr(packet, name) for name in packet.overloads())):
        found = [argument.name for argument in variant._schema.arguments]
        if "generator" in found and {*found} == {*names, "generator"}:
            return variant, found.index("generator")
    return None, 0
