"""Untrusted files: JSON whose values have other types than the reader expects, and a pickle that runs code."""

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ODD_VALUES = (None, True, -1, 0, 1.5, 10**30, 1e308, -1e308, 5e-324, "", "text", "\x1b[2J\u202e", [], [[1]], ["a", 2],
              {}, {"a": 1}, {"a": {"b": []}})  # fmt: skip


class Payload:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def list_changes(record: Any) -> Iterator[Any]:
    """Yield copies of a record, each with the value at one of its paths replaced or removed."""
    for path in _list_paths(record):
        for value in ODD_VALUES:
            changed = copy.deepcopy(record)
            parent = _find_parent(changed, path)
            parent[path[-1]] = value
            yield changed
        changed = copy.deepcopy(record)
        del _find_parent(changed, path)[path[-1]]
        yield changed


def _list_paths(value: Any, path: tuple = ()) -> Iterator[tuple]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (*path, key)
        yield from _list_paths(child, (*path, key))


def _find_parent(value: Any, path: tuple) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value
