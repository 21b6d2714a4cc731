"""Counts of what Python does: a measure of the host's time that does not depend on the machine."""

import itertools
import sys
from collections.abc import Callable
from typing import Any


def count_calls(function: Callable[[], Any], *uncounted: tuple[Any, str]) -> int:
    """Return the calls of Python and C functions that a function makes, without those within methods (object, name)."""
    numbers = itertools.count()

    def count(frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            next(numbers)

    def silent(method: Callable) -> Callable:
        def call(*args: Any) -> Any:
            sys.setprofile(None)
            returned = method(*args)
            sys.setprofile(count)
            return returned

        return call

    for owner, name in uncounted:
        setattr(owner, name, silent(getattr(owner, name)))
    sys.setprofile(count)
    function()
    sys.setprofile(None)
    return next(numbers)
