"""Parameters of a test that belong to the slow tier."""

import pytest


def slow(*values):
    """Return a parameter set for `pytest.mark.parametrize` that only `pytest -m slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)
