"""The repeated blocks of a model: what is recomputed, and what is sharded, one at a time."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

# They only hold modules, and may be indexed instead of called.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model by name, in the order of its modules; none lies within another.

    A block is one of a row of modules (the members of a container, or the children of a module that has children of one
    type only), of a type that occurs in such rows at least twice, with two layers or more that have a weight matrix, as
    a residual block or a transformer's layer has; single convolutions with their norm are too small. A module that
    holds a row of blocks itself, such as a stage, is none.
    """
    row = {name: module for name, module in _members_of_rows(model) if _count_weight_layers(module) >= 2}
    counts = Counter(type(module) for module in row.values())
    repeated = {name: module for name, module in row.items() if counts[type(module)] >= 2}
    return {
        name: module
        for name, module in model.named_modules()
        if name in repeated and not _holds_row(name, repeated) and not _inside_block(name, repeated)
    }


def _members_of_rows(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, parent in model.named_modules():
        children = dict(parent.named_children())
        of_one_type = len(children) > 0 and len({type(child) for child in children.values()}) == 1
        if isinstance(parent, _CONTAINERS) or of_one_type:
            for name, child in children.items():
                if type(child) not in _CONTAINERS:
                    yield f"{prefix}.{name}" if prefix else name, child


def _count_weight_layers(module: nn.Module) -> int:
    return sum(any(own.ndim >= 2 for own in layer.parameters(recurse=False)) for layer in module.modules())


def _holds_row(name: str, repeated: dict[str, nn.Module]) -> bool:
    """Tell whether a module is a stage: it has at least two repeated modules in it."""
    return sum(other.startswith(f"{name}.") for other in repeated) >= 2


def _inside_block(name: str, repeated: dict[str, nn.Module]) -> bool:
    """Tell whether a module lies within a block, e.g. as its only squeeze-and-excitation."""
    parts = name.split(".")
    above = (".".join(parts[:end]) for end in range(1, len(parts)))
    return any(other in repeated and not _holds_row(other, repeated) for other in above)
