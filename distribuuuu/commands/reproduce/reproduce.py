"""The command reproduce: training a row of the measured results again, with its config and seed."""

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distribuuuu.commands.flag_hints import CommandParser, parse_flags
from distribuuuu.commands.output import WIDTH, find_unread_url, print_report
from distribuuuu.commands.reproduce.verdict import compare_run, describe_possible, format_rows
from distribuuuu.commands.stats.run_groups import Result, group_runs, name_groups, read_runs
from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.locate import find_shipped, shipped_file
from distribuuuu.config.options import OPEN_SECTIONS, OPTIONS, option_of
from distribuuuu.config.run_files import find_path_problem
from distribuuuu.files.untrusted import printable
from distribuuuu.launch.processes import start_child
from distribuuuu.launch.signals import handled_by
from distribuuuu.records.read_results import FILE_NAME, read_results

_DESCRIPTION = """Train a row of the measured results again, with its config and one of its
seeds, and compare the outcome: the SHA-256 of the weights, and the interval of
the row. The same command resumes a stopped run.

  %(prog)s --list
  %(prog)s shapes/resnet14
  %(prog)s cifar10/airbench94 TRAIN.DATASET /data/cifar10
  %(prog)s clothing10/resnet14 TRAIN.DATASET /data/clothing10
"""
# Options that change results, though they may differ between the seeds of one config.
_FIXED = ("PLUGINS", "RNG_SEED", "TEST.LABELS")


def reproduce(prog: str, args: list[str]) -> int:
    """Rerun a row; return the exit status: 0 if it is reproduced, 1 if not, that of the training if it ended early."""
    flags, rest, problems = parse_flags(build_parser(prog), args, lambda words: any(map(changes_result, words.split())))
    name, words = flags.row, rest
    if problems:
        raise ConfigError(problems)
    rows, notes = read_rows(flags.results)
    for note in notes:
        print(printable(note), file=sys.stderr)
    if flags.list:
        print_report(format_rows(rows))
        return 0
    name = find_row(name, rows, flags.results, prog)
    row = sorted(rows[name], key=lambda run: run.record["seed"])
    seed = row[0].record["seed"] if flags.seed is None else flags.seed
    check_overrides(words, name)
    default = Path("exp", "reproduce", re.sub(r"[^\w.]+", "_", name)[:80], f"seed_{seed}")
    out_dir = dict(zip(words[::2], words[1::2], strict=True)).get("OUT_DIR", str(default))
    if problem := find_path_problem(out_dir):
        raise ConfigError(Problem("OUT_DIR", problem))
    command = build_command(row[0].record, seed, [*words, "OUT_DIR", out_dir])
    shown = f"distribuuuu {shlex.join(command)}"
    print_report(textwrap.fill(shown, WIDTH, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False))
    print_report(textwrap.fill(f"possible verdicts: {describe_possible(row, seed)}", WIDTH))
    if status := train_again(command, row[0].record):
        return status
    rerun, record = read_results(Path(out_dir, FILE_NAME)), row[0].record
    keys = [(run["config"], run["overrides"], run["training"]["epochs_planned"]) for run in (rerun, record)]
    if keys[0] != keys[1] or (rerun["seed"], rerun["finished"]) != (seed, True):
        raise ConfigError(Problem("OUT_DIR", f"{out_dir} is of another run; fix: set OUT_DIR to another folder"))
    is_reproduced, text = compare_run(row, rerun)
    print_report(text)
    return 0 if is_reproduced else 1


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(prog, description=_DESCRIPTION, usage="%(prog)s [--list] [ROW] [--seed N] [KEY VALUE ...]")
    add = parser.add_argument
    add("row", metavar="ROW", nargs="?", default="", help="the row; KEY VALUE options may not change its result")
    add("--list", action="store_true", help="print the rows and exit")
    add("--seed", metavar="N", type=int, help="the seed (default: the lowest of the row)")
    add("--results", metavar="FOLDER", default=str(shipped_file("benchmarks/results")), help="the measured results "
        "(default: those of this project)")  # fmt: skip
    return parser


def read_rows(folder: str) -> tuple[dict[str, list[Result]], list[str]]:
    """Return the rows of a folder of results by name, and notes about skipped runs and damaged files.

    Raises:
        ConfigError: there are none, or the folder is a URL.
    """
    if problem := find_unread_url(folder):
        raise ConfigError(Problem("--results", problem))
    problems: list[str] = []
    groups, notes = group_runs(read_runs([folder], problems))
    if not groups and problems:
        raise ConfigError(problems)
    rows = dict(zip(name_groups(groups), groups, strict=True))
    return rows, [*notes, *(f"{problem}; its run is left out" for problem in problems)]


def find_row(name: str, rows: Mapping[str, Sequence[Result]], folder: str, prog: str) -> str:
    """Return the row of a name: that of the row, of its config with the fewest options, or the beginning of a row.

    Raises:
        ConfigError: there is no such row, or several ones.
    """
    if name in rows:
        return name
    options = {row: len(runs[0].record["overrides"]) for row, runs in rows.items() if runs[0].record["config"] == name}
    found = [row for row, num in options.items() if num == min(options.values())]
    if name and not found and find_shipped(name):
        raise ConfigError(Problem("ROW", f"{name} is a config without a measured row in {folder}; fix: choose a row of "
                                  f"{prog} --list, or train it: distribuuuu train --cfg {name}"))  # fmt: skip
    found = found or [row for row in rows if name and row.startswith(name)]
    if len(found) > 1:
        shown = "; ".join(f"'{row}'" for row in sorted(found))
        raise ConfigError(Problem("ROW", f"got {name}, which {len(found)} rows begin with; fix: choose one of {shown}"))
    if not found:
        configs = {runs[0].record["config"] or row: row for row, runs in rows.items()}
        hint = did_you_mean(name, configs) or f"; fix: choose a row of {prog} --list"
        raise ConfigError(Problem("ROW", f"got {name or 'none'}; expected a row of {folder}{hint}"))
    return found[0]


def is_option(key: str) -> bool:
    """Tell whether a key is that of an option, or of a name in an open section."""
    return key in OPTIONS or key.startswith(tuple(f"{section}." for section in OPEN_SECTIONS))


def changes_result(key: str) -> bool:
    """Tell whether a key is that of an option that changes the result of a run."""
    return is_option(key) and (key in _FIXED or option_of(key).hashed and not option_of(key).neutral)


def check_overrides(words: Sequence[str], row: str) -> None:
    """Check that KEY VALUE arguments do not change the result of a row.

    Raises:
        ConfigError: one does, or a value is missing.
    """
    problems = []
    if len(words) % 2:
        problems.append(Problem("command line", f"expected KEY VALUE pairs, but {words[-1]!r} has no value"))
    for key in words[::2]:
        if not is_option(key):
            problems.append(Problem(key, f"no such key{did_you_mean(key, OPTIONS)}"))
        elif changes_result(key):
            fix = "use --seed" if key == "RNG_SEED" else "remove it, or use the command train"
            problems.append(Problem(key, f"changes the result of {row}, which is to be repeated; fix: {fix}"))
    if problems:
        raise ConfigError(problems)


def build_command(record: Mapping[str, Any], seed: int, words: Sequence[str]) -> list[str]:
    """Return the arguments that train a recorded run again.

    Args:
        record: its results.json, which may come from others: it names a shipped config, and options of a recipe.
        seed: the seed.
        words: further KEY VALUE arguments.

    Raises:
        ConfigError: the recorded config is not a shipped one, or a recorded option is not one of a recipe.
    """
    name, changes = record["config"], record["overrides"]
    if not (paths := find_shipped(str(name))):
        raise ConfigError(Problem("config", f"got {name} in the row; expected a config in {shipped_file('configs')}"))
    if wrong := [key for key in changes if not (is_option(key) and option_of(key).hashed)]:
        raise ConfigError(Problem("overrides", f"got {wrong[0]!r} in the row; expected options of a recipe"))
    values = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in changes.items()]
    processes = record["training"]["processes"]
    nproc = ["--nproc", str(processes)] if processes > 1 else []
    recorded = [text for pair in values for text in pair]
    return ["train", "--cfg", *paths, *nproc, *recorded, "RNG_SEED", str(seed), *words]


def train_again(command: Sequence[str], record: Mapping[str, Any]) -> int:
    """Train in a child process and return its status; a signal stops it with a checkpoint.

    It has the recorded number of threads, unless OMP_NUM_THREADS is set.
    """
    threads = record.get("environment", {}).get("threads")
    env = {} if "OMP_NUM_THREADS" in os.environ or not isinstance(threads, int) else {"OMP_NUM_THREADS": str(threads)}
    children: list[subprocess.Popen] = []

    def forward(signum: int) -> None:
        for child in children:
            child.send_signal(signum)

    with handled_by(forward, on_quit=forward):
        children.append(start_child([sys.executable, "-m", "distribuuuu", *command], "reproduce", env))
        status = children[0].wait()
    if status not in (0, 2):  # 2: it has printed what to change
        print("the training has not finished; rerun the same command to resume", file=sys.stderr)
    return 128 - status if status < 0 else status
