"""State of a sweep on disk: its description in OUT_DIR/sweep.json, and its runs, each in a folder of its own.

    OUT_DIR/sweep.json                   the description, written once at the first start
    OUT_DIR/config/FOLDER/NAME.yaml      a copy of the file of --cfg, which the runs read
    OUT_DIR/trial_000/seed_0/            an ordinary run: config.yaml, metrics.jsonl, results.json, checkpoints, ...
                            console.log  its output; failed.txt: its exit status, if it has failed
    OUT_DIR/sweep_results.json, best.yaml   the table and the best config, written at the end

Nothing else is stored: `read_state` derives the state of a run from its checkpoints and its metrics.jsonl.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distribuuuu.checkpoint.manager import CheckpointManager, position_of
from distribuuuu.checkpoint.weights_files import KINDS, RAW
from distribuuuu.commands.html.history import read_lines
from distribuuuu.commands.output import align_columns
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.config.json_file import load_json
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.untrusted import printable
from distribuuuu.records.metric_writers import parse_record

SWEEP_FILE, RESULTS_FILE, BEST_FILE = "sweep.json", "sweep_results.json", "best.yaml"
CONSOLE_FILE, FAILED_FILE = "console.log", "failed.txt"
WAITING, RUNNING, PAUSED, FINISHED, FAILED = "waiting", "running", "paused", "finished", "failed"


@dataclass(frozen=True)
class Trial:
    """A config: its number, from 0; the swept options, e.g. {"OPTIM.BASE_LR": "0.1"}; and OPTIM.MAX_EPOCH."""

    number: int
    values: Mapping[str, str]
    epochs: int


@dataclass(frozen=True)
class Sweep:
    """The description of a sweep, which never changes.

    Attributes:
        inputs: what the command line determines: `config` (the copy of --cfg, relative to out_dir, or empty) and
            `config_sha256`; `overrides` and `space`, texts by option; the flags `trials`, `seeds`, `asha`, `nproc`.
        seeds: RNG_SEED of the runs of a trial; the first one is that of the search.
        rungs: epochs after which successive halving decides; empty without --asha.
        metric: the objective, the display name of the first metric of the evaluation, e.g. "top1".
        higher_is_better: whether the objective is maximized.
    """

    out_dir: Path
    inputs: Mapping[str, Any]
    trials: tuple[Trial, ...]
    seeds: tuple[int, ...]
    rungs: tuple[int, ...]
    metric: str
    higher_is_better: bool

    def folder(self, trial: int, seed: int) -> Path:
        """Return OUT_DIR of a run."""
        return self.out_dir / f"trial_{trial:03d}" / f"seed_{seed}"

    def milestones(self, trial: int) -> tuple[int, ...]:
        """Return the epochs after which the objective of a trial is compared: the rungs, and its last epoch."""
        return (*self.rungs, self.trials[trial].epochs)

    def score(self, value: float) -> float:
        """Return an objective as a number of which higher is better; a NaN is the worst."""
        return -math.inf if math.isnan(value) else value if self.higher_is_better else -value

    def job(self, trial: int, seed: int, epoch: int) -> "Job":
        """Return the start of a run that ends after an epoch."""
        folder, inputs = self.folder(trial, seed), self.inputs
        flags = ["--cfg", str(self.out_dir / inputs["config"])] if inputs["config"] else []
        flags += ["--nproc", str(inputs["nproc"])] if inputs["nproc"] > 1 else []
        flags += ["--stop-epoch", str(epoch)] if epoch < self.trials[trial].epochs else []
        options = {**inputs["overrides"], **self.trials[trial].values, "RNG_SEED": str(seed), "OUT_DIR": str(folder)}
        words = [word for pair in options.items() for word in pair]
        return Job(trial, seed, epoch, folder, (sys.executable, "-m", "distribuuuu", "train", *flags, *words))


@dataclass(frozen=True)
class Job:
    """One start of the run of a trial and a seed: from its newest checkpoint, if any, to the end of an epoch, from 1.

    Attributes:
        folder: OUT_DIR of the run; the output of the command is appended to CONSOLE_FILE in it.
        command: the command line.
    """

    trial: int
    seed: int
    epoch: int
    folder: Path
    command: tuple[str, ...]


# ------------------------------------------------------------------------------------- state of runs


@dataclass(frozen=True)
class RunState:
    """The state of a run.

    Attributes:
        epochs: finished epochs that are on disk: evaluated and in a checkpoint.
        values: objective after each of these epochs, from 1; with EMA.HALF_LIFE, that of the averaged weights.
        failure: the last line of the output of a failed run; empty: it has not failed.
    """

    epochs: int = 0
    values: Mapping[int, float] = field(default_factory=dict)
    failure: str = ""

    def value(self, epoch: int) -> float | None:
        """Return the objective after an epoch: NaN if the run failed before; None if it is not known yet."""
        return self.values.get(epoch, math.nan if self.failure else None)


# The state of each run by (trial, seed).
States = Mapping[tuple[int, int], RunState]


def read_state(folder: Path, metric: str) -> RunState:
    """Return the state of a run from the files in its folder, which may not exist."""
    saved = CheckpointManager(folder).list()
    epochs = position_of(saved[-1])[0] if saved else 0
    values: dict[str, dict[int, float]] = {"eval" if kind == RAW else f"eval_{kind}": {} for kind in reversed(KINDS)}
    for line in read_lines(folder / "metrics.jsonl", []):
        record = parse_record(line) if '"kind": "eval' in line else None
        if record and record["epoch"] <= epochs and record["kind"] in values:
            value = record.get(metric)
            if isinstance(value, (int, float)):
                values[record["kind"]][record["epoch"]] = float(value)
    failure = ""
    if (folder / FAILED_FILE).exists():
        output = [line for line in read_lines(folder / CONSOLE_FILE, []) if line.strip()]
        failure = printable((output or ["no output"])[-1].strip().removeprefix("- "))
    by_precedence = {epoch: value for found in values.values() for epoch, value in found.items()}
    return RunState(epochs, by_precedence, failure)


def record_failure(job: Job, status: int) -> None:
    """Mark the run of a job as failed; it is not started again unless FAILED_FILE is deleted."""
    with replacing(job.folder / FAILED_FILE, "w") as file:
        file.write(f"{status}\n")


# -------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class TrialRow:
    """A trial in the table.

    Attributes:
        status: WAITING, RUNNING, PAUSED (by successive halving), FINISHED or FAILED.
        epochs: finished epochs of the run of the first seed.
        values: the objective at each milestone of that run; None: not reached. A NaN: failed, or not a number.
        seeds: the objective of each finished run after the last epoch, by seed.
        objective: mean over `seeds`; without a finished run, the last of `values`; None without any.
        failures: error of each failed run, by seed; its output is in CONSOLE_FILE of its folder.
    """

    trial: int
    status: str
    epochs: int
    values: tuple[float | None, ...]
    seeds: Mapping[int, float]
    objective: float | None
    failures: Mapping[int, str]


def build_rows(sweep: Sweep, states: States, running: Collection[Job] = ()) -> list[TrialRow]:
    """Return a row for each trial, the best one first.

    The order: further milestones first, then more seeds, then the better objective, then the lower number.
    """
    active = {job.trial for job in running}
    rows = [_build_row(sweep, trial, states, trial.number in active) for trial in sweep.trials]

    def rank(row: TrialRow) -> tuple:
        reached = sum(value is not None and not math.isnan(value) for value in row.values)
        return -reached, -len(row.seeds), -sweep.score(math.nan if row.objective is None else row.objective), row.trial

    return sorted(rows, key=rank)


def _build_row(sweep: Sweep, trial: Trial, states: States, is_running: bool) -> TrialRow:
    runs = {seed: states.get((trial.number, seed), RunState()) for seed in sweep.seeds}
    search = runs[sweep.seeds[0]]
    values = tuple(search.value(epoch) for epoch in sweep.milestones(trial.number))
    seeds = {seed: run.values[trial.epochs] for seed, run in runs.items() if trial.epochs in run.values}
    known = [value for value in values if value is not None and not math.isnan(value)]
    objective = sum(seeds.values()) / len(seeds) if seeds else known[-1] if known else None
    status = FINISHED if sweep.seeds[0] in seeds else PAUSED if search.epochs else WAITING
    status = FAILED if search.failure else RUNNING if is_running else status
    failures = {seed: run.failure for seed, run in runs.items() if run.failure}
    return TrialRow(trial.number, status, search.epochs, values, seeds, objective, failures)


def short_names(sweep: Sweep) -> list[str]:
    """Return the names of the swept options without their sections, as far as they stay distinct."""
    keys = list(sweep.trials[0].values)
    last = [key.rpartition(".")[2] for key in keys]
    return [key if last.count(name) > 1 else name for key, name in zip(keys, last, strict=True)]


def summarize(sweep: Sweep, rows: Sequence[TrialRow]) -> str:
    """Return the best trial, the number of trials of each status, and the epochs of the search, as a line."""
    counts = Counter(row.status for row in rows)
    statuses = [f"{counts[name]} {name}" for name in (RUNNING, WAITING, PAUSED, FINISHED, FAILED) if counts[name]]
    epochs = f"{sum(row.epochs for row in rows)} of {counted(sum(one.epochs for one in sweep.trials), 'epoch')}"
    best = f"best: trial {rows[0].trial}; " if rows[0].objective is not None else ""
    return f"{best}{counted(len(rows), 'trial')}: {', '.join(statuses)}; {epochs}"


def format_rows(sweep: Sweep, rows: Sequence[TrialRow]) -> list[str]:
    """Return the lines of a table, the heading first."""
    lines = [["trial", "status", "epochs", sweep.metric, "seeds", *short_names(sweep)]]
    for row in rows:
        trial = sweep.trials[row.trial]
        objective = "" if row.objective is None else f"{row.objective:.4g}"
        cells = [row.trial, row.status, f"{row.epochs}/{trial.epochs}", objective, len(row.seeds) or ""]
        lines.append([*map(str, cells), *trial.values.values(), *row.failures.values()])
    return align_columns(lines, ">" * len(lines[0]))


# ------------------------------------------------------------------------------------------ sweep.json


def open_sweep(new: Sweep, content: bytes) -> Sweep:
    """Return the sweep in OUT_DIR, or write the new one and the content of its config file, if it has one.

    Raises:
        ConfigError: OUT_DIR holds a run or another sweep, or the description there is damaged.
    """
    path, fix = new.out_dir / SWEEP_FILE, "fix: set another OUT_DIR"
    if (new.out_dir / "checkpoints").exists():
        raise ConfigError(f"OUT_DIR: {new.out_dir} is the folder of a run; {fix}")
    description = {key: value for key, value in asdict(new).items() if key != "out_dir"}
    text = json.dumps({"schema": 1, **description}, indent=2) + "\n"
    if not path.exists():
        if new.inputs["config"]:
            copy = new.out_dir / new.inputs["config"]
            copy.parent.mkdir(parents=True, exist_ok=True)
            with replacing(copy) as file:
                file.write(content)
        with replacing(path, "w", encoding="utf-8") as file:
            file.write(text)
        return new
    record = load_json(path)
    if record != json.loads(text):  # the command line determines all of it
        raise ConfigError(f"OUT_DIR: {path} describes the sweep of other arguments, or of another --cfg; {fix}")
    copy = new.out_dir / new.inputs["config"]
    if new.inputs["config"] and not (copy.is_file() and copy.read_bytes() == content):
        raise ConfigError(f"OUT_DIR: {copy} is not the config of --cfg, which its runs expect; {fix}")
    return new
