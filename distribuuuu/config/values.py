"""Values of options: parsing of texts, and conversion to the type of an option."""

import ast
import contextlib
import json
import math
import os
import re
import reprlib
from typing import Any

import yaml

from distribuuuu.config import yaml_file
from distribuuuu.config.config_node import Config
from distribuuuu.config.declaration import AUTO, Option


class CliValue(str):
    """A value from the command line, to be parsed as the type of its option."""


def parse(text: str) -> Any:
    """Return a text parsed as a Python literal, else as YAML, else unchanged; lists become tuples."""
    if len(text) == 1 and not text.isalnum() and text != "~":
        return str(text)  # a delimiter: '|' and ' ' are nothing in YAML
    try:
        return frozen(ast.literal_eval(text))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        pass
    try:
        return frozen(yaml_file.load(text))
    except (yaml.YAMLError, ValueError):
        return str(text)


def frozen(value: Any) -> Any:
    """Return a value with lists as tuples and dicts as configs; raise ValueError if a config cannot contain it."""
    if isinstance(value, (list, tuple)):
        return tuple(frozen(item) for item in value)
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        return Config({str(key): frozen(item) for key, item in value.items()})  # yacs writes no other keys
    if value is None or isinstance(value, (str, int, float)):
        return value
    got = reprlib.repr(value)
    raise ValueError(f"got {got}; expected text, numbers, true, false, null, or lists and dicts of them")


_TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text (quote it)"}


def coerce(option: Option, value: Any) -> Any:
    """Return `value` as the type of its option; raise ValueError if it cannot be converted."""
    is_nullable = option.default is None
    if is_nullable and (value is None or (isinstance(value, CliValue) and value.lower() in ("none", "null"))):
        return None
    kind, given = option.kind, value
    if option.auto and value == AUTO:
        return AUTO
    if option.auto and kind is tuple and (isinstance(value, dict) or str(value).startswith("{")):
        return _numbers_by_name(value)
    if isinstance(value, CliValue) and kind is not str:
        value = value.lower() == "true" if kind is bool and value.lower() in ("true", "false") else parse(value)
    if option.shape and isinstance(value, (list, tuple)):
        return _coerce_shape(value, given)
    if type(value) is int and abs(value) >= 1 << 63:
        raise ValueError(f"got {reprlib.repr(value)}; expected at most 64 bits")
    if kind is float and not isinstance(value, bool) and isinstance(value, (int, float, str)):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML reads 5e-5, without a dot, as text
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"got {given}; expected a finite number")
    if kind is tuple:
        is_of_texts = option.of is str or option.names is not None
        return _coerce_texts(given) if is_of_texts else _coerce_numbers(value, given, option)
    if kind is str and isinstance(value, str):
        return expand_path(value) if option.path else str(value)
    if type(value) is not kind:
        null = " or null" if is_nullable else f" or {AUTO}" if option.auto else ""
        null = " or [height, width]" if option.shape else null
        raise ValueError(f"got {_show(given)}; expected {_TYPE_NAMES[kind]}{null} (default {_show(option.default)})")
    return value


def expand_path(path: str) -> str:
    """Return a path or a URL with `~` and `$VARIABLE` expanded; raise ValueError if one of them is unknown."""
    expanded = str(os.path.expanduser(os.path.expandvars(path)))
    if unknown := re.search(r"\$(\w+|\{\w+\})", expanded):
        raise ValueError(f"got {path}; the variable {unknown[0]} is not set; fix: set it, or write a whole path")
    if expanded.startswith("~"):
        raise ValueError(f"got {path}; there is no such home folder; fix: set HOME, or write a whole path")
    return expanded


def _coerce_numbers(value: Any, given: Any, option: Any) -> tuple:
    default, auto = option.default, f", or {AUTO}" if option.auto else ""
    value = value if isinstance(value, (list, tuple)) else [value]
    numbers = [item for item in value if isinstance(item, (int, float)) and not isinstance(item, bool)]
    if len(numbers) != len(value) or not all(math.isfinite(item) for item in numbers):
        expected = f"expected a list of numbers, e.g. [30, 60]{auto} (default {list(default)})"
        raise ValueError(f"got {_show(given)}; {expected}")
    return tuple(float(item) for item in numbers) if default and type(default[0]) is float else tuple(numbers)


def _numbers_by_name(value: Any) -> str:
    """Return numbers by name as JSON, in which a config keeps them."""
    found = value if isinstance(value, dict) else parse(str(value))
    if not isinstance(found, dict) or not all(type(number) in (int, float) for number in found.values()):
        raise ValueError(f"got {_show(value)}; expected numbers by the names of classes, e.g. {{cat: 2, dog: 0.5}}")
    return json.dumps(dict(found), ensure_ascii=False)


def _coerce_shape(value: Any, given: Any) -> Any:
    """Return a height and a width; a number if they are the same, as for a square."""
    if len(value) != 2 or not all(type(side) is int and 0 < side < 1 << 31 for side in value):
        raise ValueError(f"got {_show(given)}; expected an integer, or [height, width] in pixels, e.g. [96, 320]")
    return value[0] if value[0] == value[1] else tuple(value)


def _coerce_texts(given: Any) -> tuple[str, ...]:
    """Return a list, or a text `a, b`, as strings; integers, which may be module names, become strings."""
    value = given
    if isinstance(given, str):
        parsed = parse(given) if given.strip().startswith(("[", "(")) else given
        value = parsed if isinstance(parsed, tuple) else [part.strip() for part in given.split(",") if part.strip()]
    if not isinstance(value, (list, tuple)) or not all(type(item) in (str, int) for item in value):
        expected = "expected a list of texts, e.g. [conv1, 'layer1.*']; quote numbers with a dot"
        raise ValueError(f"got {_show(given)}; {expected}")
    return tuple(str(item) for item in value)


def _show(value: Any) -> str:
    return repr(str(value)) if isinstance(value, str) else repr(value)
