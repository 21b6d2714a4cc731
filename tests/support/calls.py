"""Counts of what Python does: a measure of the host's time that does not depend on the machine."""

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts the operations of torch by name, e.g. aten::add."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def count_calls(function: Callable[[], Any], *uncounted: tuple[Any, str]) -> int:
    """Return the calls of Python and C functions that a function makes, without those within methods (object, name)."""
    numbers, silenced = itertools.count(), itertools.count()

    def count(frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            next(numbers)

    def silent(method: Callable) -> Callable:
        def call(*args: Any) -> Any:
            sys.setprofile(None)
            next(silenced)
            returned = method(*args)
            sys.setprofile(count)
            return returned

        return call

    for owner, name in uncounted:
        setattr(owner, name, silent(getattr(owner, name)))
    sys.setprofile(count)
    function()
    sys.setprofile(None)
    return next(numbers) - 2 * next(silenced)  # `call` and `sys.setprofile`
