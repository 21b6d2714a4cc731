"""Names of tensors without what wrappers add; loaded for a state dict whose names are not the model's."""

from collections import Counter
from collections.abc import Collection, Container

import torch

Tensors = dict[str, torch.Tensor]

# What wrappers add to the names of tensors: DDP, Lightning and others, detectors at the front; torch.compile, FSDP and
# activation checkpointing anywhere.
_IN_FRONT = ("module", "model", "backbone")
_ANYWHERE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def rename_tensors(tensors: Tensors, known: Collection[str]) -> Tensors:
    """Return tensors under the known names that equal theirs up to what wrappers add; the others without prefixes.

    A prefix is one that common wrappers add, or any that more than half of the known names have.
    """
    plain = {".".join(part for part in name.split(".") if part not in _ANYWHERE): name for name in tensors}
    by_core = {_core(name): name for name in known}
    matches = {name: _split(name, by_core) for name in plain}
    counts = Counter(prefix for prefix, suffix in matches.values() if suffix)
    common = next((prefix for prefix, count in counts.most_common(1) if 2 * count > len(known)), "")
    renamed = {name: tensors[given] for name, given in plain.items() if name in known}
    for name, given in plain.items():
        prefix, suffix = matches[name]
        if name in known:
            continue
        is_wrapper = prefix == common or all(part in _IN_FRONT for part in prefix.split(".")[:-1])
        target = by_core[suffix] if suffix and is_wrapper else _core(name.removeprefix(common))
        renamed[name if target in renamed else target] = tensors[given]
    return renamed


def _core(name: str) -> str:
    """Return a name without the prefixes of common wrappers."""
    while name.partition(".")[0] in _IN_FRONT and "." in name:
        name = name.partition(".")[2]
    return name


def _split(name: str, known: Container[str]) -> tuple[str, str]:
    """Return a name as a prefix and its longest known suffix; ("", "") if there is none."""
    parts = name.split(".")
    suffixes = ((".".join(parts[:start]), ".".join(parts[start:])) for start in range(len(parts)))
    return next(((f"{front}." if front else "", suffix) for front, suffix in suffixes if suffix in known), ("", ""))
