"""The command table: finding runs, and what others have reported."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from distribuuuu.commands.flag_hints import CommandParser
from distribuuuu.commands.output import print_report
from distribuuuu.commands.stats.run_groups import collecting, find_files, group_runs, read_runs
from distribuuuu.commands.table.tables import format_table, format_text, make_config_row, make_row
from distribuuuu.config import Config, ConfigError, load_cfg, yaml_file
from distribuuuu.config.locate import ListedConfig, find_config, shipped_file
from distribuuuu.config.run_files import local_run
from distribuuuu.files.untrusted import printable
from distribuuuu.records.results import config_name

_DESCRIPTION = """Make a table of runs, in Markdown unless it is for a terminal. Each config
has one row: the mean and standard deviation over its seeds, beside published
results. Unfinished runs are omitted.

  %(prog)s exp
  %(prog)s 'exp/*/resnet*' --epoch best
"""
REPORTED = shipped_file("benchmarks/reported.yaml")


def table(prog: str, args: list[str]) -> int:
    """Print a table; return the exit status.

    Raises:
        ConfigError: with what could not be read; the rest has been printed.
    """
    flags = build_parser(prog).parse_args(args)
    problems: list[str] = []
    groups, notes = group_runs(read_runs([local_run(run) for run in flags.runs], problems))
    reported = yaml_file.load(REPORTED.read_text(encoding="utf-8"))
    rows = [make_row(group, flags.epoch, reported) for group in groups]
    measured = {row.config for row in rows}
    configs = read_configs(flags.configs, problems)
    rows += [make_config_row(cfg, reported) for cfg in configs if config_name(cfg) not in measured]
    for note in notes:
        print(printable(note), file=sys.stderr)
    if rows:
        is_text = flags.format == "text" or not flags.format and sys.stdout.isatty()
        print_report((format_text if is_text else format_table)(rows, flags.epoch).rstrip("\n"))
    elif not problems:
        problems.append("no runs to show; fix: name folders of finished runs, or --configs")
    if problems:
        raise ConfigError(problems)
    return 0


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = CommandParser(prog, description=_DESCRIPTION)
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="*", help="a run's folder, a folder of them, a .json file, a glob")
    add("--configs", metavar="YAML", nargs="+", default=[], help="also show these configs, measured or not: files or "
        "folders of them")  # fmt: skip
    add("--epoch", choices=("last", "best"), default="last", help="the evaluation to show; the best one was selected "
        "on the same images")  # fmt: skip
    add("--format", choices=("text", "markdown"), help="text for a terminal, the default there, without the columns of "
        "cost; markdown: all columns")  # fmt: skip
    return parser


def read_configs(patterns: Sequence[str], problems: list[str]) -> list[Config]:
    """Return the configs in files and folders, or of shipped names; append what cannot be read to `problems`."""
    configs = []
    for pattern in patterns:
        shipped = shipped_file("configs") / pattern
        found = str(shipped) if shipped.is_dir() and not Path(pattern).exists() else find_config(pattern)
        with collecting(problems):
            configs += [load_cfg(ListedConfig(path)) for path in find_files(found, ("*.yaml",))]
    return configs
