"""Reading of a config from YAML files, their bases and KEY VALUE arguments; all problems are reported at once.

    cfg = load_cfg("configs/imagenet/resnet50.yaml", ["OPTIM.BASE_LR", "0.4"])

The options, with their defaults and meaning, are in options.py.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from distribuuuu.config import yaml_file
from distribuuuu.config.config_node import Config, get_cfg, get_value, iter_options
from distribuuuu.config.conflicts import find_problems
from distribuuuu.config.declaration import Option
from distribuuuu.config.errors import ConfigError, Problem
from distribuuuu.config.locate import RECIPE_PLUGINS, FoundConfig, ListedConfig, find_base, find_config, shipped_file
from distribuuuu.config.options import DECLARED, OPEN_SECTIONS, OPTIONS
from distribuuuu.config.registry import SETTINGS
from distribuuuu.config.run_files import local_folder
from distribuuuu.config.values import CliValue, coerce, frozen, parse

# The origin of options that are set on the command line.
COMMAND_LINE = "command line"

# The key of a YAML file that names its bases.
BASE = "_BASE_"
# Arguments and settings, and the option that selects the model or the entry that they belong to.
_SELECTED_BY = {"MODEL.KWARGS": "MODEL.ARCH", "DISTILL.KWARGS": "DISTILL.TEACHER", "OPTIM.KWARGS": "OPTIM.NAME",
                **{key: f"{key.partition('.')[0]}.NAME" for key in SETTINGS}}  # fmt: skip

# Options that are names of registered entries.
_ENTRIES = {key for key, option in OPTIONS.items() if option.names}
_SECTIONS = {*OPEN_SECTIONS, *(key.rpartition(".")[0] for key in OPTIONS)}

# An option, its value and its origin.
Setting = tuple[str, Any, str]
# The settings of a file, and its folder.
Layer = tuple[list[Setting], str]
# The files of --cfg in the order of merging, or a tree set in Python.
CfgFiles = str | Sequence[str] | Config | None


def load_cfg(cfg_file: CfgFiles = None, overrides: Sequence[str] = ()) -> Config:
    """Return the frozen tree: the defaults, then the YAML files with their bases, then KEY VALUE arguments.

    Raises:
        ConfigError: with every problem of all sources, each naming its key, origin, fix and the nearest key.
    """
    cfg, problems = read_cfg(cfg_file, overrides)
    if problems:
        raise ConfigError(problems)
    return cfg


def read_cfg(cfg_file: CfgFiles = None, overrides: Sequence[str] = ()) -> tuple[Config, list[Problem]]:
    """Return the frozen tree of all valid settings of files, or of a tree set in Python, and every problem.

    The plug-ins of the config are imported; of a `FoundConfig`, only known ones.
    """
    problems: list[Problem] = []
    cfg = get_cfg()
    layers = [(_read_tree(cfg_file), "")] if isinstance(cfg_file, Config) else list[Layer]()
    seen = set[str]()
    for file in list_files(cfg_file):
        layers += _read_file(find_config(file), problems, seen)
    for settings, folder in layers:
        _merge_file(cfg, settings, problems)
        _resolve_plugins(cfg, folder)
    of_file = cfg.clone()
    merge(cfg, _read_overrides(overrides, problems), problems)
    cfg.replaced.update((key, value) for key, value in iter_options(of_file) if cfg.origins.get(key) == COMMAND_LINE)
    cfg.replaced.update(getattr(cfg_file, "replaced", {}))
    _resolve_plugins(cfg)
    _add_recipe_plugins(cfg)
    if not cfg.TEST.DATASET:
        cfg.TEST.DATASET = cfg.TRAIN.DATASET
        if "TRAIN.DATASET" in cfg.origins:
            cfg.origins["TEST.DATASET"] = cfg.origins["TRAIN.DATASET"]
    cfg.OUT_DIR = local_folder(cfg.OUT_DIR)
    are_missing = _import_plugins(cfg, cfg_file, problems)
    # An unknown name may be that of a plug-in that is missing.
    found = [problem for problem in find_problems(cfg) if not (are_missing and problem.key in _ENTRIES)]
    refused = {problem.key for problem in problems}  # an option whose value was refused has its default
    problems += [problem for problem in found if problem.key not in refused]
    cfg.freeze()
    return cfg, problems


def list_files(cfg_file: CfgFiles) -> list[str]:
    """Return the files of --cfg as a list; of a tree, none."""
    if isinstance(cfg_file, Config) or not cfg_file:
        return []
    return [cfg_file] if isinstance(cfg_file, (str, os.PathLike)) else list(cfg_file)


def _resolve_plugins(cfg: Config, folder: str = "") -> None:
    if cfg.PLUGINS:
        from distribuuuu.config.plugins import resolve_plugins

        cfg.PLUGINS = resolve_plugins(cfg.PLUGINS, folder)


def _add_recipe_plugins(cfg: Config) -> None:
    """Add the plug-in of a shipped recipe if the config names its entries without it."""
    models = cfg.MODEL.ARCH.removeprefix("distribuuuu/"), cfg.DISTILL.TEACHER
    names = {*models, cfg.DATA.NAME, cfg.TASK.NAME, *cfg.TASK.MIXINS}
    files = (str(shipped_file("configs") / file) for file, entries in RECIPE_PLUGINS.items() if names & entries)
    cfg.PLUGINS = tuple(dict.fromkeys((*cfg.PLUGINS, *files)))


def _import_plugins(cfg: Config, cfg_file: CfgFiles, problems: list[Problem]) -> bool:
    """Import the plug-ins of a config, and append a problem for each that fails; return whether some are missing."""
    if not cfg.PLUGINS:
        return False
    from distribuuuu.config.plugins import import_plugins, is_shipped

    if problems and all(map(is_shipped, cfg.PLUGINS)):  # which import torch: the problems are reported at once
        return True
    is_found = isinstance(cfg_file, FoundConfig) and cfg.origins.get("PLUGINS") != COMMAND_LINE
    try:
        import_plugins(cfg.PLUGINS, str(cfg_file) if is_found else "")
    except ConfigError as error:
        problems += [problem.located(cfg.origins) for problem in error.problems]
        return True
    return False


# ---------------------------------------------------------------------------------------- YAML file


def _read_file(path: str, problems: list[Problem], seen: set[str], chain: tuple[str, ...] = ()) -> list[Layer]:
    """Return the layers of a file: its bases that are not in `seen`, the real paths of files, then its own settings.

    `chain` is 'FILE:LINE' of each `_BASE_` that leads to the file, beginning with a file of --cfg.
    """
    seen.add(os.path.realpath(path))
    settings, layers = _read_yaml(path, problems), list[Layer]()
    for key, value, origin in settings:
        for name in (value if isinstance(value, list) and value else [value]) if key == BASE else ():
            name = os.path.expanduser(os.path.expandvars(name)) if isinstance(name, str) else name
            base = find_base(name, os.path.dirname(path)) if isinstance(name, str) else None
            above = {os.path.realpath(user.rpartition(":")[0]) for user in (*chain, origin)}
            is_complete = isinstance(path, FoundConfig) and not isinstance(path, ListedConfig)
            if base is None or is_complete or os.path.realpath(base) in above:
                from distribuuuu.hints.words import describe_base_problem

                problem = describe_base_problem(name, base, path, (*chain, origin))
                problems.append(Problem(BASE, problem, {BASE: origin}))
            elif os.path.realpath(base) not in seen:
                layers += _read_file(base, problems, seen, (*chain, origin))
    users = "".join(f", base of {user}" for user in reversed(chain))
    own = [(key, value, f"{origin}{users}") for key, value, origin in settings if key != BASE]
    return [*layers, (own, os.path.dirname(path))]


def _read_yaml(path: str, problems: list[Problem]) -> list[Setting]:
    """Return the settings in a YAML file; append its problems to `problems`."""
    try:
        with open(path, encoding="utf-8") as file:
            root = yaml_file.compose(file.read(yaml_file.MAX_CHARACTERS + 1))
        if isinstance(root, yaml.MappingNode):
            return list(_walk_yaml(root, "", path, problems))
        message = "expected `SECTION:` lines with `KEY: value` lines beneath" if root else ""
    except OSError as error:
        from distribuuuu.hints.words import suggest_configs

        is_missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        message = "no such file" if is_missing else f"cannot be read: {error.strerror}"
        message += suggest_configs(path)
    except (yaml.YAMLError, ValueError) as error:
        message = f"not a valid YAML config: {_one_line(error)}"
    if message:
        problems.append(Problem(f"--cfg {path}", message))
    return []


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _walk_yaml(node: yaml.MappingNode, prefix: str, path: str, problems: list[Problem]) -> Iterator[Setting]:
    first_line: dict[str, int] = {}
    for key_node, _ in node.value:
        name, line = str(key_node.value), key_node.start_mark.line + 1
        if name in first_line and name != "<<":
            key, message = f"{prefix}{name}", f"already set in line {first_line[name]}; remove one of them"
            problems.append(Problem(key, message, {key: f"{path}:{line}"}))
        first_line[name] = line
    try:
        yaml.SafeLoader("").flatten_mapping(node)
    except yaml.YAMLError as error:
        section = prefix.rstrip(".") or "top level"
        problems.append(Problem(section, _one_line(error), {section: path}))
        return
    for key_node, value_node in node.value:
        key, origin = f"{prefix}{key_node.value}", f"{path}:{key_node.start_mark.line + 1}"
        if key in OPEN_SECTIONS and isinstance(value_node, yaml.MappingNode) and not value_node.value:
            yield key, Config(), origin  # {} empties the section
        elif (isinstance(value_node, yaml.MappingNode) and not prefix.startswith(OPEN_SECTIONS)
              and (key not in OPTIONS or key in OPEN_SECTIONS)):  # fmt: skip
            yield from _walk_yaml(value_node, f"{key}.", path, problems)
        elif key in _SECTIONS and value_node.tag == "tag:yaml.org,2002:null":
            continue  # an empty section
        else:
            try:
                yield key, yaml_file.construct(value_node), origin
            except yaml.YAMLError as error:
                problems.append(Problem(key, _one_line(error), {key: origin}))


def _read_tree(tree: Config) -> list[Setting]:
    """Return the settings of a tree whose options may have been set in Python, to values of any type."""
    defaults, unset = {key: option.default for key, option in OPTIONS.items()}, object()
    items = [item for item in iter_options(tree) if item[1] != defaults.get(item[0], unset) or item[0] in tree.origins]
    items = [(key, value) for key, value in items if not key.startswith(OPEN_SECTIONS)]
    items += [(f"{key}.{name}", value) for key in OPEN_SECTIONS for name, value in get_value(tree, key).items()]
    return [(key, value, tree.origins.get(key, "config")) for key, value in items]


# ------------------------------------------------------------------------------------- command line


def _read_overrides(overrides: Sequence[str], problems: list[Problem]) -> list[Setting]:
    """Return the settings in KEY VALUE or KEY=VALUE arguments."""
    settings, rest = list[Setting](), list(overrides)
    while rest:
        key, is_joined, value = rest.pop(0).partition("=")
        if not is_joined and not rest:
            problems.append(Problem(COMMAND_LINE, f"expected KEY VALUE pairs, but {key!r} has no value"))
            return []
        settings += _expand(key, CliValue(value if is_joined else rest.pop(0)))
    return settings


def _expand(key: str, text: CliValue) -> list[Setting]:
    """Return the setting of a KEY VALUE pair; of `SECTION {NAME: VALUE}` one setting for each name.

    `SECTION {}` is a setting of its own, which empties the section.
    """
    values = parse(text) if key in OPEN_SECTIONS else None
    if isinstance(values, dict) and not values:
        return [(key, values, COMMAND_LINE)]
    if not isinstance(values, dict) or any(":" in str(name) and value is None for name, value in values.items()):
        return [(key, text, COMMAND_LINE)]  # not a mapping, or no space after a colon; rejected by _merge
    return [(f"{key}.{name}", value, COMMAND_LINE) for name, value in values.items()]


# ------------------------------------------------------------------------------------------ merging


def split_key(key: str) -> tuple[str, str]:
    """Return the section of a key and its name there; names in free-form sections may contain dots."""
    for section in OPEN_SECTIONS:
        if key.startswith(f"{section}."):
            return section, key.removeprefix(f"{section}.")
    section, _, name = key.rpartition(".")
    return section, name


def _merge_file(cfg: Config, settings: list[Setting], problems: list[Problem]) -> None:
    """Apply the settings of a file.

    Arguments and settings for another model or entry than its own are removed. A TEST.DATASET that repeats
    TRAIN.DATASET, as in a dumped config, or the default, as in the files of 2021, which have no DATA.NAME, follows
    TRAIN.DATASET.
    """
    given = {key: value for key, value, _ in settings}
    for section, name in _SELECTED_BY.items():
        if given.get(name, get_value(cfg, name)) != get_value(cfg, name):
            _empty(cfg, section)
    merge(cfg, settings, problems)
    unset = [cfg.TRAIN.DATASET] if "DATA.NAME" in given else [cfg.TRAIN.DATASET, OPTIONS["TRAIN.DATASET"].default]
    if os.path.normpath(cfg.TEST.DATASET) in map(os.path.normpath, unset):
        cfg.TEST.DATASET = ""


def _empty(cfg: Config, section: str) -> None:
    """Remove all names from an open section."""
    for name in get_value(cfg, section):
        cfg.origins.pop(f"{section}.{name}", None)
    dict.clear(get_value(cfg, section))


def merge(cfg: Config, settings: list[Setting], problems: list[Problem]) -> None:
    """Apply the settings to the tree; append a problem for each that is invalid.

    Of an option that no longer exists, only its old default is valid, which changes nothing.
    """
    for key, value, origin in settings:
        section, name = split_key(key)
        if key in OPEN_SECTIONS and isinstance(value, Config) and not value:
            _empty(cfg, key)
            cfg.origins[key] = origin
            continue
        try:
            if section in OPEN_SECTIONS and OPTIONS[section].of is float:
                value = coerce(Option(1.0), value)
            elif section in OPEN_SECTIONS:
                value = parse(value) if isinstance(value, CliValue) else frozen(value)
            elif key in OPTIONS and not OPTIONS[key].is_open:
                value = coerce(OPTIONS[key], value)
            elif (option := DECLARED.get(key)) and option.removed:
                if coerce(option, value) == option.default:
                    continue
                raise ValueError(f"got {value}, but this option no longer exists; fix: remove it; {option.removed}")
            else:
                from distribuuuu.hints.options import describe_unknown_key

                raise ValueError(describe_unknown_key(key))
        except (ValueError, OverflowError, RecursionError) as error:
            problems.append(Problem(key, str(error), {key: origin}))
            continue
        (get_value(cfg, section) if section else cfg)[name] = value
        cfg.origins.pop(key, None)  # moves it to the end: the origins are in the order of the files
        cfg.origins[key] = origin


def override(cfg: Config, options: Mapping[str, Any], origin: str, allowed: tuple[str, ...]) -> Config:
    """Return a frozen copy with other values of some options, whose keys begin with one of `allowed`.

    ConfigError, which names `origin`: a key is unknown or not allowed, or a value is invalid.
    """
    copied, found = cfg.clone(), list[Problem]()
    copied.defrost()
    merge(copied, [(key, value, origin) for key, value in options.items()], found)
    message = f"has no effect here; expected {', '.join(allowed)}"
    found += [Problem(key, message, {key: origin}) for key in options if not key.startswith(allowed)]
    if problems := found or find_problems(copied):
        raise ConfigError(problems)
    copied.freeze()
    return copied
