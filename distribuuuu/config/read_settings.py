"""Reading of the settings of registered entries, and what is wrong with those of a config; see settings.py."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from distribuuuu.config.config_node import Config, get_value
from distribuuuu.config.declaration import AUTO, Option
from distribuuuu.config.errors import Problem, did_you_mean
from distribuuuu.config.options import OPTIONS
from distribuuuu.config.registry import BUILT_IN_TASKS, SETTINGS, TASKS, task_class, task_name
from distribuuuu.config.values import coerce

_TYPES = (bool, int, float, str)


def read_settings(key: str, declared: type, given: Mapping[str, Any]) -> tuple[Any, list[Problem]]:
    """Return an instance of a `Settings` dataclass with the given values, and every problem; None if there is one.

    A ValueError of its `__post_init__` is a problem of `key`, the option that holds the values.
    """
    problems, values = [], {}
    try:
        options = dict(list_options(declared))
        for name, value in given.items():
            if name not in options:
                message = f"no such setting{did_you_mean(name, options)}; expected one of {', '.join(options)}"
                problems.append(Problem(f"{key}.{name}", message))
                continue
            try:
                values[name] = coerce(options[name], value)
            except (ValueError, OverflowError) as error:
                problems.append(Problem(f"{key}.{name}", str(error)))
                continue
            problems += [Problem(f"{key}.{name}", message) for message in options[name].find_wrong(values[name])]
        return (None, problems) if problems else (declared(**values), [])
    except ValueError as error:
        return None, [Problem(key, str(error))]


def list_options(declared: type) -> Iterator[tuple[str, Option]]:
    """Yield the name and the declaration of each field of a `Settings` dataclass."""
    types, defaults = typing.get_type_hints(declared), declared()
    for field in dataclasses.fields(declared):
        default = getattr(defaults, field.name)
        given = typing.get_args(types[field.name]) or (types[field.name],)
        if type(default) is int and float in given:
            default = float(default)
        of = next((kind for kind in _TYPES if kind in given), None)
        limits = {name: value for name, value in field.metadata.items() if name in ("least", "most", "choices")}
        yield field.name, Option(default, of=of, **limits)


def find_declared(cfg: Config, key: str) -> type | None:
    """Return what the entry that a config selects declares for an option; None if nothing, or if it is unknown."""
    if key == "TASK.KWARGS" and cfg.TASK.MIXINS:
        is_known = task_name(cfg) in TASKS and not _has_unknown_mixin(cfg, key)
        return getattr(task_class(cfg), SETTINGS[key], None) if is_known else None
    registry = OPTIONS[_name_of(key)].names
    return registry.settings_of(get_value(cfg, _name_of(key)), SETTINGS[key]) if registry else None


def find_settings_problems(cfg: Config) -> Iterator[Problem]:
    """Yield a problem for each setting that the entry of the config does not have or does not allow."""
    for key in [key for key in SETTINGS if get_value(cfg, key)]:
        name, given, declared = get_value(cfg, _name_of(key)), get_value(cfg, key), find_declared(cfg, key)
        # A task without `Settings` takes any; an unknown name is reported elsewhere.
        takes_any = key == "TASK.KWARGS" and name not in (AUTO, *BUILT_IN_TASKS)
        if declared:
            yield from read_settings(key, declared, given)[1]
        elif not takes_any and not any(OPTIONS[_name_of(key)].find_wrong(name)) and not _has_unknown_mixin(cfg, key):
            message = f"got {', '.join(given)}, but {_name_of(key)} {name} has no settings"
            yield Problem(key, f"{message}; fix: add {key} '{{}}', or set {_name_of(key)} to an entry of your own")


def _has_unknown_mixin(cfg: Config, key: str) -> bool:
    return key == "TASK.KWARGS" and any(name not in TASKS for name in cfg.TASK.MIXINS)


def _name_of(key: str) -> str:
    return f"{key.partition('.')[0]}.NAME"
