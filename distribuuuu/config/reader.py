"""Read, check and write the config of a run; no problem is reported alone, and none with a traceback.

    cfg = load_cfg("configs/imagenet/resnet50.yaml", ["OPTIM.BASE_LR", "0.4"])

The options themselves, with their defaults and meaning, are in defaults.py.
"""

import ast
import contextlib
import copy
import functools
import math
import os
import re
import reprlib
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from yacs.config import CfgNode

from distribuuuu.config import yaml_file
from distribuuuu.config.config_files import similar_files
from distribuuuu.config.conflicts import find_conflicts
from distribuuuu.config.defaults import _C
from distribuuuu.config.errors import ConfigError, did_you_mean, near_matches
from distribuuuu.config.rules import (
    CHOICES,
    NULLABLE,
    NUMBER_SECTIONS,
    OPEN_SECTIONS,
    RANGES,
    REGISTERED,
    REGISTERED_LISTS,
    TEXT_LISTS,
)

# The origin of what the words of the command line set.
COMMAND_LINE = "command line"
# What a word begins with that joins a key to its value.
_GLUED = re.compile(r"[a-zA-Z]\w*(\.[^=]+)?=")


class Config(CfgNode):
    """A yacs tree that freezes for good and remembers where each value was set."""

    def __setitem__(self, key: str, value: Any) -> None:
        if self.is_frozen():
            raise AttributeError(f"cannot set {key}: the config is frozen; clone() and defrost() a copy")
        super().__setitem__(key, value)

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise AttributeError("a config cannot lose keys or be updated as a dict: set its keys one by one")

    __delitem__ = update = pop = popitem = clear = setdefault = _refuse

    @property
    def origins(self) -> dict[str, str]:
        """Where each value that is not a default was set: key -> 'FILE:LINE' or 'command line'."""
        return self.__dict__.setdefault("_origins", {})

    def dump(self, **options: Any) -> str:
        """Return the tree as YAML, in its own order: in FINETUNE.LR_MULT it has a meaning."""
        return super().dump(**{"sort_keys": False, **options})

    def __reduce__(self):
        return _rebuild, (dict(self), dict(self.__dict__))

    def __deepcopy__(self, memo: dict) -> "Config":
        return _rebuild(copy.deepcopy(dict(self), memo), copy.deepcopy(dict(self.__dict__), memo))


def _rebuild(items: dict, attributes: dict) -> Config:
    """Make a Config from its parts, its frozen state included (for copies and pickles)."""
    cfg = Config()
    dict.update(cfg, items)
    cfg.__dict__.update(attributes)
    return cfg


def _as_config(node: CfgNode) -> Config:
    items = {key: _as_config(value) if isinstance(value, CfgNode) else value for key, value in node.items()}
    return _rebuild(items, {**node.__dict__, "_origins": {}})


def get_cfg() -> Config:
    """Return a fresh, unfrozen tree of the defaults."""
    return _as_config(_C)


def iter_options(cfg: CfgNode, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ('SECTION.KEY', value) for every option, in the order of the defaults."""
    for key, value in cfg.items():
        if isinstance(value, CfgNode):
            yield from iter_options(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def get_value(cfg: CfgNode, key: str) -> Any:
    """Return the value of 'SECTION.KEY'."""
    for part in key.split("."):
        cfg = cfg[part]
    return cfg


# ---------------------------------------------------------------------------------------- reading


def load_cfg(cfg_file: str | None = None, overrides: Sequence[str] = ()) -> Config:
    """Return the frozen tree: the defaults, then the YAML file, then KEY VALUE words.

    Raises:
        ConfigError: with every problem of both sources, each naming its key, origin, remedy and the nearest key.
    """
    cfg, problems = read_cfg(cfg_file, overrides)
    if problems:
        raise ConfigError(problems)
    return cfg


def read_cfg(cfg_file: str | None = None, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """Return the frozen tree as far as it could be read, and every problem met."""
    cfg, problems = get_cfg(), []
    if cfg_file:
        _merge(cfg, _read_yaml(cfg_file, problems), problems)
    folder_of_file = cfg.TRAIN.DATASET
    _merge(cfg, _read_words(overrides, problems), problems)
    _inherit_test_dataset(cfg, folder_of_file)
    problems += find_problems(cfg)
    cfg.freeze()
    return cfg, problems


def _inherit_test_dataset(cfg: Config, folder_of_file: str) -> None:
    """Set TEST.DATASET to TRAIN.DATASET unless it was set to a folder of its own; defaults.py states the rule.

    Args:
        cfg: the merged tree.
        folder_of_file: TRAIN.DATASET before the command line was merged.
    """
    train, test, default = cfg.TRAIN.DATASET, cfg.TEST.DATASET, _C.TEST.DATASET
    if cfg.origins.get("TEST.DATASET") == COMMAND_LINE:
        if test == default != train:
            # A spelling of its own keeps the folder apart from an unset default when the dumped config is read again.
            cfg.TEST.DATASET = default.rstrip("/")
    elif not _same_folder(test, train) and (test == default or _same_folder(test, folder_of_file)):
        cfg.TEST.DATASET = train
        cfg.origins.pop("TEST.DATASET", None)  # to the end: the first origin names the file of the config
        cfg.origins["TEST.DATASET"] = f"TRAIN.DATASET, {cfg.origins['TRAIN.DATASET']}"


def _same_folder(path: str, other: str) -> bool:
    return os.path.normpath(path) == os.path.normpath(other)


def _read_yaml(path: str, problems: list[str]) -> list[tuple[str, Any, str]]:
    """Return (key, value, origin) of each leaf of a YAML file; what is wrong with it goes to `problems`."""
    try:
        with open(path, encoding="utf-8") as file:
            root = yaml_file.compose(file.read(yaml_file.MAX_CHARACTERS + 1))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        what = "cannot be read: it is a folder" if isinstance(error, IsADirectoryError) else "no such file"
        problems.append(f"--cfg {path}: {what}{similar_files(path)}")
        return []
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"--cfg {path}: cannot be read: {error}")
        return []
    except (yaml.YAMLError, ValueError) as error:
        problems.append(f"--cfg {path}: not YAML for a config: {' '.join(str(error).split())}")
        return []
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        problems.append(f"{path}: must hold `SECTION:` lines with `KEY: value` lines beneath")
        return []
    return list(_walk_yaml(root, "", path, problems))


def _walk_yaml(node: yaml.MappingNode, prefix: str, path: str, problems: list[str]) -> Iterator[tuple[str, Any, str]]:
    first_line: dict[str, int] = {}
    for key_node, _ in node.value:
        name, line = str(key_node.value), key_node.start_mark.line + 1
        if name in first_line and name != "<<":
            problems.append(f"{prefix}{name} ({path}:{line}): set before, in line {first_line[name]}; keep one")
        first_line[name] = line
    try:
        yaml.SafeLoader("").flatten_mapping(node)
    except yaml.YAMLError as error:
        problems.append(f"{prefix or 'top level'} ({path}): {' '.join(str(error).split())}")
        return
    for key_node, value_node in node.value:
        key, origin = f"{prefix}{key_node.value}", f"{path}:{key_node.start_mark.line + 1}"
        if isinstance(value_node, yaml.MappingNode) and not prefix.startswith(OPEN_SECTIONS):
            yield from _walk_yaml(value_node, f"{key}.", path, problems)
        elif key in _sections() and value_node.tag == "tag:yaml.org,2002:null":
            continue  # an empty section
        else:
            try:
                yield key, yaml_file.construct(value_node), origin
            except yaml.YAMLError as error:
                problems.append(f"{key} ({origin}): {' '.join(str(error).split())}")


def _read_words(words: Sequence[str], problems: list[str]) -> list[tuple[str, Any, str]]:
    """Return (key, text, origin) of KEY VALUE words from the command line; KEY=VALUE is read too, and reported."""
    pairs, glued, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        if _GLUED.match(word):
            pairs.append(word.split("=", 1))
            glued += pairs[-1]
        elif rest:
            pairs.append([word, rest.pop(0)])
        else:
            problems.append(f"command line: KEY VALUE pairs expected, but {word!r} is left without a partner")
            pairs = []
    if glued:
        problems.append(f"command line: KEY VALUE pairs expected; write `{shlex.join(glued)}` without the =")
    return [setting for key, value in pairs for setting in _expand(key, _CliValue(value))]


def _expand(key: str, text: "_CliValue") -> list[tuple[str, Any, str]]:
    """Return (key, value, origin) of a pair of words, of `SECTION {NAME: VALUE}` one for each name."""
    values = _from_text(text) if key in OPEN_SECTIONS else None
    if not isinstance(values, dict) or any(":" in str(name) and value is None for name, value in values.items()):
        return [(key, text, COMMAND_LINE)]  # is no mapping, or lacks the space after a colon, and is refused
    return [(f"{key}.{name}", value, COMMAND_LINE) for name, value in values.items()]


class _CliValue(str):
    """Text from the command line, to be read as the type of the key."""


@functools.cache
def _sections() -> list[str]:
    keys = [key for key, _ in iter_options(_C)]
    return sorted({key.rsplit(".", 1)[0] for key in keys if "." in key} | set(OPEN_SECTIONS))


def _section_of(key: str) -> tuple[str, str]:
    """Return a key's section and its name there; in an open section names may have dots of their own."""
    for section in OPEN_SECTIONS:
        if key.startswith(f"{section}."):
            return section, key.removeprefix(f"{section}.")
    section, _, name = key.rpartition(".")
    return section, name


def _merge(cfg: Config, settings: list[tuple[str, Any, str]], problems: list[str]) -> None:
    """Set each (key, value, origin) in the tree; what cannot be set goes to `problems`."""
    known = dict(iter_options(_C))
    for key, value, origin in settings:
        section, name = _section_of(key)
        try:
            if section in NUMBER_SECTIONS:
                value = _coerce(key, value, 1.0)
            elif section in OPEN_SECTIONS:
                value = _from_text(value) if isinstance(value, _CliValue) else _frozen(value)
            elif key in known:
                value = _coerce(key, value, known[key])
            else:
                raise ValueError(_unknown_key(key, known))
        except (ValueError, OverflowError) as error:
            problems.append(f"{key} ({origin}): {error}")
            continue
        (get_value(cfg, section) if section else cfg)[name] = value
        cfg.origins[key] = origin


def _unknown_key(key: str, known: dict[str, Any]) -> str:
    if key in OPEN_SECTIONS:
        return f"a section, not a key; set {key}.NAME, or give it as {{NAME: VALUE}}"
    if key in _sections():
        names = [other.removeprefix(f"{key}.") for other in known if other.startswith(f"{key}.")]
        return f"a section, not a key; it holds {', '.join(names)}"
    name = key.rpartition(".")[2]
    same_name = [other for other in known if other.rpartition(".")[2].lower() == name.lower()]
    near = same_name or near_matches(key, known)
    return "no such key" + (f"; did you mean {', '.join(near)}?" if near else "; --help-config lists all")


def _from_text(text: str) -> Any:
    """Read a word as Python, else as YAML, else as itself; lists become tuples."""
    try:
        return _frozen(ast.literal_eval(text))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        pass
    try:
        return _frozen(yaml_file.load(text))
    except (yaml.YAMLError, ValueError):
        return str(text)


def _frozen(value: Any) -> Any:
    """Return a value with lists as tuples and dicts as configs.

    Raises:
        ValueError: it is nothing that a config can hold.
    """
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        return Config({key: _frozen(item) for key, item in value.items()})
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ValueError(
        f"got {reprlib.repr(value)}; expected text, numbers, true, false, null, or lists and dicts of them"
    )


def _coerce(key: str, value: Any, default: Any) -> Any:
    """Return `value` as the type of the key.

    Raises:
        ValueError: it cannot be; says what is allowed.
    """
    if key in NULLABLE and (value is None or (isinstance(value, _CliValue) and value.lower() in ("none", "null"))):
        return None
    kind = NULLABLE.get(key, type(default))
    given = value
    if isinstance(value, _CliValue) and kind is not str:
        value = value.lower() == "true" if kind is bool and value.lower() in ("true", "false") else _from_text(value)
    if type(value) is int and abs(value) >= 1 << 63:
        raise ValueError(f"{reprlib.repr(value)} has more than 64 bits")
    if kind is float and not isinstance(value, bool) and isinstance(value, (int, float, str)):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML reads 5e-5, without a dot, as text
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{given} is not a finite number")
    if key in TEXT_LISTS:
        return _coerce_texts(given)
    if kind is tuple:
        return _coerce_numbers(value, given, default)
    if kind is str and isinstance(value, str):
        return str(value)
    if type(value) is not kind:
        null = " or null" if key in NULLABLE else ""
        raise ValueError(f"{_show(given)} is not {_KIND_NAMES[kind]}{null} (default {_show(default)})")
    return value


_KIND_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text (quote it)"}


def _coerce_numbers(value: Any, given: Any, default: tuple) -> tuple:
    value = value if isinstance(value, (list, tuple)) else [value]
    numbers = [item for item in value if isinstance(item, (int, float)) and not isinstance(item, bool)]
    if len(numbers) != len(value) or not all(math.isfinite(item) for item in numbers):
        raise ValueError(f"{_show(given)} is not a list of numbers, e.g. [30, 60] (default {list(default)})")
    return tuple(float(item) for item in numbers) if default and type(default[0]) is float else tuple(numbers)


def _coerce_texts(given: Any) -> tuple[str, ...]:
    """Return a list of texts, from a list or from `a, b`; whole numbers, which are names as well, become text."""
    value = given
    if isinstance(given, str):
        read = _from_text(given) if given.strip().startswith(("[", "(")) else given
        value = read if isinstance(read, tuple) else [part.strip() for part in given.split(",") if part.strip()]
    if not isinstance(value, (list, tuple)) or not all(type(item) in (str, int) for item in value):
        raise ValueError(f"{_show(given)} is not a list of texts, e.g. [conv1, 'layer1.*']; quote numbers with a dot")
    return tuple(str(item) for item in value)


def _show(value: Any) -> str:
    return repr(str(value)) if isinstance(value, str) else repr(value)


# --------------------------------------------------------------------------------------- checking


def origin_of(cfg: Config, default: CfgNode, key: str) -> str | None:
    """Return where a value was set; None for a default."""
    origin = cfg.origins.get(key)
    in_default = key in dict(iter_options(default))
    return origin if origin and not (in_default and get_value(cfg, key) == get_value(default, key)) else None


def check_cfg(cfg: CfgNode) -> None:
    """Raise ConfigError with every value that is out of range or contradicts another; touches no file."""
    problems = find_problems(cfg)
    if problems:
        raise ConfigError(problems)


def find_problems(cfg: CfgNode) -> list[str]:
    """Return a message for each value that is out of range or contradicts another."""
    found = [*_outside_choices(cfg), *_outside_registries(cfg), *_outside_ranges(cfg), *find_conflicts(cfg)]
    return [f"{with_origin(cfg, key)}: {message}" for key, message in found]


def with_origin(cfg: CfgNode, key: str) -> str:
    """Return the key, and where its value was set if that is not the default."""
    origin = getattr(cfg, "origins", {}).get(key)
    return f"{key} ({origin})" if origin else key


def _outside_choices(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    for key, allowed in {**CHOICES, **{key: registry.names() for key, registry in REGISTERED.items()}}.items():
        value = get_value(cfg, key)
        if value not in allowed and (key, value) != ("TASK.NAME", "auto"):
            yield key, f"{value!r} is not one of {', '.join(allowed)}{did_you_mean(value, allowed)}"


def _outside_registries(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    for key, registry in REGISTERED_LISTS.items():
        names, allowed = get_value(cfg, key), registry.names()
        for name in names:
            if name not in allowed:
                yield key, f"{name!r} is not one of {', '.join(allowed)}{did_you_mean(name, allowed)}"
        if len(set(names)) < len(names):
            yield key, f"{', '.join(names)}: a name is given twice"


def _outside_ranges(cfg: CfgNode) -> Iterator[tuple[str, str]]:
    for key, (least, most) in RANGES.items():
        value = get_value(cfg, key)
        if value is not None and (value < least or (most is not None and value > most)):
            yield key, f"{value} is outside the allowed range: {least} {'and up' if most is None else f'to {most}'}"
