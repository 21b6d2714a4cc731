"""The study of a sweep: its trials in Optuna's journal, which all processes of the sweep share, their runs and results.

    OUT_DIR/sweep.json               the description, written once at the first start
    OUT_DIR/study.journal            the trials
    OUT_DIR/trial_000/seed_0/        an ordinary run: config.yaml, metrics.jsonl, results.json, checkpoints, ...
                     /seed_0.lock    locked by the process that works on the run
                     /seed_0/console.log    its output

A trial whose process was killed, or whose run has failed, is still running for Optuna: another process continues it.
"""

import contextlib
import math
import shlex
import statistics
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distribuuuu import __version__
from distribuuuu.checkpoint.weights_files import common_kind
from distribuuuu.commands.html.history import read_facts
from distribuuuu.commands.html.page import Column, PageSection, build_page, html
from distribuuuu.commands.sweep.sweep import Plan, is_list, open_sweep, to_texts, to_words
from distribuuuu.config import load_cfg
from distribuuuu.config.config_node import changed
from distribuuuu.config.errors import counted
from distribuuuu.config.run_files import RESULTS
from distribuuuu.files.atomic_file import make_folder, open_for_writing, replacing
from distribuuuu.files.locks import take_turn, try_lock
from distribuuuu.files.untrusted import printable, untrusted
from distribuuuu.launch.processes import start_child
from distribuuuu.launch.signals import RunStopped, handled_by
from distribuuuu.records.read_results import read_results

CONSOLE_FILE = "console.log"
# The best trials of the search are repeated with the other seeds.
NUM_SEEDED = 3
# Status of a trial by that in Optuna; another one is about to begin. Paused: stopped early by the pruner.
STATUSES = {"RUNNING": "running", "PRUNED": "paused", "COMPLETE": "finished"}


@dataclass(frozen=True)
class Row:
    """A trial in the table."""

    trial: int
    status: str  # of `STATUSES`, or "failed"
    epochs: int  # finished ones of the run of the first seed
    planned: int  # OPTIM.MAX_EPOCH
    seeds: Mapping[int, float]  # the objective of each finished run, by seed
    objective: float | None  # mean over `seeds`; without a finished run, the newest value, if any
    error: str  # the last line of the output of the run of the first seed, if it has failed
    values_of: Mapping[str, str]  # the swept options


def build_row(plan: Plan, trial: Any) -> Row:
    """Return the row of a trial of Optuna."""
    values, first = to_texts(trial.params), plan.seeds[0]
    paths = {seed: plan.folder(trial.number, seed) / RESULTS for seed in plan.seeds}
    runs = {seed: run for seed, path in paths.items() if (run := read_facts(path, "training", []))}
    known = {seed: read_objective(run) for seed, run in runs.items()}
    seeds = {seed: known[seed] for seed, run in runs.items() if run["finished"]}
    objective = statistics.fmean(seeds.values()) if seeds else known.get(first)
    status = "finished" if first in seeds else STATUSES[trial.state.name]
    error = trial.user_attrs.get("error", "") if status == "running" else ""
    epochs = runs[first]["training"]["epochs_done"] if first in runs else 0
    return Row(trial.number, "failed" if error else status, epochs, plan.last_epoch(values), seeds, objective, error,
               values)  # fmt: skip


def read_objective(run: dict[str, Any]) -> float:
    """Return the first metric of the newest evaluation in the results of a run, of an average if it has one."""
    value = run["accuracy"][common_kind([run["accuracy"]])]["last"][next(iter(run["evaluation"]["metrics"]), "loss")]
    return math.nan if value is None else float(value)


def summarize(rows: Sequence[Row]) -> str:
    """Return the best trial, the number of trials of each status, and the epochs of the search, as a line."""
    counts = Counter(row.status for row in rows)
    statuses = ", ".join(f"{counts[name]} {name}" for name in (*STATUSES.values(), "failed") if counts[name])
    epochs = f"{sum(row.epochs for row in rows)} of {counted(sum(row.planned for row in rows), 'epoch')}"
    best = f"best: trial {rows[0].trial}; " if rows[0].objective is not None else ""
    return f"{best}{counted(len(rows), 'trial')}: {statuses}; {epochs}"


class Study:
    """The trials of a sweep, which this process runs one after the other; InvalidFileError: the journal is damaged."""

    def __init__(self, plan: Plan):
        import optuna
        from optuna.storages import JournalStorage, journal

        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.plan, self._optuna, self._states = plan, optuna, optuna.trial.TrialState
        self._signum = 0
        self._process: subprocess.Popen | None = None
        eta, path = plan.flags.asha, plan.out_dir.resolve() / "study.journal"
        pruner = optuna.pruners.SuccessiveHalvingPruner(plan.rungs[0], eta) if eta else optuna.pruners.NopPruner()
        direction = "maximize" if plan.higher_is_better else "minimize"
        with take_turn(plan.out_dir / "study"), untrusted(path, "journal of Optuna"):
            lock = journal.JournalFileOpenLock(str(path))
            _drop_torn_line(path, lock)
            self._storage = JournalStorage(journal.JournalFileBackend(str(path), lock))
            self._study = optuna.create_study(
                storage=self._storage, pruner=pruner, study_name="sweep", direction=direction, load_if_exists=True
            )
            # Failed trials, which this process tries again.
            self._failed = {trial.number for trial in self._study.get_trials() if "error" in trial.user_attrs}

    def run(self) -> None:
        """Run the trials that no other process of the sweep runs, with a line on standard error before each.

        Raises:
            RunStopped: a signal stopped the sweep and its runs, which have saved their checkpoints.
        """
        with handled_by(self._stop):
            while self._run_trial():
                pass
            self._repeat_best()

    def _stop(self, signum: int) -> None:
        self._signum = signum
        if self._process:
            self._process.send_signal(signum)

    def rows(self) -> list[Row]:
        """Return the rows of the table: finished trials first, by seeds and objective, then by epochs and objective."""

        def rank(row: Row) -> tuple:
            return -len(row.seeds), -row.epochs * (not row.seeds), -self._score(row.objective), row.trial

        trials = [trial for trial in self._study.get_trials() if trial.state.name in STATUSES]
        return sorted((build_row(self.plan, trial) for trial in trials), key=rank)

    def _score(self, value: float | None) -> float:
        """Return an objective as a number of which higher is better; None and NaN are the worst."""
        if value is None or math.isnan(value):
            return -math.inf
        return value if self.plan.higher_is_better else -value

    def importance(self) -> dict[str, float]:
        """Return the share of each option in what makes a trial good (PED-ANOVA); empty: there are too few trials."""
        if len(self.plan.space) < 2 or len(self._study.get_trials(states=[self._states.COMPLETE])) < 4:
            return {}
        evaluator = self._optuna.importance.PedAnovaImportanceEvaluator()
        return self._optuna.importance.get_param_importances(self._study, evaluator=evaluator)

    def _run_trial(self) -> bool:
        """Run a trial that no other process works on; return False if there is none."""
        with contextlib.ExitStack() as held:
            with take_turn(self.plan.out_dir / "study"):  # one process at a time
                if (trial := self._take_trial(held)) is None:
                    return False
                for key, values in self.plan.space.items():  # a value that the trial has is kept
                    if is_list(values):
                        trial.suggest_categorical(key, values.choices)
                    else:
                        trial.suggest_float(key, values.low, values.high, log=values.log)
            try:
                value = self._train_trial(trial)
                self._study.tell(trial, value, None if value is not None else self._states.PRUNED)
            except ChildProcessError as error:
                trial.set_user_attr("error", str(error))
        return True

    def _take_trial(self, held: contextlib.ExitStack) -> Any:
        """Return a trial whose process was killed, or a new one; None: there is none. `held` keeps it locked."""
        first, waiting = self.plan.seeds[0], self._study.get_trials(states=[self._states.WAITING])
        number = len(self._study.get_trials()) - len(waiting)
        for running in self._study.get_trials(states=[self._states.RUNNING]):
            is_free = held.enter_context(self._holding(running.number, first))
            trial = self._study.get_trials()[running.number]  # it may have ended or failed meanwhile
            is_left = "error" not in trial.user_attrs or trial.number in self._failed
            if is_free and is_left and trial.state == self._states.RUNNING:
                self._failed.discard(trial.number)
                study_id = self._storage.get_study_id_from_name(self._study.study_name)
                key = self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
                return self._optuna.trial.Trial(self._study, key)
        if number >= self.plan.num_trials:
            return None
        if self.plan.grid and not waiting:  # else the process that began this trial was killed
            self._study.enqueue_trial(self.plan.grid[number])
        held.enter_context(self._holding(number, first))
        self._study.sampler = self._build_sampler(number)
        return self._study.ask()

    def _build_sampler(self, number: int) -> Any:
        """Return the sampler of a trial. Its seed depends on the trial: a restart does not repeat earlier values."""
        samplers, seed = self._optuna.samplers, self.plan.seeds[0]
        if self.plan.flags.sampler == "tpe":
            return samplers.TPESampler(seed=seed + 7919 * number, multivariate=True, constant_liar=True)
        sampler = samplers.RandomSampler(seed + 7919 * number)
        if self.plan.flags.sampler == "sobol":
            sampler = samplers.QMCSampler(scramble=True, seed=seed, independent_sampler=sampler)
            ranges = {key: values for key, values in self.plan.space.items() if not is_list(values)}
            sampler.infer_relative_search_space = lambda study, trial: ranges  # also before a trial has ended
        return sampler

    def _train_trial(self, trial: Any) -> float | None:
        """Return the objective after the last epoch; None: the pruner pauses the trial, or the objective is NaN."""
        values, known = to_texts(trial.params), dict(self._study.get_trials()[trial.number].intermediate_values)
        last, newest = self.plan.last_epoch(values), max(known, default=0)
        for epoch in (*self.plan.rungs, last):
            if epoch not in known:  # else it was reported before the process of the trial was killed
                known[epoch] = self._train(trial.number, self.plan.seeds[0], values, epoch)
                trial.report(known[epoch], epoch)
            if newest <= epoch < last and trial.should_prune():
                return None
        return None if math.isnan(known[last]) else known[last]

    def _repeat_best(self) -> None:
        """Repeat the best trials with the other seeds, unless another process still runs trials."""
        (first, *others), rows = self.plan.seeds, self.rows()
        if any(row.status == "running" for row in rows):
            return
        found = [row for row in rows if self._score(row.seeds.get(first)) > -math.inf]
        for row in sorted(found, key=lambda row: -self._score(row.seeds[first]))[:NUM_SEEDED]:
            for seed in sorted({*others} - {*row.seeds}):
                with self._holding(row.trial, seed) as is_free, contextlib.suppress(ChildProcessError):
                    if is_free:
                        self._train(row.trial, seed, row.values_of, row.planned)

    @contextlib.contextmanager
    def _holding(self, number: int, seed: int) -> Iterator[bool]:
        """Lock a run until the end of the block or of this process; yield False if another one works on it."""
        folder = self.plan.folder(number, seed)
        path = make_folder(self.plan.out_dir, folder.parent.name) / f"{folder.name}.lock"
        with open_for_writing(path, "ab") as lock:
            yield try_lock(lock) is not False

    def _train(self, number: int, seed: int, values: Mapping[str, str], epoch: int) -> float:
        """Train a run up to an epoch; return its objective, or raise ChildProcessError with the error that ended it."""
        folder = self.plan.folder(number, seed)
        command = [sys.executable, "-m", "distribuuuu", *self.plan.command(folder, seed, values, epoch)]
        print(summarize(self.rows()), file=sys.stderr, flush=True)
        console = make_folder(folder.parent, folder.name) / CONSOLE_FILE
        open_sweep(self.plan)  # the config may have been edited
        if not self._signum:
            with open_for_writing(console, "ab") as file:
                streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
                self._process = process = start_child(command, "sweep", {}, **streams)
            if self._signum:  # it came meanwhile
                process.send_signal(self._signum)
            if (status := process.wait()) == 0:
                return read_objective(read_results(folder / RESULTS))
        if self._signum:
            raise RunStopped(self._signum)
        last_line = console.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        raise ChildProcessError(printable(last_line.strip(" -")) or f"exit status {status}")


def _drop_torn_line(path: Path, lock: Any) -> None:
    """Remove the last line of the journal if its writer was killed, before another process appends to it."""
    lock.acquire()
    try:
        with open_for_writing(path, "ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
    finally:
        lock.release()


# ------------------------------------------------------------------------------------------ results


def list_cells(plan: Plan, rows: Sequence[Row]) -> list[list[str]]:
    """Return the lines of a table, the heading first."""
    lines = [["trial", "status", "epochs", plan.metric, "seeds", *plan.space, "error"]]
    for row in rows:
        objective = "" if row.objective is None else f"{row.objective:.4g}"
        cells = row.trial, row.status, f"{row.epochs}/{row.planned}", objective, len(row.seeds) or ""
        lines.append([*map(str, cells), *(row.values_of.get(key, "") for key in plan.space), row.error])
    return lines


def write_results(plan: Plan, rows: Sequence[Row], importance: Mapping[str, float]) -> list[Path]:
    """Write the page of a finished sweep and the config of its best run; return the paths."""
    texts = {"sweep.html": build_sweep_page(plan, rows, importance)}
    if (best := rows[0]).seeds:
        cfg = load_cfg(plan.flags.cfg, [*plan.options, *to_words(best.values_of)])
        header = f"# Trial {best.trial} of a sweep: {plan.metric} {best.objective:.3f} on its evaluation images.\n"
        texts["best.yaml"] = header + changed(cfg, {"OUT_DIR": str(plan.out_dir / "best")}).dump()
    for name, text in texts.items():
        with replacing(plan.out_dir / name, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    return [plan.out_dir / name for name in texts]


def build_sweep_page(plan: Plan, rows: Sequence[Row], importance: Mapping[str, float]) -> str:
    """Return OUT_DIR/sweep.html, a page in the style of a report."""
    best, summary = rows[0], [html.paragraph(f"{summarize(rows)}.")]
    if best.objective is not None:
        tiles = [(f"best {plan.metric}", f"{best.objective:.2f}", "optimistic: the trial was selected by it")]
        nproc = f" --nproc {plan.flags.nproc}" * (plan.flags.nproc > 1)
        command = f"distribuuuu train{nproc} --cfg {shlex.quote(str(plan.out_dir / 'best.yaml'))} OUT_DIR DIR"
        summary += [html.tiles(tiles), html.heading(f"Best config: trial {best.trial}"), html.pairs(best.values_of),
                    html.preformatted(command)]  # fmt: skip
    if importance:
        columns = [Column("option"), Column("share", ".0%", bar=True)]
        summary += [html.heading("Importance of the options"), html.table(columns, [*importance.items()])]
    heading, *trials = list_cells(plan, rows)
    subtitle = f"{counted(len(rows), 'trial')} of {counted(len(plan.space), 'option')}, compared by {plan.metric}"
    sections = [PageSection("Summary", summary),
                PageSection("Trials", [html.table([*map(Column, heading)], trials)])]  # fmt: skip
    return build_page(f"Sweep {plan.out_dir.resolve().name}", subtitle, sections, f"distribuuuu {__version__}")
