"""The command reproduce: training a row of the measured results again, with its config and seed, and the verdict."""

import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distribuuuu.checkpoint.weights_files import RAW, common_kind
from distribuuuu.commands.flag_hints import CommandParser
from distribuuuu.commands.output import WIDTH, align_columns, print_report
from distribuuuu.commands.stats.run_groups import Result, group_runs, name_groups, read_runs
from distribuuuu.commands.stats.significance import mean_interval
from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.locate import find_shipped, shipped_file
from distribuuuu.config.options import OPEN_SECTIONS, OPTIONS, option_of
from distribuuuu.config.reader import read_cfg
from distribuuuu.config.run_files import find_path_problem
from distribuuuu.files.untrusted import printable
from distribuuuu.launch.processes import start_child
from distribuuuu.launch.signals import handled_by
from distribuuuu.records.read_results import FILE_NAME, list_metrics, read_results

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
# Difference of two percentages that is due to rounding.
_ROUNDING = 1e-9
# Keys of results.json, beside `environment` and `versions`, that weights depend on.
_CONDITIONS = ("hardware", "training.processes", "training.global_batch", "data.num_train", "plugins", "config_hash",
               "commit")  # fmt: skip


def reproduce(prog: str, args: list[str]) -> int:
    """Rerun a row; return the exit status: 0 if it is reproduced, 1 if not, that of the training if it ended early."""
    flags = build_parser(prog).parse_args(args)
    rows, notes = read_rows(flags.results)
    for note in notes:
        print(printable(note), file=sys.stderr)
    if flags.list:
        print_report(format_rows(rows))
        return 0
    name, words = find_row(flags.row, rows, flags.results, prog), flags.overrides
    row = sorted(rows[name], key=lambda run: run.record["seed"])
    record, seed = row[0].record, row[0].record["seed"] if flags.seed is None else flags.seed
    check_overrides(words, name)
    default = Path("exp", "reproduce", re.sub(r"[^\w.]+", "_", name)[:80], f"seed_{seed}")
    out_dir = dict(zip(words[::2], words[1::2], strict=True)).get("OUT_DIR", str(default))
    if problem := find_path_problem(out_dir):
        raise ConfigError(Problem("OUT_DIR", problem))
    command = build_command(record, seed, [*words, "OUT_DIR", out_dir])
    shown = f"distribuuuu {shlex.join(command)}"
    print_report(textwrap.fill(shown, WIDTH, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False))
    if status := train_again(command, record):
        return status
    rerun = read_results(Path(out_dir, FILE_NAME))
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
        ConfigError: there are none.
    """
    problems: list[str] = []
    groups, notes = group_runs(read_runs([folder], problems))
    if not groups and problems:
        raise ConfigError(problems)
    rows = dict(zip(name_groups(groups), groups, strict=True))
    return rows, [*notes, *(f"{problem}; its run is left out" for problem in problems)]


def find_row(name: str, rows: Mapping[str, Sequence[Result]], folder: str, prog: str) -> str:
    """Return the row of a name: that of the row, or of its config with the fewest options.

    Raises:
        ConfigError: there is no such row.
    """
    options = {row: len(runs[0].record["overrides"]) for row, runs in rows.items() if runs[0].record["config"] == name}
    if name in rows or options:
        return name if name in rows else min(options, key=lambda row: options[row])
    configs = {runs[0].record["config"] or row: row for row, runs in rows.items()}
    hint = did_you_mean(name, configs) or f"; fix: choose a row of {prog} --list"
    raise ConfigError(Problem("ROW", f"got {name or 'none'}; expected a row of {folder}{hint}"))


def check_overrides(words: Sequence[str], row: str) -> None:
    """Check that KEY VALUE arguments do not change the result of a row.

    Raises:
        ConfigError: one does, or is no option, or a value is missing.
    """
    _, problems = read_cfg(None, words)
    for key in words[::2]:
        if key in _FIXED or _is_hashed(key) and not option_of(key).neutral:
            fix = "use --seed" if key == "RNG_SEED" else "remove it, or use the command train"
            problems.append(Problem(key, f"changes the result of {row}, which is to be repeated; fix: {fix}"))
    if problems:
        raise ConfigError(problems)


def _is_hashed(key: str) -> bool:
    """Tell whether a key is that of an option of a recipe, or of a name in an open section."""
    is_known = key in OPTIONS or key.startswith(tuple(f"{section}." for section in OPEN_SECTIONS))
    return is_known and option_of(key).hashed


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
    if wrong := [key for key in changes if not _is_hashed(key)]:
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


# ---------------------------------------------------------------------------------------- the verdict


def read_figure(row: Sequence[Result]) -> tuple[str, str, list[float], str]:
    """Return the figure by which a row is compared: its first metric at the last epoch.

    Returns:
        The kind of weights, an average if there is one; the metric; its known values of the seeds; and a text with
        the mean and its 95 % interval, as in the result tables.
    """
    records = [run.record for run in row]
    kind = common_kind([record["accuracy"] for record in records])
    metric, label = next(iter(list_metrics(records[0]).items()), ("loss", "loss"))
    found = [record["accuracy"][kind]["last"].get(metric) for record in records]
    values = [value for value in found if value is not None]
    text = f"{label} {statistics.fmean(values):.2f}" if values else f"{label} unknown"
    if len(values) > 1:
        low, high = mean_interval(values)
        text += f" [{low:.2f}, {min(high, 100):.2f}]"
    return kind, metric, values, text


def format_rows(rows: Mapping[str, Sequence[Result]]) -> str:
    """Return a table of the rows: number of seeds, hours of a run, whether hashes are recorded, figure, name."""
    lines = [("n", "hours", "sha256", "result, last epoch", "row")]
    for name, row in sorted(rows.items()):
        hours = statistics.fmean(run.record["training"]["hours"] for run in row)
        has_hash = "yes" if all("weights_sha256" in run.record for run in row) else "no"
        lines.append((str(len(row)), f"{hours:.3g}", has_hash, read_figure(row)[-1], name))
    return "\n".join(align_columns(lines, ">><<<"))


def compare_run(row: Sequence[Result], rerun: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether the results of a rerun agree with a row, and the report.

    Args:
        row: the runs of the row.
        rerun: results.json of the rerun.
    """
    kind, metric, values, text = read_figure(row)
    original = next((run.record for run in row if run.record["seed"] == rerun["seed"]), None)
    differences = list(find_differences(original or row[0].record, rerun))
    value = rerun["accuracy"].get(kind, {}).get("last", {}).get(metric)
    is_inside, verdict = compare_value(value, values)
    expected, found = (run.get("weights_sha256") for run in (original or {}, rerun))
    weights = "not bitwise equal, which only holds under the same conditions"
    if original is None:
        weights = "not compared: the row does not have this seed"
    elif not expected or not found:
        weights = "not compared: the row has no sha256 of its weights"
    elif expected == found:
        is_inside, verdict, weights = True, "reproduced: bitwise", f"bitwise equal, sha256 {found.get(RAW)}"
    elif not differences and rerun.get("environment", {}).get("deterministic"):
        weights = "NOT bitwise equal, though no recorded condition differs"
        is_inside, verdict = False, "NOT reproduced bitwise"
    elif not differences:
        weights = "not bitwise equal, which needs CUDNN.DETERMINISTIC True"
    shown = "unknown" if value is None else f"{value:.2f}"
    lines = [
        ("weights", weights),
        *(("differs", difference) for difference in differences),
        ("result", f"{metric} {shown} with seed {rerun['seed']}"),
        ("row", f"{text}, n = {len(row)}"),
        ("verdict", verdict),
    ]
    wrapped = [textwrap.fill(f"{label:<9}{line}", WIDTH, subsequent_indent=" " * 9) for label, line in lines]
    return is_inside, "\n".join(wrapped)


def compare_value(value: float | None, values: Sequence[float]) -> tuple[bool, str]:
    """Return whether a value is inside the 95 % interval of one more run of a row; and the verdict.

    This prediction interval is wider than that of the mean by the factor sqrt(n + 1).
    """
    if value is None or not values:
        return False, "not decided: the result is unknown"
    if len(values) == 1:
        return False, "not decided: the row has one seed, and so no interval"
    low, high = mean_interval(values)
    mean, half = (low + high) / 2, (high - low) / 2 * math.sqrt(len(values) + 1)
    gap, limits = abs(value - mean), f"{mean - half:.2f} to {mean + half:.2f}"
    if gap <= half + _ROUNDING:
        return True, f"reproduced: inside the 95 % interval of a single run, {limits}"
    return False, f"NOT reproduced: outside the 95 % interval of a single run, {limits}"


def find_differences(original: Mapping[str, Any], rerun: Mapping[str, Any]) -> Iterator[str]:
    """Yield the conditions of bitwise equality that differ between two runs; what one did not record is left out."""
    pairs = [(key, _look_up(original, key), _look_up(rerun, key)) for key in _CONDITIONS]
    for section in ("environment", "versions"):
        before, now = original.get(section, {}), rerun.get(section, {})
        pairs += [(f"{section}.{key}", before[key], now[key]) for key in sorted(before.keys() & now.keys())]
    for key, before, now in pairs:
        if before != now:
            yield f"{key}: {_shorten(before)} in the row, {_shorten(now)} here"
        elif key == "commit" and str(now).endswith("+changes"):
            yield f"commit: {_shorten(now)}, uncommitted changes"


def _look_up(record: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.rpartition(".")
    return (record[section] if section else record).get(name)


def _shorten(value: Any) -> str:
    """Return a text, with the first digits of a hash or commit."""
    digits, sign, rest = str(value).partition("+")
    return f"{digits[:8] if len(digits) >= 40 and ' ' not in digits else digits}{sign}{rest}"
