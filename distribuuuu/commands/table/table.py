"""The command table: finding runs, reading reported results."""

import argparse
import math
import reprlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from distribuuuu.commands.flag_hints import CommandParser
from distribuuuu.commands.output import find_unread_url
from distribuuuu.commands.stats.run_groups import collecting, find_files, group_runs, read_runs
from distribuuuu.commands.table.tables import Row, format_table, format_text, make_config_row, make_row
from distribuuuu.config import Config, ConfigError, load_cfg, yaml_file
from distribuuuu.config.locate import find_config, shipped_file
from distribuuuu.config.plugins import ListedConfig
from distribuuuu.files.untrusted import printable
from distribuuuu.records.run_config import config_name

_DESCRIPTION = """Make a table of runs, in Markdown unless it is for a terminal. Each config
has one row: the mean and standard deviation over its seeds, beside published
results. Unfinished runs are omitted.

  %(prog)s exp
  %(prog)s 'exp/*/resnet*' --epoch best
"""
REPORTED_KEYS = ("params", "global_batch", "top1", "top5", "source", "same_images")
_TEXTS = ("source", "same_images")


def table(prog: str, args: list[str]) -> int:
    """Print a table; return the exit status.

    Raises:
        ConfigError: with what could not be read; the rest has been printed.
    """
    flags = build_parser(prog).parse_args(args)
    rows, notes, problems = collect_rows(flags)
    for note in notes:
        print(printable(note), file=sys.stderr)
    if rows and (flags.format == "text" or not flags.format and sys.stdout.isatty()):
        print(format_text(rows, flags.by, flags.epoch, shutil.get_terminal_size().columns), end="")
    elif rows:
        print(format_table(rows, flags.by, flags.epoch), end="")
    elif not problems:
        problems.append("no runs to show; fix: name folders of finished runs, or --configs")
    if problems:
        raise ConfigError(problems)
    return 0


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    removed = dict.fromkeys(("--readme", "--name"), "python tools/make_table.py, in a checkout")
    parser = CommandParser(prog, removed, description=_DESCRIPTION)
    parser.add_argument("runs", metavar="RUN", nargs="*", help="a run's folder, a folder of them, a .json file, a glob")
    parser.add_argument("--configs", metavar="YAML", nargs="+", default=[], help="also show these configs, measured or "
                        "not: files or folders of them")  # fmt: skip
    parser.add_argument("--by", choices=("config", "arch"), default="config", help="name of the rows; each config has "
                        "one row in either case")  # fmt: skip
    parser.add_argument("--epoch", choices=("last", "best"), default="last", help="the evaluation to show; the best "
                        "one was selected on the same images")  # fmt: skip
    parser.add_argument(
        "--reported",
        metavar="YAML",
        type=Path,
        default=shipped_file("benchmarks/reported.yaml"),
        help="published results",
    )
    parser.add_argument("--format", choices=("text", "markdown"), help="text for a terminal, the default there, with "
                        "the columns that fit; markdown: all columns")  # fmt: skip
    return parser


def collect_rows(args: argparse.Namespace) -> tuple[list[Row], list[str], list[str]]:
    """Return the rows of a table, messages about runs, and problems."""
    problems: list[str] = []
    reported = read_reported(args.reported, problems)
    urls = {run: problem for run in args.runs if (problem := find_unread_url(run))}
    problems += [f"RUN: {problem}" for problem in urls.values()]
    groups, notes = group_runs(read_runs([run for run in args.runs if run not in urls], problems))
    rows = [make_row(group, args.by, args.epoch, reported) for group in groups]
    measured = {row.config for row in rows}
    for cfg in read_configs(args.configs, problems):
        if config_name(cfg) not in measured:
            rows.append(make_config_row(cfg, args.by, reported))
    return rows, notes, problems


def read_configs(patterns: Sequence[str], problems: list[str]) -> list[Config]:
    """Return the configs in files and folders, or of shipped names; append what cannot be read to `problems`."""
    configs = []
    for pattern in patterns:
        shipped = shipped_file("configs") / pattern
        found = str(shipped) if shipped.is_dir() and not Path(pattern).exists() else find_config(pattern)
        with collecting(problems):
            configs += [load_cfg(ListedConfig(path)) for path in find_files(found, ("*.yaml",))]
    return configs


def read_reported(path: Path, problems: list[str]) -> dict[str, dict]:
    """Return the published results by config; append what is wrong with the file to `problems`."""
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml_file.load(file.read(yaml_file.MAX_CHARACTERS + 1)) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        problems.append(f"{path}: cannot be read: {' '.join(str(error).split())}")
        return {}
    reported = {}
    for name, entry in content.items() if isinstance(content, dict) else [("", content)]:
        if not isinstance(entry, dict) or not set(entry) <= set(REPORTED_KEYS) or "source" not in entry:
            problems.append(f"{path}: {name}: expected `source` and any of {', '.join(REPORTED_KEYS[:4])}, same_images")
        elif not isinstance(entry.get("same_images", {}), dict):
            problems.append(f"{path}: {name}: same_images: expected options and their values")
        elif wrong := [key for key, value in entry.items() if key not in _TEXTS and not _is_number(value)]:
            problems.append(f"{path}: {name}: {wrong[0]}: got {reprlib.repr(entry[wrong[0]])}; expected a number")
        else:
            reported[name] = entry
    return reported


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number, or the text of one, which keeps its digits as published."""
    try:
        return isinstance(value, (int, float, str)) and math.isfinite(float(value))
    except (ValueError, OverflowError):
        return False
