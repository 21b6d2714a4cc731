"""Tests of tables: one test for all rows, e.g. wrong inputs and the words of their messages."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each_row(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable], Callable]:
    """Run a test once for each row of a table, with the row as the arguments `names`; a failure prints its row.

    Unlike the cases of `pytest.mark.parametrize`, all rows are one test and have the same fixtures.
    """
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
