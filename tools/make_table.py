#!/usr/bin/env python3
"""Make a Markdown table of runs beside published results: python tools/make_table.py [RUN ...] [--configs YAML ...].

It is that of `distribuuuu table` with the numbers of benchmarks/reported.yaml, and with rows of configs that have not
been measured. With --readme FILE --name NAME, it replaces the block from `<!-- table NAME -->` to `<!-- /table -->` of
a file, which names the command that made it.
"""

import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distribuuuu.commands.flag_hints import CommandParser
from distribuuuu.commands.guard import run_guarded
from distribuuuu.commands.output import print_report
from distribuuuu.commands.stats.run_groups import (
    DIGITS_OF_HASH,
    Result,
    collecting,
    find_files,
    group_runs,
    read_runs,
)
from distribuuuu.commands.table import table
from distribuuuu.config import Config, ConfigError, load_cfg, yaml_file
from distribuuuu.config.locate import ListedConfig
from distribuuuu.config.registry import dataset_class
from distribuuuu.files.atomic_file import replacing
from distribuuuu.records.results import config_name, describe_evaluation, hash_config

REPORTED = Path(__file__).parents[1] / "benchmarks" / "reported.yaml"
# Options that set the global batch; runs with the reported global batch may set them differently.
BATCH_KEYS = ("TRAIN.BATCH_SIZE", "TRAIN.GLOBAL_BATCH_SIZE")
REPORTED_COLUMNS = {"top-1 reported": "top1", "top-5 reported": "top5", "reported by": "source"}
# Published results by config: params, global_batch, top1, top5, source, and the options of `same_images`.
Reported = Mapping[str, Mapping[str, Any]]


def list_changes(record: Mapping[str, Any], published: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changed options of a run.

    Those of the batch count only if the global batch is not the reported one; those of the data do not count where they
    are known to name the same images.
    """
    global_batch, same = record["training"]["global_batch"], published.get("same_images", {})
    changes = {key: value for key, value in record["overrides"].items() if key not in same or same[key] != value}
    if "global_batch" not in published:
        return changes
    changes = {key: value for key, value in changes.items() if key not in BATCH_KEYS}
    return changes if published["global_batch"] == global_batch else {**changes, "global batch": global_batch}


def reported_cells(published: Mapping[str, Any]) -> dict[str, str]:
    return {column: str(published.get(name, table.EMPTY)) for column, name in REPORTED_COLUMNS.items()}


def make_run_row(group: Sequence[Result], epoch: str, reported: Reported) -> table.Row:
    """Return the row of runs that differ in the seed only."""
    first = group[0].record
    published = reported.get(first["config"], {})
    changes = list_changes(first, published)
    row = table.make_row(group, epoch, changes)
    return replace(row, cells={**row.cells, **reported_cells({} if changes else published)})


def make_config_row(cfg: Config, reported: Reported) -> table.Row:
    """Return the row of a config without runs."""
    name, optim, train = config_name(cfg), cfg.OPTIM, cfg.TRAIN
    published = reported.get(name, {}) if name else {}
    global_batch = train.GLOBAL_BATCH_SIZE or int(float(published.get("global_batch", 0)))
    params = str(published.get("params", table.EMPTY))
    cells = {
        "params (M)": params,
        "px": table.image_sizes(train.IM_SIZE, describe_evaluation(cfg)),
        "epochs": f"{round(optim.MAX_EPOCH - 1 + optim.LAST_EPOCH, 1):g}",
        "global batch": str(global_batch or f"{train.BATCH_SIZE} a process"),
        **reported_cells(published),
        table.METRIC_COLUMNS["map" if dataset_class(cfg).targets == "labels" else "top1"]: "not measured",
    }
    order = table.row_order(name, float("inf") if params == table.EMPTY else float(params), global_batch)
    return table.Row(name or cfg.MODEL.ARCH, order, f"config {hash_config(cfg)[:DIGITS_OF_HASH]}", cells)


def make_table(runs: Sequence[str], configs: Sequence[str], epoch: str = "last") -> str:
    """Return the table of runs and of configs, files or folders of them; ConfigError: something cannot be read."""
    problems: list[str] = []
    groups, notes = group_runs(read_runs(runs, problems))
    reported = yaml_file.load(REPORTED.read_text(encoding="utf-8"))
    rows = [make_run_row(group, epoch, reported) for group in groups]
    for pattern in configs:
        with collecting(problems):
            for cfg in [load_cfg(ListedConfig(path)) for path in find_files(pattern, ("*.yaml",))]:
                if config_name(cfg) not in {row.name for row in rows}:
                    rows.append(make_config_row(cfg, reported))
    if problems:
        raise ConfigError(problems)
    for note in notes:
        print(note, file=sys.stderr)
    columns, source = list(REPORTED_COLUMNS), ""
    sources = {row.cells["reported by"] for row in rows} - {table.EMPTY}
    if len(sources) == 1:  # the legend names it
        columns.remove("reported by")
        source = f"Reported by {sources.pop()}."
    rows = [replace(row, cells={name: cell for name, cell in row.cells.items() if name in columns
                                or name not in REPORTED_COLUMNS}) for row in rows]  # fmt: skip
    return table.format_table(rows, epoch, (*table.PLAN_COLUMNS, *columns), source)


def update(path: Path, name: str, text: str) -> None:
    """Write a table into its block of a file."""
    content = path.read_bytes().decode("utf-8")
    old = r"(?:<!-- made by: .*\n)?(?:(?!<!-- )[^\n]*\n)*"
    pattern = rf"(?<=<!-- table {re.escape(name)} -->)(\r?\n){old}(?=<!-- /table -->)"
    block = f"<!-- made by: python tools/make_table.py {shlex.join(sys.argv[1:])} -->\n\n{text}\n"
    changed, num = re.subn(pattern, lambda match: match[1] + block, content)
    if num != 1:
        raise ConfigError(f"--name: got {name}; expected one block <!-- table {name} --> in {path}, which has {num}")
    if changed != content:
        with replacing(path.resolve(), "wb") as file:
            file.write(changed.encode("utf-8"))


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="*", help="a run's folder, a folder of them, a .json file, a glob")
    parser.add_argument(
        "--configs", metavar="YAML", nargs="+", default=[], help="also show these configs, measured or not"
    )
    parser.add_argument("--epoch", choices=("last", "best"), default="last", help="the evaluation to show")
    parser.add_argument("--readme", metavar="FILE", help="the file whose block is replaced")
    parser.add_argument("--name", metavar="NAME", help="the name of the block")
    flags = parser.parse_args(sys.argv[1:])
    if flags.readme and not flags.name:
        parser.error("--readme needs --name, the name of the block")
    text = make_table(flags.runs, flags.configs, flags.epoch)
    if flags.readme:
        update(Path(flags.readme), flags.name, text)
    else:
        print_report(text.rstrip("\n"))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for a Ctrl-C during imports
    sys.exit(run_guarded(main))
