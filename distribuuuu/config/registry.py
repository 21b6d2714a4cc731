"""Registries: tables from names to objects, filled by decorators and imported on the first look-up."""

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from distribuuuu.config.errors import did_you_mean


class UnknownNameError(LookupError):
    """A name that no table holds; the message lists the nearest names."""


class Registry:
    """A table of one kind of object, filled by the modules of `package` that use `@NAME.register`.

    They are imported when an entry of theirs is first looked up, not before; other modules of the package are not
    imported, since they may be slow. A new entry is one new file in the package, with a decorated function or class:

        @MODELS.register
        def my_net(num_classes: int, width: int = 32) -> nn.Module: ...
    """

    def __init__(self, name: str, kind: str, package: str):
        self.name = name
        self.kind = kind
        self.package = package
        self._table: dict[str, Callable] = {}
        self._declared: set[str] | None = None

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

    def _sources(self) -> Iterator[tuple[str, str]]:
        """Yield (module, source) of the modules of the package that register an entry; imports none of them."""
        folder = Path(importlib.util.find_spec(self.package).submodule_search_locations[0])
        for path in sorted(folder.glob("*.py")):
            source = path.read_text(encoding="utf-8")
            if f"{self.name}.register" in source and path.stem != "__init__":
                yield f"{self.package}.{path.stem}", source

    def _read_declarations(self) -> Iterator[str]:
        """Yield the names that decorators declare, read from the source; a module that names them otherwise is run."""
        name = re.escape(self.name)
        for module, source in self._sources():
            decorated = rf'^@{name}\.register(?:\("([^"]+)"\))?\n(?:@.*\n)*(?:def|class) (\w+)'
            found = re.findall(decorated, source, re.MULTILINE)
            if len(found) < len(re.findall(rf"^\s*@?{name}\.register", source, re.MULTILINE)):
                importlib.import_module(module)
            yield from (given or own for given, own in found)

    def names(self) -> list[str]:
        """Return every registered name, sorted."""
        if self._declared is None:
            self._declared = set(self._read_declarations())
        return sorted({*self._declared, *self._table})

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def get(self, name: str) -> Callable:
        """Return what is registered under `name`.

        Raises:
            UnknownNameError: nothing is; the message lists near names, or all when there are few.
        """
        if name not in self._table and name in self:
            for module, _ in self._sources():
                importlib.import_module(module)
        if name in self._table:
            return self._table[name]
        hint = did_you_mean(name, self.names()) or f"; known: {', '.join(self.names())}"
        raise UnknownNameError(f"unknown {self.kind} {name!r}{hint}")


MODELS = Registry("MODELS", "model", "distribuuuu.models")
DATASETS = Registry("DATASETS", "data set", "distribuuuu.data.datasets")
SCHEDULES = Registry("SCHEDULES", "learning-rate schedule", "distribuuuu.optim")
LOSSES = Registry("LOSSES", "loss", "distribuuuu.tasks")
METRICS = Registry("METRICS", "metric", "distribuuuu.tasks")
TASKS = Registry("TASKS", "task", "distribuuuu.tasks")


def dataset_class(cfg) -> type:
    """Return the data-set family of a config; for an unknown name, which is told elsewhere, that of random images."""
    name = "dummy" if cfg.MODEL.DUMMY_INPUT else cfg.DATA.NAME
    return DATASETS.get(name if name in DATASETS else "dummy")
