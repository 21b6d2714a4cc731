"""Repeated blocks of a model: the units of activation checkpointing and of FSDP."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

# Containers hold modules and may be indexed instead of called.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model by name, in the order of its modules; none lies inside another.

    A block, such as a residual block or a transformer layer, is a member of a container or of a module whose children
    have one type; its type occurs at least twice there, and it has at least two layers with a weight matrix. Single
    convolutions with their norm are too small. A module that holds several blocks, such as a stage, is no block.
    """
    members = {name: module for name, module in _members(model) if _count_weight_layers(module) >= 2}
    counts = Counter(type(module) for module in members.values())
    repeated = {name: module for name, module in members.items() if counts[type(module)] >= 2}
    return {
        name: module
        for name, module in model.named_modules()
        if name in repeated and not _is_stage(name, repeated) and not _is_inside_block(name, repeated)
    }


def _members(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, parent in model.named_modules():
        children = dict(parent.named_children())
        if isinstance(parent, _CONTAINERS) or len({type(child) for child in children.values()}) == 1:
            for name, child in children.items():
                if type(child) not in _CONTAINERS:
                    yield f"{prefix}.{name}" if prefix else name, child


def _count_weight_layers(module: nn.Module) -> int:
    return sum(any(own.ndim >= 2 for own in layer.parameters(recurse=False)) for layer in module.modules())


def _is_stage(name: str, repeated: dict[str, nn.Module]) -> bool:
    """Tell whether a module holds at least two repeated modules."""
    return sum(other.startswith(f"{name}.") for other in repeated) >= 2


def _is_inside_block(name: str, repeated: dict[str, nn.Module]) -> bool:
    """Tell whether a module lies inside a block, e.g. as its only squeeze-and-excitation."""
    parts = name.split(".")
    parents = (".".join(parts[:end]) for end in range(1, len(parts)))
    return any(parent in repeated and not _is_stage(parent, repeated) for parent in parents)
