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


def list_changes(value: Any) -> Iterator[Any]:
    """Yield copies of a record, each with one value in it replaced or removed."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        for other in (*ODD_VALUES, *list_changes(child)):
            changed = copy.copy(value)
            changed[key] = other
            yield changed
        changed = copy.copy(value)
        del changed[key]
        yield changed
