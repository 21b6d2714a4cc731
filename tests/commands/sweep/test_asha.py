"""Successive halving: which trials continue depends on the results, not on the order in which they arrive."""

import math
import random
from pathlib import Path

import pytest
from support.sweeps import make_sweep

from distribuuuu.commands.sweep.asha import NUM_SEEDED, find_jobs, plan_rungs, select_promoted
from distribuuuu.commands.sweep.trials import RunState, Sweep, build_rows


def lr_values(num: int) -> list[dict[str, str]]:
    return [{"OPTIM.BASE_LR": str(number + 1)} for number in range(num)]


def simulate(sweep: Sweep, results: dict, rng: random.Random, num_jobs: int) -> tuple[dict, set]:
    """Run the jobs of a sweep that end in random order; return the states, and the started (trial, seed, epoch).

    Args:
        results: objective by (trial, epoch); None: the run fails.
    """
    states, running, started = {}, [], set()
    while (wanted := find_jobs(sweep, states)) or running:
        busy = {(job.trial, job.seed) for job in running}
        free = [job for job in wanted if (job.trial, job.seed) not in busy]
        running += free[: num_jobs - len(running)]
        started |= {(job.trial, job.seed, job.epoch) for job in running}
        job = running.pop(rng.randrange(len(running)))
        before = states.get((job.trial, job.seed), RunState())
        value = results[job.trial, job.epoch]
        if value is None:
            states[job.trial, job.seed] = RunState(before.epochs, before.values, "error")
        else:
            states[job.trial, job.seed] = RunState(job.epoch, {**before.values, job.epoch: value})
    return states, started


@pytest.mark.parametrize("num, eta, epochs", [(12, 2, 8), (20, 3, 14), (7, 3, 30), (4, 4, 4), (9, 2, 3)])
def test_the_same_trials_continue_in_any_order_of_arrival(num, eta, epochs):
    rng = random.Random(num)
    sweep = make_sweep(Path("out"), lr_values(num), epochs, eta, (0, 1), higher_is_better=bool(num % 2))
    milestones = sweep.milestones(0)
    for _ in range(5):
        results = {(trial, epoch): rng.choice([None, math.nan, *(rng.randrange(20) for _ in range(9))])
                   for trial in range(num) for epoch in milestones}  # fmt: skip
        runs = [simulate(sweep, results, rng, num_jobs) for num_jobs in (1, 1, 2, 3, num)]
        assert all(started == runs[0][1] for _, started in runs), "the runs, their epochs and their seeds"
        rows = [repr(build_rows(sweep, states)) for states, _ in runs]
        assert len(set(rows)) == 1
        assert not any(row.status == "running" or row.status == "waiting" for row in build_rows(sweep, runs[0][0]))


def test_a_trial_continues_before_the_rung_is_complete_and_only_by_known_results():
    assert select_promoted(range(6), {0: 1.0, 1: 2.0, 2: 0.0}, 2, is_closed=True) == [1]
    assert select_promoted(range(6), {0: 1.0, 1: 2.0, 3: 9.0, 4: 9.0, 5: 9.0}, 2, is_closed=True) == [1]
    assert select_promoted(range(5), {0: 1, 1: 1, 2: 3, 3: 2, 4: 9}, 2, is_closed=True) == [0, 2, 3, 4]
    assert select_promoted(range(5), {0: 1, 1: 1, 2: 3, 3: 2, 4: 9}, 2, is_closed=False) == [0, 2, 3]


def test_rungs_leave_a_trial_for_the_last_one():
    assert plan_rungs(14, 3, 20) == (2, 5) and plan_rungs(14, 3, 8) == (5,) and plan_rungs(14, 3, 2) == ()
    assert plan_rungs(14, 3, 20, 4) == (4, 8) and plan_rungs(14, 3, 20, 7) == (7,) and plan_rungs(14, 3, 20, 14) == ()
    assert plan_rungs(2, 3, 20) == () and plan_rungs(9, 3, 81) == (1, 3) and plan_rungs(9, 0, 81) == ()


def test_the_best_trials_are_repeated_with_the_other_seeds():
    sweep = make_sweep(Path("out"), lr_values(6), epochs=4, seeds=(0, 1, 2))
    results = {(trial, 4): [3, 9, None, 5, 8, 5][trial] for trial in range(6)}
    states, started = simulate(sweep, results, random.Random(0), 2)
    repeated = {trial for trial, seed, _ in started if seed > 0}
    assert repeated == {1, 4, 3} and len(repeated) == NUM_SEEDED
    assert [row.trial for row in build_rows(sweep, states)] == [1, 4, 3, 5, 0, 2]
    assert build_rows(sweep, states)[0].seeds == {0: 9, 1: 9, 2: 9}
