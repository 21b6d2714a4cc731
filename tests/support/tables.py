"""Tests of tables: one test for all rows, or a parameter for each, of which some belong to the slow tier."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def each_row(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable], Callable]:
    """Run a test for each row of a table, with the same fixtures, as the arguments `names`; a failure prints it."""
    columns = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = list(rows)

    def decorate(test: Callable) -> Callable:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for row in table:
                try:
                    test(**dict(zip(columns, [row] if len(columns) == 1 else row, strict=True)), **fixtures)
                except BaseException:
                    print(f"row: {row!r}")
                    raise

        kept = [parameter for name, parameter in signature.parameters.items() if name not in columns]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate


def slow(*values):
    """Return a parameter set for `pytest.mark.parametrize` that only `pytest -m slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def pairwise(rows: Iterable, columns: Sequence) -> list[Any]:
    """Return all (row, column); the default tier has each row and each column at least once, the slow tier the rest."""
    rows = list(rows)
    num = max(len(rows), len(columns))
    chosen = {(at % len(rows), at % len(columns)) for at in range(num)}
    places = itertools.product(range(len(rows)), range(len(columns)))
    return [(rows[i], columns[j]) if (i, j) in chosen else slow(rows[i], columns[j]) for i, j in places]
