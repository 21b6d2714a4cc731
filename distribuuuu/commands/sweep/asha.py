"""Order of the runs of a sweep: asynchronous successive halving (Li et al., arXiv 1810.05934), then further seeds.

All trials run up to the first rung, an epoch; of the first n trials of a rung, in the order in which they entered it,
the best floor(n / eta) continue to the next one, for n = eta, 2 eta, ... and for all. Only the results decide, not
their times: n counts a prefix whose results are all known. So the same trials continue after any interruption and
with any number of jobs, and no trial waits for the whole rung.
"""

import math
import sys
import time
from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence

from distribuuuu.commands.sweep.executors import LocalExecutor
from distribuuuu.commands.sweep.trials import (
    Job,
    RunState,
    States,
    Sweep,
    build_rows,
    read_state,
    record_failure,
    summarize,
)
from distribuuuu.launch.signals import RunStopped, handled_by

# The best trials of the search are repeated with the other seeds.
NUM_SEEDED = 3
# A run that is killed this often without a new checkpoint has failed.
MAX_KILLS = 5
POLL_S, REFRESH_S = 0.2, 2.0


def plan_rungs(epochs: int, eta: int, num_trials: int, period: int = 1) -> tuple[int, ...]:
    """Return the epochs of the rungs, epochs / eta^k; as many as leave a trial for the last one.

    They are rounded up to multiples of `period`, after which a run is evaluated.
    """
    powers = [eta**k for k in range(1, 64) if eta**k <= min(epochs, num_trials)] if eta else []
    rungs = {-(-round(epochs / power) // period) * period for power in powers}
    return tuple(sorted(rung for rung in rungs if rung < epochs))


def select_promoted(entered: Sequence[int], scores: Mapping[int, float], eta: int, is_closed: bool) -> list[int]:
    """Return the trials that continue after a rung, in the order in which they are selected.

    Args:
        entered: the trials of the rung in the order in which they entered it.
        scores: the known results, higher is better; trials with -inf never continue.
        eta: one of eta trials continues.
        is_closed: whether no other trial will enter the rung.
    """
    known = next((number for number, trial in enumerate(entered) if trial not in scores), len(entered))
    promoted: dict[int, None] = {}
    ranked: list[tuple[float, int]] = []
    for num, trial in enumerate(entered[:known], 1):
        insort(ranked, (-scores[trial], num))
        if num % eta == 0 or (is_closed and num == len(entered)):
            promoted |= {entered[order - 1]: None for score, order in ranked[: num // eta] if score < math.inf}
    return list(promoted)


def find_jobs(sweep: Sweep, states: States) -> list[Job]:
    """Return the jobs whose results are not known yet, in the order of their priority: further epochs first."""
    first = sweep.seeds[0]
    jobs: list[Job] = []
    entered, is_closed = [trial.number for trial in sweep.trials], True
    for rung in (*sweep.rungs, None):
        epochs = {trial: rung or sweep.trials[trial].epochs for trial in entered}
        values = {trial: states.get((trial, first), RunState()).value(epochs[trial]) for trial in entered}
        missing = [trial for trial in entered if values[trial] is None]
        jobs = [sweep.job(trial, first, epochs[trial]) for trial in missing] + jobs
        scores = {trial: sweep.score(value) for trial, value in values.items() if value is not None}
        if rung:
            entered = select_promoted(entered, scores, sweep.inputs["asha"], is_closed)
        is_closed = is_closed and not missing
    if jobs:
        return jobs
    best = sorted((trial for trial in entered if scores[trial] > -math.inf), key=lambda trial: -scores[trial])
    runs = [(trial, seed) for trial in best[:NUM_SEEDED] for seed in sweep.seeds[1:]]
    return [sweep.job(trial, seed, sweep.trials[trial].epochs) for trial, seed in runs
            if states.get((trial, seed), RunState()).value(sweep.trials[trial].epochs) is None]  # fmt: skip


def run_sweep(sweep: Sweep, executor: LocalExecutor) -> States:
    """Run all jobs, with a line about them on standard error when it changes; return the state of each run.

    Raises:
        RunStopped: a signal stopped the sweep and its jobs, which have saved their checkpoints.
    """
    states = {(trial.number, seed): read_state(sweep.folder(trial.number, seed), sweep.metric)
              for trial in sweep.trials for seed in sweep.seeds}  # fmt: skip
    signals: list[int] = []
    kills: Counter = Counter()
    wanted, num_sent, shown, shown_at = find_jobs(sweep, states), 0, "", -math.inf
    with handled_by(signals.append):
        while (wanted and not signals) or executor.running:
            for signum in signals[num_sent:]:
                executor.stop(signum)
                num_sent += 1
            busy = {(job.trial, job.seed) for job in executor.running}
            free = [job for job in wanted if (job.trial, job.seed) not in busy and not signals]
            ended = executor.update(free)
            for job, status in ended.items():
                states[job.trial, job.seed] = _finish_job(sweep, job, status, kills)
            if is_due := time.monotonic() - shown_at > REFRESH_S:
                shown_at = time.monotonic()
                for job in executor.running:
                    states[job.trial, job.seed] = read_state(job.folder, sweep.metric)
                if (line := summarize(sweep, build_rows(sweep, states, executor.running))) != shown:
                    print(line, file=sys.stderr, flush=True)
                    shown = line
            if ended or is_due:
                wanted = find_jobs(sweep, states)
            time.sleep(POLL_S)
    if signals:
        raise RunStopped(signals[0])
    return states


def _finish_job(sweep: Sweep, job: Job, status: int, kills: Counter) -> RunState:
    """Return the state of a run after a job; without its result, it has failed, or was killed and is started again."""
    state = read_state(job.folder, sweep.metric)
    if state.value(job.epoch) is None:
        progress = job, *sorted(path.name for path in (job.folder / "checkpoints").glob("*"))
        kills[progress] += 1
        if status in (0, 1, 2) or kills[progress] == MAX_KILLS:
            record_failure(job, status)
            return read_state(job.folder, sweep.metric)
    return state
