"""The problems that a call reports."""

from collections.abc import Callable
from typing import Any

import pytest

from distribuuuu.config import ConfigError


def problems_of(function: Callable, *args: Any, **options: Any) -> list[str]:
    """Return the problems of the ConfigError that a call raises."""
    with pytest.raises(ConfigError) as caught:
        function(*args, **options)
    return [str(problem) for problem in caught.value.problems]


def message_of(function: Callable, *args: Any, **options: Any) -> str:
    """Return the text of the ConfigError that a call raises."""
    with pytest.raises(ConfigError) as caught:
        function(*args, **options)
    return str(caught.value)
