"""The command line of tools/make_table.py: which files count, what others reported, and the blocks of a README."""

import argparse
import glob
import math
import reprlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from distribuuuu.cli.main import USAGE_ERROR, report
from distribuuuu.config import Config, ConfigError, load_cfg, yaml_file
from distribuuuu.config.errors import counted, did_you_mean
from distribuuuu.report.results import FILE_NAME, name_config, read_results, write_whole
from distribuuuu.report.tables import Row, Run, format_table, group_runs, make_config_row, make_row

REPORTED_KEYS = ("params", "global_batch", "top1", "top5", "source")
_END = "<!-- /table -->"


def run_table_tool(description: str, reported: Path, words: Sequence[str] | None = None) -> int:
    """Print a table, or put it into a README; return the status: 2 if anything has to be mended.

    Args:
        description: what --help says.
        reported: the file of reported numbers, unless the words name another one.
        words: the command line; None: this process's.
    """
    words = sys.argv[1:] if words is None else list(words)
    args = build_parser(description, reported).parse_args(words)
    if bool(args.readme) != bool(args.name):
        report(ConfigError("--readme FILE and --name NAME go together"))
        return USAGE_ERROR
    rows, notes, problems = collect_rows(args)
    for note in notes:
        print(note, file=sys.stderr)
    table = format_table(rows, args.by, args.epoch) if rows else ""
    if not rows and not problems:
        problems.append("there is nothing to show: name folders of finished runs, or --configs")
    if args.readme and not problems:
        try:
            write_block(Path(args.readme), args.name, f"<!-- made by: {own_command(words)} -->\n\n{table}\n")
        except ConfigError as error:
            problems += map(str, error.problems)
    else:
        print(table, end="")
        problems += [f"{args.readme}: is left as it was, until the rest is mended"] if args.readme else []
    if problems:
        report(ConfigError(problems))
    return USAGE_ERROR if problems else 0


def build_parser(description: str, reported: Path) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", metavar="RUN", nargs="*", help="a run's folder, a folder of them, a .json file, a glob")
    parser.add_argument("--configs", metavar="YAML", nargs="+", default=[], help="also show these, measured or not: "
                        "files or folders of them")  # fmt: skip
    parser.add_argument("--by", choices=("config", "arch"), default="config", help="what rows are named by; there is "
                        "one for each config in either case")  # fmt: skip
    parser.add_argument("--epoch", choices=("last", "best"), default="last", help="the evaluation that counts; the "
                        "best was chosen by the images it is tested on")  # fmt: skip
    parser.add_argument("--reported", metavar="YAML", type=Path, default=reported, help="what others reported")
    parser.add_argument("--readme", metavar="FILE", help="put the table there, in place of the block of --name")
    parser.add_argument("--name", metavar="NAME", help="the block between <!-- table NAME --> and <!-- /table -->")
    return parser


def own_command(words: Sequence[str]) -> str:
    """Return the command that makes a table, as it stands above it in a README."""
    return f"python tools/make_table.py {shlex.join(words)}"


# ---------------------------------------------------------------------------------------- files


def collect_rows(args: argparse.Namespace) -> tuple[list[Row], list[str], list[str]]:
    """Return the rows that a command line asks for, what is to be told, and what has to be mended."""
    problems: list[str] = []
    reported = read_reported(args.reported, problems)
    groups, notes = group_runs(read_runs(args.runs, problems))
    rows = [make_row(group, args.by, args.epoch, reported) for group in groups]
    measured = {row.config for row in rows}
    for cfg in read_configs(args.configs, problems):
        if name_config(cfg) not in measured:
            rows.append(make_config_row(cfg, args.by, reported))
    return rows, notes, problems


def read_runs(words: Sequence[str], problems: list[str]) -> list[Run]:
    """Return the runs in files, folders and globs, each once; what cannot be read goes to `problems`."""
    paths: dict[Path, Path] = {}
    for word in words:
        try:
            for path in find_files(word, (FILE_NAME, "seed_*.json")):
                paths.setdefault(path.resolve(), path)
        except ConfigError as error:
            problems += map(str, error.problems)
    runs = []
    for path in paths.values():
        try:
            runs.append(Run(path, read_results(path)))
        except ConfigError as error:
            problems += map(str, error.problems)
    return runs


def find_files(word: str, patterns: Sequence[str]) -> list[Path]:
    """Return the file of that name, else the files that match a pattern anywhere in the folders of that name or glob.

    Raises:
        ConfigError: there are none.
    """
    places = [Path(word)] if Path(word).exists() else [Path(place) for place in sorted(glob.glob(word, recursive=True))]
    if not places:
        folder = Path(word).parent
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        raise ConfigError(f"{word}: no such file or folder{did_you_mean(Path(word).name, names)}")
    files = []
    for place in places:
        files += sorted(path for name in patterns for path in place.rglob(name)) if place.is_dir() else [place]
    if not files:
        raise ConfigError(f"{word}: holds no {' or '.join(patterns)}")
    return files


def read_configs(words: Sequence[str], problems: list[str]) -> list[Config]:
    """Return the configs in files and folders; what cannot be read goes to `problems`."""
    configs = []
    for word in words:
        try:
            configs += [load_cfg(str(path)) for path in find_files(word, ("*.yaml",))]
        except ConfigError as error:
            problems += map(str, error.problems)
    return configs


def read_reported(path: Path, problems: list[str]) -> dict[str, dict]:
    """Return what others reported: config -> numbers; what is wrong with the file goes to `problems`."""
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml_file.load(file.read(yaml_file.MAX_CHARACTERS + 1)) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        problems.append(f"{path}: cannot be read: {' '.join(str(error).split())}")
        return {}
    reported = {}
    for name, entry in content.items() if isinstance(content, dict) else [("", content)]:
        if not isinstance(entry, dict) or not set(entry) <= set(REPORTED_KEYS) or "source" not in entry:
            problems.append(f"{path}: {name}: must hold `source` and any of {', '.join(REPORTED_KEYS[:-1])}")
        elif wrong := [key for key, value in entry.items() if key != "source" and not _is_number(value)]:
            problems.append(f"{path}: {name}: {wrong[0]}: got {reprlib.repr(entry[wrong[0]])}; expected a number")
        else:
            reported[name] = entry
    return reported


def _is_number(value: Any) -> bool:
    """Tell whether a value is a finite number, or the text of one, as it was printed."""
    try:
        return isinstance(value, (int, float, str)) and math.isfinite(float(value))
    except (ValueError, OverflowError):
        return False


# --------------------------------------------------------------------------------------- README


def write_block(path: Path, name: str, block: str) -> None:
    """Put a table between its two marks in a README; a README that has it already is not written.

    Raises:
        ConfigError: the file cannot be read or written, or the marks are not there, each once.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
        if (changed := replace_block(text, name, block, str(path))) != text:
            write_whole(path.resolve(), changed)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def replace_block(text: str, name: str, block: str, where: str = "the text") -> str:
    """Return the text with other content between `<!-- table NAME -->` and `<!-- /table -->`.

    Raises:
        ConfigError: there is no such block, or more than one, or it does not end; calls the text `where`.
    """
    lines, mark = text.splitlines(keepends=True), f"<!-- table {name} -->"
    starts = [number for number, line in enumerate(lines) if line.strip() == mark]
    if len(starts) != 1:
        names = [line.strip()[11:-4] for line in lines if line.startswith("<!-- table ")]
        hint = did_you_mean(name, names) or (f"; there are {', '.join(names)}" if names else "")
        raise ConfigError(f"{where}: has {counted(len(starts), 'line')} {mark}, not one{hint}")
    ends = (number for number in range(starts[0] + 1, len(lines)) if lines[number].startswith("<!-- "))
    end = next((number for number in ends if not lines[number].startswith("<!-- made by: ")), None)
    if end is None or lines[end].strip() != _END:
        raise ConfigError(f"{where}: line {starts[0] + 1}: {mark} has no {_END} after it")
    return "".join([*lines[: starts[0] + 1], block, *lines[end:]])
