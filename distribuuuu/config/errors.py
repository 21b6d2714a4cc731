"""The exception for configuration mistakes, and the wording that error messages share."""

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """What the user has to change before the run can start: one message for each problem."""

    # Raised on one process alone, which then reports it whatever its rank.
    one_process = False
    # What the tool exits with.
    status = 2

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural, e.g. '1 image', '2,000 images', '3 classes'."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "sh", "tch", "x")) else "s"
    return f"{number:,} {noun}{ending}"


def near_matches(name: str, names: Iterable[str], num: int = 3) -> list[str]:
    """Return at most `num` names similar to `name`, the most similar first; case is ignored."""
    by_folded = {known.lower(): known for known in names}
    found = difflib.get_close_matches(name.lower(), by_folded, n=num, cutoff=0.6)
    return [by_folded[folded] for folded in found]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return '; did you mean a, b?', or an empty string when nothing is near."""
    near = near_matches(name, names)
    return f"; did you mean {', '.join(near)}?" if near else ""
