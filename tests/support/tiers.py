"""Parameters of a test that belong to the slow tier."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


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
