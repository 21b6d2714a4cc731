"""Unknown models: the nearest names, or the sources that were searched."""

from collections.abc import Collection, Mapping
from typing import Any

from distribuuuu.config.errors import near_matches


def describe_unknown_model(arch: str, names: Mapping[str, Collection[Any]], sources: Collection[str]) -> str:
    """Return the message for an unknown model: the nearest names, or the sources that were searched.

    Args:
        arch: the unknown name.
        names: the names of each source that was searched; of all sources if the prefix is unknown.
        sources: the prefixes that exist.
    """
    prefix, _, name = arch.rpartition("/")
    near = near_matches(name, {known for source in names.values() for known in source})
    message = f"unknown model {arch!r}"
    if prefix and prefix not in sources:
        message += f"; expected a prefix of {', '.join(f'{source}/NAME' for source in sources)}, or none"
    elif prefix:
        near = [f"{prefix}/{known}" for known in near]
    if near:
        return f"{message}; did you mean {', '.join(near)}?"
    return message if prefix not in ("", *sources) else f"{message}; no similar name in {', '.join(names)}"
