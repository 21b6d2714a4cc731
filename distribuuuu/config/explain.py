"""Explanation of the options for --help-config: of each its default and the comment above its declaration."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from distribuuuu.config import options as defaults
from distribuuuu.config.config_node import Config
from distribuuuu.config.errors import ConfigError, Problem, did_you_mean
from distribuuuu.config.options import OPTIONS
from distribuuuu.config.read_settings import find_declared, list_options
from distribuuuu.config.registry import SETTINGS


def explain_options(section: str, cfg: Config) -> str:
    """Return the options of a section (all: '') with their defaults and meaning; raise ConfigError if it is unknown.

    The settings of the entries that the config selects follow their option, e.g. TASK.KWARGS.
    """
    comments = read_comments()
    chosen = [key for key in OPTIONS if not section or f"{key}.".startswith(f"{section}.")]
    if not chosen:
        sections = sorted({key.split(".")[0] for key in OPTIONS})
        message = f"no such section: {section}{did_you_mean(section, sections)}; expected one of {', '.join(sections)}"
        raise ConfigError(Problem("--help-config", message))
    text = ""
    for key in chosen:
        text += f"{key}: {show_default(OPTIONS[key].default)}\n    {comments[key]}\n"
        if key in SETTINGS and (declared := find_declared(cfg, key)):
            text += describe_settings(declared, key)
    return text


def show_default(default: Any) -> str:
    """Return a default as it is written in Python, with texts in double quotes."""
    return f'"{default}"' if isinstance(default, str) else repr(default)


def read_comments() -> dict[str, str]:
    """Return the meaning of each option: the comment above its declaration, and the names of its registry."""
    comments: dict[str, str] = {}
    lines: list[str] = []
    for line in Path(defaults.__file__).read_text(encoding="utf-8").splitlines():
        match = re.match(r"_C\.([A-Z0-9_.]+) = ", line)
        if match and match[1] in OPTIONS:
            names, choices = OPTIONS[match[1]].names, OPTIONS[match[1]].choices
            listed = f" One of {', '.join(names.names())}." if names and not choices else ""
            comments[match[1]] = " ".join(lines) + listed
        lines = [*lines, line[2:]] if line.startswith("# ") else []
    return comments


def dump_with_origins(cfg: Config) -> str:
    """Return the tree as YAML, with a comment on each value that was set: where."""
    origins = cfg.origins
    return "".join(f"{line}  # {origins[key]}\n" if key in origins else f"{line}\n" for line, key in _yaml_lines(cfg))


def _yaml_lines(node: Config, prefix: str = "", indent: str = "") -> Iterator[tuple[str, str]]:
    """Yield (line, key) of each line of the tree as YAML, one value per line."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, Config) and value:
            yield f"{indent}{_as_yaml(name)}:", key
            yield from _yaml_lines(value, f"{key}.", f"{indent}  ")
        else:
            plain = dict(value) if isinstance(value, Config) else value
            yield f"{indent}{_as_yaml(name)}: {_as_yaml(plain)}", key


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()


def describe_settings(declared: type, key: str) -> str:
    """Return the settings of an entry with their defaults and meaning, as lines for --help-config."""
    helps, text = {field.name: field.metadata.get("help", "") for field in dataclasses.fields(declared)}, ""
    for name, option in list_options(declared):
        limits = option.range or ", ".join(option.choices)
        text += f"{key}.{name}: {option.default!r}\n    {helps[name]}{f' ({limits})' if limits else ''}\n"
    return text
