"""Declaration of options: the form of the lines in the table of options."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from distribuuuu.config.registry import Registry

# A word that some options take instead of a number: it is found on this machine or in the data.
AUTO = "auto"


@dataclass(frozen=True)
class Option:
    """An option: its default, its allowed values, and what depends on it.

    Attributes:
        default: the value of a config that does not set it. None: null is allowed. {}: an open section, whose names
            the model, the task or the user defines.
        of: the type that the default does not tell: of a value that is not null, of the items of a list (None: numbers)
            or of the values in an open section (None: any).
        least, most: the range of a number; None: no limit.
        choices: the allowed words.
        names: the registry whose names are allowed; with `choices` too, those as well.
        auto: `AUTO` is allowed; for a list also numbers by name.
        shape: two numbers are allowed too, a height and a width in pixels.
        needs: the condition without which it has no effect, a key of `CONDITIONS`; empty: none.
        is_epoch: it is an epoch, from 0, or several, which a run may end before.
        path: it is a file or a folder.
        hashed: it is part of the hash by which runs count as seeds of one config.
        hash_default: the value with which it is left out of the hash: the first default of an option that was added
            after results had been recorded, so that runs of before and after count as seeds of one config; `...`: none.
        neutral: it is not meant to change results: never an override of a recipe.
        not_swept: why a sweep cannot vary it; empty: it can.
        removed: what to use instead of an option that no longer exists, whose default the files of older runs state and
            the hash keeps; empty: it exists.
    """

    default: Any
    of: type | None = None
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    names: Registry | None = None
    auto: bool = False
    shape: bool = False
    needs: str = ""
    is_epoch: bool = False
    path: bool = False
    hashed: bool = True
    hash_default: Any = ...
    neutral: bool = False
    not_swept: str = ""
    removed: str = ""

    @property
    def kind(self) -> type:
        """The type of a value that is not null."""
        return self.of if self.default is None and self.of else type(self.default)

    @property
    def is_open(self) -> bool:
        """Whether it is an open section."""
        return isinstance(self.default, dict)

    @property
    def range(self) -> str:
        """The range of a number in words; empty: any number."""
        if self.least is None:
            return "" if self.most is None else f"at most {self.most}"
        return f"{self.least} or more" if self.most is None else f"{self.least} to {self.most}"

    def find_wrong(self, value: Any) -> Iterator[str]:
        """Yield a message for each word that is not allowed or is given twice, and each number that is out of range."""
        items = value if isinstance(value, tuple) else (value,)
        # For a default, the sources that register the names are not read.
        if value != self.default and (self.choices or self.names is not None):
            allowed = [*self.choices, *(self.names.names() if self.names else ())]
            for word in items:
                if word not in allowed:
                    from distribuuuu.hints.words import describe_wrong_word

                    yield describe_wrong_word(word, allowed, self.names.kind if self.names else "")
            if len(set(items)) < len(items):
                yield f"got {list(items)}; expected each name once"
        for number in items if self.range else ():
            if number not in (None, AUTO) and not (
                (self.least is None or self.least <= number) and (self.most is None or number <= self.most)
            ):
                yield f"got {number}; expected {self.range}"


class Section(SimpleNamespace):
    """The options of a section as attributes, in their order; a plain default declares an option of any value."""


def iter_declared(section: Section, prefix: str = "") -> Iterator[tuple[str, Option]]:
    """Yield ('SECTION.KEY', option) for each option of a section, in the order of the declarations."""
    for name, value in vars(section).items():
        if isinstance(value, Section):
            yield from iter_declared(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, Option) else Option(value)
