"""The study of a sweep: its trials in Optuna's journal, which all processes of the sweep share, and their runs.

    OUT_DIR/sweep.json               the description, written once at the first start
    OUT_DIR/study.journal            the trials
    OUT_DIR/trial_000/seed_0/        an ordinary run: config.yaml, metrics.jsonl, results.json, checkpoints, ...
                     /seed_0.lock    locked by the process that works on the run
                     /seed_0/console.log, failed.txt    its output, and its exit status if it has failed

Results are read from the files of a run. So any process of the sweep continues the runs of one that was killed.
"""

import contextlib
import math
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from distribuuuu.commands.sweep.plan import Plan, is_list, open_sweep, to_texts
from distribuuuu.commands.sweep.results import (
    CONSOLE_FILE,
    FAILED_FILE,
    Row,
    build_row,
    read_failure,
    read_values,
    summarize,
)
from distribuuuu.config.run_files import CHECKPOINTS, LOCK
from distribuuuu.files.atomic_file import make_folder, open_for_writing, replacing
from distribuuuu.files.locks import take_turn, try_lock
from distribuuuu.files.untrusted import untrusted
from distribuuuu.launch.processes import start_child
from distribuuuu.launch.signals import RunStopped, handled_by

# The best trials of the search are repeated with the other seeds.
NUM_SEEDED = 3
# A run that is killed this often without a new checkpoint has failed.
MAX_KILLS = 5
POLL_S, REFRESH_S = 0.2, 2.0


class RunFailed(Exception):
    """A run has ended with an error that a restart does not solve."""


class Study:
    """The trials of a sweep, which this process runs one after the other.

    Raises:
        InvalidFileError: the journal is damaged.
    """

    def __init__(self, plan: Plan):
        import optuna
        from optuna.storages import JournalStorage, journal

        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.plan, self._optuna, self._states = plan, optuna, optuna.trial.TrialState
        self._turn = partial(take_turn, plan.out_dir / "study")  # one process at a time
        self._signum, self._shown = 0, ""
        self._process: subprocess.Popen | None = None
        path, pruner = plan.out_dir.resolve() / "study.journal", optuna.pruners.NopPruner()
        if plan.flags.asha:
            pruner = optuna.pruners.SuccessiveHalvingPruner(plan.rungs[0], plan.flags.asha)
        elif plan.flags.hyperband:
            pruner = optuna.pruners.HyperbandPruner(plan.rungs[0], plan.epochs, plan.flags.hyperband)
        with self._turn(), untrusted(path, "journal of Optuna"):
            lock = journal.JournalFileOpenLock(str(path))
            _drop_torn_line(path, lock)
            storage = JournalStorage(journal.JournalFileBackend(str(path), lock))
            direction = "maximize" if plan.higher_is_better else "minimize"
            self._study = optuna.create_study(
                storage=storage, pruner=pruner, study_name="sweep", direction=direction, load_if_exists=True
            )
            for number in range(len(self._trials()), plan.num_trials):
                self._study.enqueue_trial(dict(plan.grid[number]) if plan.grid else {}, {"number": number})

    def run(self) -> None:
        """Run the trials that no other process of the sweep runs, with a line on standard error when any changes.

        Raises:
            RunStopped: a signal stopped the sweep and its runs, which have saved their checkpoints.
        """
        with handled_by(self._stop):
            self._run_trials()
            self._repeat_best()

    def _stop(self, signum: int) -> None:
        self._signum = signum
        if self._process:
            self._process.send_signal(signum)

    def rows(self) -> list[Row]:
        """Return the rows of the table: finished trials first, by seeds and objective, then by epochs and objective."""

        def rank(row: Row) -> tuple:
            is_done = bool(row.seeds)
            return not is_done, -len(row.seeds), -row.epochs * (not is_done), -self._score(row.objective), row.trial

        return sorted((build_row(self.plan, trial) for trial in self._trials().values()), key=rank)

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

    def _trials(self) -> dict[int, Any]:
        """Return the trials of Optuna by number; one that continues another has its number, and replaces it."""
        return {trial.user_attrs["number"]: trial for trial in self._study.get_trials()}

    def _run_trials(self) -> None:
        """Run trials until none is left that no other process runs."""
        first, states = self.plan.seeds[0], self._states
        while True:
            with contextlib.ExitStack() as held:
                with self._turn():
                    self._continue_trials()
                    if not (waiting := self._study.get_trials(states=[states.WAITING])):
                        return
                    number = waiting[0].user_attrs["number"]
                    self._study.sampler = self._build_sampler(number)
                    trial = self._study.ask(self.plan.space)
                    held.enter_context(self._holding(number, first))
                    values, known = to_texts(trial.params), {**self._trials(), number: waiting[0]}
                    if any(to_texts(other.params) == values for other in known.values()):
                        self._study.tell(trial, state=states.FAIL)  # the sampler ignores it
                        continue
                try:
                    value = self._train_trial(trial, number, values)
                    self._study.tell(trial, value, None if value is not None else states.PRUNED)
                except RunFailed:
                    self._study.tell(trial, state=states.FAIL)

    def _continue_trials(self) -> None:
        """Queue again the trials whose process was killed, and the failed ones whose FAILED_FILE was deleted.

        The values and the folder stay the same, in which the run resumes.
        """
        first = self.plan.seeds[0]
        for number, trial in self._trials().items():
            folder = self.plan.folder(number, first)
            if trial.state.name == "RUNNING":
                with self._holding(number, first) as is_free:
                    if not is_free or self._trials()[number].state.name != "RUNNING":  # it ended meanwhile
                        continue
                    self._study.tell(trial.number, state=self._states.FAIL)
            elif trial.state.name != "FAIL" or not folder.exists() or read_failure(folder):
                continue
            self._study.enqueue_trial(trial.params, {"number": number})

    def _build_sampler(self, number: int) -> Any:
        """Return the sampler of a trial. Its seed depends on the trial: a restart does not repeat earlier values."""
        samplers, seed = self._optuna.samplers, self.plan.seeds[0]
        if self.plan.flags.sampler == "tpe":
            return samplers.TPESampler(seed=seed + 7919 * number, multivariate=True, constant_liar=True)
        random = samplers.RandomSampler(seed + 7919 * number)
        if self.plan.flags.sampler == "random":
            return random
        sobol = samplers.QMCSampler(
            scramble=True, seed=seed, independent_sampler=random, warn_independent_sampling=False
        )
        ranges = {key: values for key, values in self.plan.space.items() if not is_list(values)}
        sobol.infer_relative_search_space = lambda study, trial: ranges  # also before a trial has ended
        return sobol

    def _train_trial(self, trial: Any, number: int, values: Mapping[str, str]) -> float | None:
        """Return the objective after the last epoch; None: the pruner pauses the trial, or the objective is NaN."""
        last = self.plan.last_epoch(values)
        for epoch in (*self.plan.rungs, last):
            value = self._train(number, self.plan.seeds[0], values, epoch)
            trial.report(value, epoch)
            if epoch < last and trial.should_prune():
                return None
        return None if math.isnan(value) else value

    def _repeat_best(self) -> None:
        """Repeat the best trials with the other seeds, unless another process still runs trials."""
        (first, *others), rows = self.plan.seeds, self.rows()
        if any(row.status in ("running", "waiting") for row in rows):
            return
        found = [row for row in rows if self._score(row.seeds.get(first)) > -math.inf]
        for row in sorted(found, key=lambda row: -self._score(row.seeds[first]))[:NUM_SEEDED]:
            for seed in others:
                with self._holding(row.trial, seed) as is_free, contextlib.suppress(RunFailed):
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
        """Return the objective of a run after an epoch, up to which it is trained unless that is known.

        Raises:
            ConfigError: the config of the sweep was edited meanwhile.
            RunFailed: it has ended with an error, now or before.
            RunStopped: a signal stopped the sweep and the run, which has saved its checkpoint.
        """
        folder, kills = self.plan.folder(number, seed), Counter[tuple]()
        command = [sys.executable, "-m", "distribuuuu", *self.plan.command(folder, seed, values, epoch)]
        while epoch not in (known := read_values(folder, self.plan.metric)[1]):
            if self._signum:
                raise RunStopped(self._signum)
            if read_failure(folder):
                raise RunFailed
            if _is_in_use(folder):
                time.sleep(POLL_S)
                continue
            open_sweep(self.plan)  # the config may have been edited
            with open_for_writing(make_folder(folder.parent, folder.name) / CONSOLE_FILE, "ab") as console:
                streams = {"stdin": subprocess.DEVNULL, "stdout": console, "stderr": console}
                self._process = start_child(command, "sweep", {}, **streams)
            if self._signum:  # it came meanwhile
                self._process.send_signal(self._signum)
            status = self._wait(self._process)
            progress = tuple(sorted((folder / CHECKPOINTS).glob("*")))
            kills[progress] += 1
            has_ended = status in (0, 1, 2) or kills[progress] == MAX_KILLS
            if has_ended and not self._signum and epoch not in read_values(folder, self.plan.metric)[1]:
                with replacing(folder / FAILED_FILE, "w") as file:
                    file.write(f"{status}\n")
        return known[epoch]

    def _wait(self, process: subprocess.Popen) -> int:
        """Return the exit status of a run; print the progress of the sweep whenever it changes."""
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(REFRESH_S)
            if (line := summarize(self.rows())) != self._shown:
                print(line, file=sys.stderr, flush=True)
                self._shown = line


def _is_in_use(folder: Path) -> bool:
    """Tell whether a training, e.g. of a killed sweep, still runs in a folder; False without file locks."""
    with contextlib.suppress(OSError), open(folder / LOCK, "r+") as file:
        return try_lock(file, is_inherited=False) is False
    return False


def _drop_torn_line(path: Path, lock: Any) -> None:
    """Remove the last line of the journal if its writer was killed, before another process appends to it."""
    lock.acquire()
    try:
        with open_for_writing(path, "ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
    finally:
        lock.release()
