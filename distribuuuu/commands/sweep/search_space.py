"""Search space of a sweep: the values of KEY=VALUES arguments, and the trials of a grid or a Sobol sequence."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distribuuuu.config import Problem
from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.options import OPTIONS

MAX_TRIALS = 1000
_EXPECTED = "expected values a,b,c or a range log:LOW:HIGH, lin:LOW:HIGH or int:LOW:HIGH"
_SWEPT = re.compile(r"[a-zA-Z]\w*(\.[^=]+)?=")
_RANGE = re.compile(r"(\w+):([^:]*):([^:]*)")
_TOP_LEVEL_COMMA = re.compile(r",(?![^\[({]*[\])}])")


@dataclass(frozen=True)
class Dimension:
    """The values of an option.

    Attributes:
        text: the values as on the command line.
        kind: "list", or that of a range: "log" (uniform in the logarithm), "lin" or "int" (with both ends).
        values: those of a list.
        low, high: the ends of a range.
    """

    text: str
    kind: str = "list"
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0

    def at(self, position: float) -> str:
        """Return the value at a position, 0 <= position < 1; of a range, with four significant digits."""
        if self.kind == "list":
            return self.values[int(position * len(self.values))]
        if self.kind == "int":
            return str(int(self.low + position * (self.high - self.low + 1)))
        if self.kind == "log":
            return f"{self.low * (self.high / self.low) ** position:.4g}"
        return f"{self.low + position * (self.high - self.low):.4g}"

    @property
    def size(self) -> float:
        """The number of values; infinite for a range of real numbers."""
        return len(self.values) if self.kind == "list" else self.high - self.low + 1 if self.kind == "int" else math.inf


def parse_space(words: Sequence[str]) -> tuple[list[str], dict[str, Dimension], list[Problem]]:
    """Return the KEY VALUE arguments, the dimensions of the KEY=VALUES arguments, and the problems of both."""
    fixed: list[str] = []
    swept, problems, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        if _SWEPT.match(word):
            swept.append(word.split("=", 1))
        else:
            fixed += [word, *rest[:1]]
            del rest[:1]
    space: dict[str, Dimension] = {}
    for key, text in swept:
        try:
            if key in OPTIONS and OPTIONS[key].not_swept:
                raise ValueError(f"cannot be swept: {OPTIONS[key].not_swept}")
            if key in space or key in fixed[::2]:
                raise ValueError(f"is {'swept twice' if key in space else 'both fixed and swept'}; fix: remove one")
            space[key] = parse_dimension(text)
        except ValueError as error:
            problems.append(Problem(key, str(error)))
    if not swept:
        problems.append(Problem("command line", f"no option is swept; {_EXPECTED}, e.g. OPTIM.BASE_LR=0.1,0.2"))
    return fixed, space, problems


def parse_dimension(text: str) -> Dimension:
    """Return the dimension of a text.

    Raises:
        ValueError: it is invalid; the message says what is expected.
    """
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
        return Dimension(text, kind, low=low, high=high)
    values = tuple(value.strip() for value in _TOP_LEVEL_COMMA.split(text))
    if "" in values or len({*values}) < max(2, len(values)):
        raise ValueError(f"got {text!r}; {_EXPECTED}; to fix a value, write KEY VALUE")
    return Dimension(text, values=values)


def list_trials(space: Mapping[str, Dimension], num: int | None, seed: int) -> list[dict[str, str]]:
    """Return the values of each trial by option: all combinations, or the first `num` of a scrambled Sobol sequence.

    The sequence (Sobol, 1967; scrambling by Owen, 1998) covers a space more evenly than random points. Points whose
    values are equal to those of an earlier one are left out.

    Raises:
        ValueError: there are fewer combinations than `num`, or more than MAX_TRIALS.
    """
    size = math.prod(dimension.size for dimension in space.values())
    if (num or size) > MAX_TRIALS:
        raise ValueError(f"got {num or size:,} trials; expected at most {MAX_TRIALS:,}; fix: --trials N")
    if num is None:
        grid = itertools.product(*(dimension.values for dimension in space.values()))
        return [dict(zip(space, values, strict=True)) for values in grid]
    import torch

    engine = torch.quasirandom.SobolEngine(len(space), scramble=True, seed=seed)
    trials: dict[tuple[str, ...], None] = {}
    for point in engine.draw(100 * num, dtype=torch.float64).clamp(max=1 - 1e-9).tolist():
        trials[tuple(dim.at(position) for dim, position in zip(space.values(), point, strict=True))] = None
        if len(trials) == num:
            return [dict(zip(space, values, strict=True)) for values in trials]
    raise ValueError(f"got {num} trials; expected at most {len(trials)}, the number of combinations")
