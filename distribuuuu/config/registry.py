"""Registries: tables of functions and classes by name, filled by decorators and imported on the first look-up."""

import dataclasses
import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distribuuuu.config.errors import ConfigError, did_you_mean

# The options with settings, and the dataclass of an entry that declares them. The options beside them of the name NAME
# select the entries.
SETTINGS = {"TASK.KWARGS": "Settings", "LOSS.KWARGS": "Settings", "DATA.KWARGS": "Settings", "DATA.TABLE": "Columns"}
BUILT_IN_TASKS = ("airbench", "classification", "distillation", "lookahead", "multilabel")


class Registry:
    """A table of one kind of entry, filled by the modules below `package` that use `@NAME.register`.

    A module is imported when one of its entries is first looked up; the others, which may be slow to import, are not.
    A new entry is one new file in the package with a decorated function or class:

        @MODELS.register
        def my_net(num_classes: int, width: int = 32) -> nn.Module: ...
    """

    def __init__(self, name: str, kind: str, package: str):
        self.name = name
        self.kind = kind
        self.package = package
        self._table: dict[str, Callable] = {}

    def register(self, entry: Callable | str) -> Callable:
        """Register a function or class under its own name, or, if called with a string, under that name.

        Raises:
            ConfigError: the name is already taken, also by a module of the package that is not imported yet.
        """
        if isinstance(entry, str):
            return lambda function: self._add(entry, function)
        return self._add(entry.__name__, entry)

    def _add(self, name: str, function: Callable) -> Callable:
        module, other = function.__module__, ""
        if not module.startswith(f"{self.package}."):  # an entry of the package may not be imported yet
            other, _ = self._declared.get(name, ("", False))
        known = self._table.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (module, function.__qualname__):
            other = known.__module__
        if other:
            raise self._taken(name, other, module)
        self._table[name] = function
        return function

    def _taken(self, name: str, *modules: str) -> ConfigError:
        files = [getattr(sys.modules.get(module), "__file__", None) or module for module in modules]
        return ConfigError(f"{self.kind} {name!r} is registered twice: in {' and in '.join(files)}; fix: rename one")

    @functools.cached_property
    def _declared(self) -> dict[str, tuple[str, bool]]:
        """Each name in a decorator: its module, and whether that declares settings; read without importing the module.

        A module with computed names is imported instead. Two decorators with one name are a ConfigError.
        """
        spec, declared = importlib.util.find_spec(self.package), dict[str, tuple[str, bool]]()
        decorated = rf'^@{self.name}\.register(?:\("(.+)"\))?\n(?=(?:@.+\n)*(?:class|def) (\w+))'
        roots = map(Path, (spec.submodule_search_locations if spec else None) or [])
        for folder, path in ((root, path) for root in roots for path in sorted(root.rglob("*.py"))):
            source = path.read_text(encoding="utf-8")
            if f"{self.name}.register" not in source or path.stem == "__init__":
                continue
            module = ".".join((self.package, *path.relative_to(folder).with_suffix("").parts))
            found = [given or name for given, name in re.findall(decorated, source, re.MULTILINE)]
            uses = [line for line in source.splitlines() if line.lstrip(" @").startswith(f"{self.name}.register")]
            if len(found) < len(uses):
                importlib.import_module(module)
            for name in found:
                if name in declared:
                    raise self._taken(name, declared[name][0], module)
                declared[name] = (module, "class Settings" in source or "Columns" in source)
        return declared

    def names(self) -> list[str]:
        """Return every registered name, sorted."""
        return sorted({*self._declared, *self._table})

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def get(self, name: str) -> Any:
        """Return the entry of a name; raise LookupError with the nearest names, or else all, if there is none."""
        if name not in self._table and name in self:
            importlib.import_module(self._declared[name][0])
        if name in self._table:
            return self._table[name]
        hint = did_you_mean(name, self.names()) or f"; known: {', '.join(self.names())}"
        raise LookupError(f"unknown {self.kind} {name!r}{hint}")

    def settings_of(self, name: str, attribute: str = "Settings") -> type | None:
        """Return a dataclass of settings of an entry, None if it has none; a module without any is not imported."""
        has_settings = name in self._table or self._declared.get(name, ("", False))[1]
        return getattr(self.get(name), attribute, None) if has_settings else None


MODELS = Registry("MODELS", "model", "distribuuuu.models")
DATASETS = Registry("DATASETS", "data set", "distribuuuu.data")
SCHEDULES = Registry("SCHEDULES", "learning-rate schedule", "distribuuuu.optim")
OPTIMIZERS = Registry("OPTIMIZERS", "optimizer", "distribuuuu.optim")
LOSSES = Registry("LOSSES", "loss", "distribuuuu.tasks")
AUGMENTATIONS = Registry("AUGMENTATIONS", "augmentation", "distribuuuu.data")
METRICS = Registry("METRICS", "metric", "distribuuuu.tasks")
TASKS = Registry("TASKS", "task", "distribuuuu.tasks")
TRACKERS = Registry("TRACKERS", "tracker", "distribuuuu.records")
COMMANDS = Registry("COMMANDS", "command", "distribuuuu.commands")


def dataset_name(cfg) -> str:
    """Return the name of the data set of a config: DATA.NAME, or "dummy" with MODEL.DUMMY_INPUT."""
    return "dummy" if cfg.MODEL.DUMMY_INPUT else cfg.DATA.NAME


def dataset_class(cfg) -> Any:
    """Return the `ImageDataset` class of a config; for an unknown name, which is reported elsewhere, `Dummy`."""
    name = dataset_name(cfg)
    return DATASETS.get(name if name in DATASETS else "dummy")


def task_name(cfg) -> str:
    """Return TASK.NAME; `auto` is resolved by DISTILL.TEACHER and by the targets of the data set."""
    if cfg.TASK.NAME != "auto":
        return cfg.TASK.NAME
    if cfg.DISTILL.TEACHER:
        return "distillation"
    return "multilabel" if dataset_class(cfg).targets == "labels" else "classification"


def task_class(cfg) -> Any:
    """Return the `Task` class of a config: that of TASK.NAME, combined with those of TASK.MIXINS in front of it."""
    base = TASKS.get(task_name(cfg))
    return _combine(*map(TASKS.get, cfg.TASK.MIXINS), base) if cfg.TASK.MIXINS else base


@functools.cache
def _combine(*classes: Any) -> Any:
    """Return a class that derives from all classes, with the settings of all."""
    own = [one.Settings for one in dict.fromkeys(classes) if hasattr(one, "Settings")]
    settings = [one for one in own if not any(one is not other and issubclass(other, one) for other in own)]
    combined: dict[str, Any] = {}
    if settings:
        combined["Settings"] = dataclasses.dataclass(type("Settings", tuple(settings), {}))
    try:
        return type("+".join(one.__name__ for one in classes), classes, combined)
    except TypeError as error:
        raise ConfigError(f"TASK.MIXINS: {error}; fix: put a class before those that it derives from") from error
