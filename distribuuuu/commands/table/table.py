"""The command table: finding runs, reading reported results, updating a README."""

import argparse
import math
import reprlib
import shlex
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
from distribuuuu.config.errors import counted, did_you_mean
from distribuuuu.config.locate import find_config, shipped_file
from distribuuuu.config.plugins import ListedConfig
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.untrusted import printable
from distribuuuu.records.run_config import config_name

_DESCRIPTION = """Make a table of runs, in Markdown unless it is for a terminal. Each config
has one row: the mean and standard deviation over its seeds, beside published
results. Unfinished runs are omitted.

  %(prog)s exp
  %(prog)s 'exp/*/resnet*' --epoch best
  %(prog)s exp --readme README.md --name small
"""
REPORTED_KEYS = ("params", "global_batch", "top1", "top5", "source", "same_images")
_TEXTS = ("source", "same_images")
_END = "<!-- /table -->"


def table(prog: str, args: list[str]) -> int:
    """Print a table, or write it to a README; return the exit status.

    Raises:
        ConfigError: with what could not be read; the rest has been printed.
    """
    flags = build_parser(prog).parse_args(args)
    if bool(flags.readme) != bool(flags.name):
        raise ConfigError("--readme FILE and --name NAME must be given together")
    rows, notes, problems = collect_rows(flags)
    for note in notes:
        print(printable(note), file=sys.stderr)
    is_text = not flags.readme and (flags.format == "text" if flags.format else sys.stdout.isatty())
    text = format_table(rows, flags.by, flags.epoch) if rows else ""
    if is_text and rows:
        text = format_text(rows, flags.by, flags.epoch, shutil.get_terminal_size().columns)
    if not rows and not problems:
        problems.append("no runs to show; fix: name folders of finished runs, or --configs")
    if flags.readme and not problems:
        block = f"<!-- made by: python tools/make_table.py {shlex.join(args)} -->\n\n{text}\n"
        with collecting(problems):
            write_block(Path(flags.readme), flags.name, block)
    else:
        print(text, end="")
        problems += [f"{flags.readme}: not updated because of the other problems"] if flags.readme else []
    if problems:
        raise ConfigError(problems)
    return 0


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = CommandParser(prog=prog, description=_DESCRIPTION)
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
    parser.add_argument("--readme", metavar="FILE", help="replace the block of --name in this file by the table")
    parser.add_argument("--name", metavar="NAME", help="the block between <!-- table NAME --> and <!-- /table -->")
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


def write_block(path: Path, name: str, block: str) -> None:
    """Replace the block between two markers of a README; the file is not written if it has that block already.

    Raises:
        ConfigError: the file cannot be read or written, or does not have each marker once.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
        if (changed := replace_block(text, name, block, str(path))) != text:
            with replacing(path.resolve(), "w", encoding="utf-8", newline="") as file:
                file.write(changed)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def replace_block(text: str, name: str, block: str, source: str = "the text") -> str:
    """Return the text with other content between `<!-- table NAME -->` and `<!-- /table -->`.

    Raises:
        ConfigError: there is no such block, or several ones, or it is not closed; the message names `source`.
    """
    lines, marker = text.splitlines(keepends=True), f"<!-- table {name} -->"
    starts = [number for number, line in enumerate(lines) if line.strip() == marker]
    if len(starts) != 1:
        names = [line.strip()[11:-4] for line in lines if line.startswith("<!-- table ")]
        hint = did_you_mean(name, names) or (f"; available: {', '.join(names)}" if names else "")
        raise ConfigError(f"{source}: got {counted(len(starts), 'line')} {marker}; expected one{hint}")
    comments = (number for number in range(starts[0] + 1, len(lines)) if lines[number].startswith("<!-- "))
    end = next((number for number in comments if not lines[number].startswith("<!-- made by: ")), None)
    if end is None or lines[end].strip() != _END:
        raise ConfigError(f"{source}: line {starts[0] + 1}: {marker} is not closed by {_END}")
    return "".join([*lines[: starts[0] + 1], block, *lines[end:]])
