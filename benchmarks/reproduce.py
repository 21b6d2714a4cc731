"""Train a published row again, with its config and one of its seeds, and compare the result.

The SHA-256 of the weights is compared, and the interval of the row. The same command resumes a stopped training.

    python benchmarks/reproduce.py --list
    python benchmarks/reproduce.py shapes/resnet14
    python benchmarks/reproduce.py clothing10/resnet14 TRAIN.DATASET /data/clothing10
"""

import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distribuuuu.checkpoint.weights_files import RAW, common_kind
from distribuuuu.commands.flag_hints import CommandParser
from distribuuuu.commands.guard import run_guarded
from distribuuuu.commands.output import WIDTH, align_columns, print_report
from distribuuuu.commands.stats.intervals import mean_interval
from distribuuuu.commands.stats.run_groups import Result, group_runs, read_runs, row_name
from distribuuuu.config import ConfigError, Problem, run_files
from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.locate import find_shipped
from distribuuuu.config.options import OPEN_SECTIONS, OPTIONS, option_of
from distribuuuu.config.reader import read_cfg
from distribuuuu.records.read_results import read_results

RESULTS = Path(__file__).parent / "results"
# Options that change results, though they may differ between the seeds of one config.
FIXED = ("PLUGINS", "RNG_SEED", "TEST.LABELS")
# Keys of results.json, beside `environment` and `versions`, that weights depend on.
CONDITIONS = ("hardware", "training.processes", "training.global_batch", "data.num_train", "plugins", "config_hash",
              "commit")  # fmt: skip


def read_rows(folder: Path | str) -> dict[str, list[Result]]:
    """Return the rows of a folder of results by name, e.g. shapes/resnet14, the seeds of each in order."""
    problems: list[str] = []
    groups, notes = group_runs(read_runs([str(folder)], problems))
    for note in (*notes, *problems):
        print(note, file=sys.stderr)
    groups = [sorted(group, key=lambda run: run.record["seed"]) for group in groups]
    return {row_name(group[0].record, group[0].record["overrides"]): group for group in groups}


def find_row(name: str, rows: Mapping[str, Sequence[Result]]) -> str:
    """Return the row of a name: that of the row, or of its config with the fewest options."""
    options = {row: len(runs[0].record["overrides"]) for row, runs in rows.items() if runs[0].record["config"] == name}
    if name in rows or options:
        return name if name in rows else min(options, key=lambda row: options[row])
    hint = did_you_mean(name, rows) or "; fix: choose a row of --list"
    raise ConfigError(Problem("ROW", f"got {name or 'none'}; expected a row of the published results{hint}"))


def is_hashed(key: str) -> bool:
    """Tell whether a key is that of an option of a recipe, or of a name in an open section."""
    is_known = key in OPTIONS or key.startswith(tuple(f"{section}." for section in OPEN_SECTIONS))
    return is_known and option_of(key).hashed


def check_overrides(words: Sequence[str], row: str) -> None:
    """Check that KEY VALUE arguments do not change the result of a row."""
    _, problems = read_cfg(None, words)
    for key in words[::2]:
        if key in FIXED or is_hashed(key) and not option_of(key).neutral:
            fix = "use --seed" if key == "RNG_SEED" else "remove it, or use distribuuuu train"
            problems.append(Problem(key, f"changes the result of {row}, which is to be repeated; fix: {fix}"))
    if problems:
        raise ConfigError(problems)


def build_command(record: Mapping[str, Any], seed: int, words: Sequence[str]) -> list[str]:
    """Return the arguments that train a recorded run again with a seed and further KEY VALUE arguments."""
    if not (paths := find_shipped(str(record["config"]))):
        raise ConfigError(Problem("config", f"got {record['config']} in the row; expected a shipped config"))
    changes = [(key, value if isinstance(value, str) else json.dumps(value))
               for key, value in record["overrides"].items()]  # fmt: skip
    if wrong := [key for key, _ in changes if not is_hashed(key)]:
        raise ConfigError(Problem("overrides", f"got {wrong[0]!r} in the row; expected options of a recipe"))
    nproc, recorded = str(record["training"]["processes"]), [text for pair in changes for text in pair]
    return ["train", "--cfg", *paths, "--nproc", nproc, *recorded, "RNG_SEED", str(seed), *words]


def read_figure(row: Sequence[Result]) -> tuple[str, str, list[float], str]:
    """Return the weights and the metric by which a row is compared, its values at the last epoch, and their mean."""
    records = [run.record for run in row]
    kind = common_kind([record["accuracy"] for record in records])
    metric, label = next(iter(records[0]["evaluation"]["metrics"].items()), ("loss", "loss"))
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
    """Return whether the results.json of a rerun agrees with a row, and the report."""
    kind, metric, values, text = read_figure(row)
    original = next((run.record for run in row if run.record["seed"] == rerun["seed"]), None)
    differences = list(find_differences(original or row[0].record, rerun))
    value = rerun["accuracy"].get(kind, {}).get("last", {}).get(metric)
    is_inside, verdict = compare_value(value, values)
    expected, found = (run.get("weights_sha256") for run in (original or {}, rerun))
    weights = "not bitwise equal, which only holds under the same conditions"
    if original is None or not expected or not found:
        weights = "not compared: the row has no sha256 of the weights of this seed"
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
    is_inside = abs(value - mean) <= half + 1e-9  # for rounding
    words = "reproduced: inside" if is_inside else "NOT reproduced: outside"
    return is_inside, f"{words} the 95 % interval of a single run, {mean - half:.2f} to {mean + half:.2f}"


def find_differences(original: Mapping[str, Any], rerun: Mapping[str, Any]) -> Iterator[str]:
    """Yield the conditions of bitwise equality that differ between two runs; what one did not record is left out."""
    one, other = flatten(original), flatten(rerun)
    recorded = sorted(key for key in one.keys() & other.keys() if key.startswith(("environment.", "versions.")))
    for key in (*CONDITIONS, *recorded):
        if one.get(key) != other.get(key):
            yield f"{key}: {shorten(one.get(key))} in the row, {shorten(other.get(key))} here"
        elif key == "commit" and str(other[key]).endswith("+changes"):
            yield f"commit: {shorten(other[key])}, uncommitted changes"


def flatten(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of results.json, those of its sections as SECTION.NAME."""
    sections = {section: content for section, content in record.items() if isinstance(content, dict)}
    return {**record, **{f"{section}.{name}": value for section in sections for name, value in record[section].items()}}


def shorten(value: Any) -> str:
    """Return a text, with the first digits of a hash or commit."""
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{32,}\b", r"\1", str(value))


def main() -> int:
    """Rerun a row; return the exit status: 0 if it is reproduced, 1 if not, that of the training if it ended early."""
    about = CommandParser(description=__doc__, usage="%(prog)s [--list] [ROW] [--seed N] [KEY VALUE ...]")
    about.add_argument("row", metavar="ROW", nargs="?", default="", help="a row, or a config, whose base row is meant")
    about.add_argument("--list", action="store_true", help="print the rows and exit")
    about.add_argument("--seed", metavar="N", type=int, help="the seed (default: the lowest of the row)")
    about.add_argument("--results", metavar="FOLDER", default=RESULTS, help="other results than the published ones")
    flags = about.parse_args(sys.argv[1:])
    rows = read_rows(flags.results)
    if flags.list:
        print_report(format_rows(rows))
        return 0
    name, words = find_row(flags.row, rows), flags.overrides
    check_overrides(words, name)
    row = rows[name]
    record, seed = row[0].record, row[0].record["seed"] if flags.seed is None else flags.seed
    folder = Path("exp", "reproduce", re.sub(r"[^\w.]+", "_", name)[:80], f"seed_{seed}")
    out_dir = dict(zip(words[::2], words[1::2], strict=True)).get("OUT_DIR", str(folder))
    command = build_command(record, seed, [*words, "OUT_DIR", out_dir])
    print(f"distribuuuu {shlex.join(command)}", flush=True)
    threads = record.get("environment", {}).get("threads")
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ if isinstance(threads, int) else os.environ
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches the child too, which saves a checkpoint
    if status := subprocess.Popen([sys.executable, "-m", "distribuuuu", *command], env=environment).wait():
        return status
    rerun = read_results(Path(out_dir, run_files.RESULTS))
    one, other = ((run["config"], run["overrides"], run["training"]["epochs_planned"]) for run in (rerun, record))
    if one != other or (rerun["seed"], rerun["finished"]) != (seed, True):
        raise ConfigError(Problem("OUT_DIR", f"{out_dir} is of another run; fix: set OUT_DIR to another folder"))
    is_reproduced, text = compare_run(row, rerun)
    print_report(text)
    return 0 if is_reproduced else 1


if __name__ == "__main__":
    sys.exit(run_guarded(main))
