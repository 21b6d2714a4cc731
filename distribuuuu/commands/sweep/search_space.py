"""Search space of a sweep: the values of KEY=VALUES arguments, as distributions of Optuna."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from distribuuuu.config import Problem
from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.options import OPTIONS

_EXPECTED = "expected values a,b,c or a range log:LOW:HIGH, lin:LOW:HIGH or int:LOW:HIGH"
_SWEPT = re.compile(r"[a-zA-Z]\w*(\.[^=]+)?=")
_RANGE = re.compile(r"(\w+):([^:]*):([^:]*)")
_TOP_LEVEL_COMMA = re.compile(r",(?![^\[({]*[\])}])")


def parse_space(words: Sequence[str]) -> tuple[list[str], dict[str, Any], list[Problem]]:
    """Return the KEY VALUE arguments, the distributions of the KEY=VALUES arguments, and the problems of both."""
    fixed: list[str] = []
    swept, problems, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        if _SWEPT.match(word):
            swept.append(word.split("=", 1))
        else:
            fixed += [word, *rest[:1]]
            del rest[:1]
    space: dict[str, Any] = {}
    for key, text in swept:
        try:
            if key in OPTIONS and OPTIONS[key].not_swept:
                raise ValueError(f"cannot be swept: {OPTIONS[key].not_swept}")
            if key in space or key in fixed[::2]:
                raise ValueError(f"is {'swept twice' if key in space else 'both fixed and swept'}; fix: remove one")
            space[key] = parse_values(text)
        except ValueError as error:
            problems.append(Problem(key, str(error)))
    if not swept:
        problems.append(Problem("command line", f"no option is swept; {_EXPECTED}, e.g. OPTIM.BASE_LR=0.1,0.2"))
    return fixed, space, problems


def parse_values(text: str) -> Any:
    """Return the distribution of a text: categorical, with texts, for a list.

    Raises:
        ValueError: it is invalid; the message says what is expected.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if match := _RANGE.fullmatch(text):
        kind, *ends = match.groups()
        if kind not in ("log", "lin", "int"):
            raise ValueError(f"got {text}; no such range{did_you_mean(kind, ['log', 'lin', 'int'])}; {_EXPECTED}")
        if kind == "int" and not all(re.fullmatch(r"[+-]?[0-9]+", end) for end in ends):
            raise ValueError(f"got {text}; expected whole numbers")
        low, high = map(int if kind == "int" else float, ends)
        if not -math.inf < low < high < math.inf:
            raise ValueError(f"got {text}; expected LOW < HIGH")
        if kind == "log" and low <= 0:
            raise ValueError(f"got {text}; expected LOW > 0 for a logarithmic range; fix: use lin")
        return IntDistribution(low, high) if kind == "int" else FloatDistribution(low, high, log=kind == "log")
    values = tuple(value.strip() for value in _TOP_LEVEL_COMMA.split(text))
    if "" in values or len({*values}) < max(2, len(values)):
        raise ValueError(f"got {text!r}; {_EXPECTED}; to fix a value, write KEY VALUE")
    return CategoricalDistribution(values)


def is_list(distribution: Any) -> bool:
    """Tell whether a distribution is that of a list."""
    return hasattr(distribution, "choices")


def to_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return values as the texts that a run gets: numbers of ranges with four significant digits."""
    return {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in values.items()}


def list_ends(space: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return trials that have each value of a list, and both ends of a range, at least once."""
    ends = [value.choices if is_list(value) else (value.low, value.high) for value in space.values()]
    trials = range(max(map(len, ends), default=1))
    return [to_texts({key: end[trial % len(end)] for key, end in zip(space, ends, strict=True)}) for trial in trials]
