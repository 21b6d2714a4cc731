"""Configuration errors as values, and the wording that error messages share."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Problem:
    """One thing that the user has to change.

    Attributes:
        key: the option, flag or file; a tuple if several options conflict; empty if the message names it.
        message: what was found, what is expected, and the fix.
        origins: where the options were set: option -> 'FILE:LINE' or 'command line'.
    """

    key: str | tuple[str, ...]
    message: str
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def located(self, origins: Mapping[str, str]) -> "Problem":
        """Return the problem with the origins of a config."""
        return replace(self, origins=origins)

    def __str__(self) -> str:
        keys = [self.key] if isinstance(self.key, str) else self.key
        shown = ", ".join(f"{key} ({self.origins[key]})" if key in self.origins else key for key in keys)
        return f"{shown}: {self.message}" if shown else self.message


class ConfigError(ValueError):
    """An error that the user can fix: a wrong option, path, checkpoint or environment.

    Args:
        problems: one or several; a text is a problem without a key.
        origins: where the options of a config were set (`cfg.origins`); shown after each key.
    """

    # Whether one process alone raises it, and therefore reports it whatever its rank.
    one_process = False
    # Whether all processes raise it, so that the first one reports it.
    on_all_processes = False
    # Exit status of the command.
    status = 2

    def __init__(self, problems: str | Problem | Iterable[str | Problem], origins: Mapping[str, str] | None = None):
        given = [problems] if isinstance(problems, (str, Problem)) else problems
        found = [Problem("", problem) if isinstance(problem, str) else problem for problem in dict.fromkeys(given)]
        self.problems = [problem.located(origins) for problem in found] if origins else found
        super().__init__("\n".join(map(str, self.problems)))


class NonFiniteError(ConfigError):
    """The training loss or the weights are infinite or NaN; raised by every process at the same place."""

    on_all_processes = True

    def located(self, position: str, newest: object) -> "NonFiniteError":
        """Return the error with its position in the run and the newest checkpoint, which is finite, or None."""
        found, remedy = f"the newest checkpoint, {newest}, is finite", "continue from it with another RNG_SEED"
        if newest is None:
            found, remedy = "there is no checkpoint", "set CHECKPOINT.EVERY_STEPS, to have checkpoints within the epoch"
        fix = f"lower OPTIM.BASE_LR, lengthen OPTIM.WARMUP_EPOCHS, or {remedy}"
        return NonFiniteError(f"{self} {position}; {found}; fix: {fix}")


class DataError(ConfigError):
    """Data that cannot be read, or is not what it was at the start: it ends a run with status 1."""

    one_process = True
    status = 1

    @classmethod
    def of_read(cls, path: str, error: OSError) -> "DataError":
        """Return the error for a read that failed, which is no damage of the file."""
        return cls(f"{path}: cannot be read: {error.strerror or error}; fix: check the disk and the permissions")


class BadImageError(ConfigError):
    """An image that cannot be read; names the file."""

    one_process = True


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural, e.g. '1 image', '2,000 images', '3 classes'."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "sh", "tch", "x")) else "s"
    return f"{number:,} {noun}{ending}"


def first_few(names: Sequence[str], separator: str = ", ", num: int = 5) -> str:
    """Return the first `num` names and how many more there are."""
    more = f" and {len(names) - num} more" if len(names) > num else ""
    return separator.join(names[:num]) + more


def near_matches(name: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return at most 3 names whose similarity to `name`, 0 to 1, is at least `cutoff`, nearest first; ignore case."""
    by_folded = {known.lower(): known for known in names}
    found = difflib.get_close_matches(name.lower(), by_folded, n=3, cutoff=cutoff)
    return [by_folded[folded] for folded in found]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return '; did you mean a, b?', or an empty string if no name is similar."""
    near = near_matches(name, names)
    return f"; did you mean {', '.join(near)}?" if near else ""
