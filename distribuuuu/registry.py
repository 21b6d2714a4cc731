"""Tables from names to objects, filled by decorators, discovered on the first look-up."""

import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable
from pathlib import Path


class UnknownNameError(LookupError):
    """A name that no table holds; the message lists the nearest names."""


def near_matches(name: str, names: Iterable[str], num: int = 3) -> list[str]:
    """Return at most `num` names like `name`, the likest first; upper and lower case count as the same."""
    by_folded = {known.lower(): known for known in names}
    found = difflib.get_close_matches(name.lower(), by_folded, n=num, cutoff=0.6)
    return [by_folded[folded] for folded in found]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return '; did you mean a, b?', or an empty string when nothing is near."""
    near = near_matches(name, names)
    return f"; did you mean {', '.join(near)}?" if near else ""


class Registry:
    """A table of one kind of thing, kept by the modules of `package` that say `NAME.register`.

    They are imported on the first look-up, not before; other modules of the package are left alone, since they may
    be slow to import. A new entry is one new file in the package, with a decorated function or class in it:

        @MODELS.register
        def my_net(num_classes: int, width: int = 32) -> nn.Module: ...
    """

    def __init__(self, name: str, kind: str, package: str):
        self.name = name
        self.kind = kind
        self.package = package
        self._table: dict[str, Callable] = {}
        self._discovered = False

    def register(self, entry: Callable | str) -> Callable:
        """Register a function under its own name, or, called with a string, under that name.

        Raises:
            ValueError: the name is taken by another function.
        """
        if isinstance(entry, str):
            return lambda function: self._add(entry, function)
        return self._add(entry.__name__, entry)

    def _add(self, name: str, function: Callable) -> Callable:
        known = self._table.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
            raise ValueError(
                f"{self.kind} {name!r} is registered twice: in {known.__module__} and in {function.__module__}"
            )
        self._table[name] = function
        return function

    def _discover(self) -> None:
        if self._discovered:
            return
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__, f"{self.package}."):
            source = importlib.util.find_spec(module.name).origin
            if f"{self.name}.register" in Path(source).read_text(encoding="utf-8"):
                importlib.import_module(module.name)
        self._discovered = True

    def names(self) -> list[str]:
        """Return every registered name, sorted."""
        self._discover()
        return sorted(self._table)

    def __contains__(self, name: str) -> bool:
        self._discover()
        return name in self._table

    def get(self, name: str) -> Callable:
        """Return what is registered under `name`.

        Raises:
            UnknownNameError: nothing is; the message lists near names, or all when there are few.
        """
        if name in self:
            return self._table[name]
        hint = did_you_mean(name, self.names()) or f"; known: {', '.join(self.names())}"
        raise UnknownNameError(f"unknown {self.kind} {name!r}{hint}")


MODELS = Registry("MODELS", "model", "distribuuuu.models")
DATASETS = Registry("DATASETS", "data set", "distribuuuu.datasets")


def family_of(cfg) -> type:
    """Return the data-set family of a config; for an unknown name, which is told elsewhere, that of random images."""
    name = "dummy" if cfg.MODEL.DUMMY_INPUT else cfg.DATA.NAME
    return DATASETS.get(name if name in DATASETS else "dummy")
