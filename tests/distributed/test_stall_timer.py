"""Stall timer: healthy runs, stalls, processes that do not respond. Runs that it ends: test_graceful_stop.py."""

import math
import threading
import time

import pytest
from support.processes import on_processes, wait_for

from distribuuuu.api import evaluate
from distribuuuu.checkpoint import manager
from distribuuuu.distributed import comm, rendezvous, stall_timer
from distribuuuu.distributed.stall_timer import StallTimer
from distribuuuu.engine import precise_bn
from distribuuuu.launch.signals import SignalState
from distribuuuu.tasks.classification import Classification
from distribuuuu.trainer import train_model


class FakeStore(dict):
    """The store of a run."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return {*keys} <= self.keys()

    def multi_get(self, keys: list[str]) -> list[str]:
        return [self[key] for key in keys]


@pytest.fixture
def group(tmp_path, monkeypatch):
    """Return group(number of processes) and the ranks that have ended; their periods are short, the limit is 0.2 s."""
    for name, value in {"PERIOD_S": 0.05, "ANSWER_S": 0.3}.items():
        monkeypatch.setattr(stall_timer, name, value)
    ends, timers, store = [], [], FakeStore()
    monkeypatch.setattr(SignalState.current, "stacks_file", tmp_path / "stacks" / "rank.txt")

    def end_process(status: int) -> None:
        ends.append(threading.current_thread().rank)
        threading.current_thread()._is_over.set()

    monkeypatch.setattr(stall_timer, "end_process", end_process)

    def start(num: int) -> list[StallTimer]:
        timers.extend(StallTimer(rank, num, (0.2, 30.0), store) for rank in range(num))
        for timer in timers:
            timer.__enter__()
            timer.mark("epoch 2, step 14")
        return timers

    yield start, ends
    for timer in timers:
        timer.__exit__()
        timer.join(60)


def test_a_stall_of_all_is_reported_once_with_the_place_of_each(group, caplog, tmp_path):
    start, ends = group
    start(3)
    wait_for(lambda: len(ends) == 3)
    (message,) = caplog.messages
    assert "no process has made a step for 0 s (DIST.TIMEOUT_S), all stop" in message and str(tmp_path) in message
    assert message.count("no step for") == 3 and "after epoch 2, step 14" in message
    assert "test_stall_timer" in (tmp_path / "stacks" / "rank.txt").read_text()


@pytest.mark.parametrize("keep", ["steps", "unlimited", "slow"])
def test_as_long_as_one_process_goes_on_the_others_wait(group, keep):
    start, ends = group
    timers, ends_at = start(2), time.monotonic() + 1.5
    timers[1].begin_phase({"steps": 0.2, "unlimited": math.inf, "slow": timers[1].limits[1]}[keep])
    while time.monotonic() < ends_at:
        if keep == "steps":
            timers[1].mark("epoch 2, step 15")
        time.sleep(0.02)
    assert not ends
    timers[1].mark("epoch 2, step 16")  # and then it stalls
    wait_for(lambda: len(ends) == 2)


def test_a_process_that_does_not_respond_is_not_waited_for_and_is_named(group, caplog):
    start, ends = group
    timers = start(2)
    timers[1].begin_phase(math.inf)
    comm.GroupState.phase = "waiting for data"
    time.sleep(0.2)
    comm.GroupState.phase = ""
    timers[1]._is_over.set()  # it no longer writes its state
    wait_for(lambda: ends == [0])
    assert "process 1 on " in caplog.text and "does not respond; last seen" in caplog.text
    assert caplog.text.index("process 1 on ") < caplog.text.index("process 0 on ")


def test_a_suspended_job_has_not_hung(group, monkeypatch):
    """After an hour's suspension all clocks jump, and no process has stalled."""
    start, ends = group
    (timer,), clock = start(1), time.time
    for name in ("time", "monotonic"):
        monkeypatch.setattr(time, name, lambda: clock() + 3600)
    for number in range(20):
        timer.mark(f"step {number}")
        time.sleep(0.02)
    assert not ends


def test_an_error_of_communication_without_a_lost_process_is_an_error(group):
    start, ends = group
    (timer, _) = start(2)
    for each in (timer, _):
        each.begin_phase(math.inf)
    timer.end_after_others(1)
    assert not ends


SLEEP_S = 6.0


def sleep_in_log_epoch(monkeypatch) -> None:
    monkeypatch.setattr(Classification, "log_epoch", lambda *_: time.sleep(SLEEP_S * comm.is_main()))


def sleep_in_each_write(monkeypatch) -> None:
    write = manager.CheckpointManager._write

    def write_slowly(self, *args) -> None:
        time.sleep(SLEEP_S)
        write(self, *args)

    monkeypatch.setattr(manager.CheckpointManager, "_write", write_slowly)


def sleep_in_precise_bn(monkeypatch) -> None:
    def compute(model, images, *rest) -> None:
        for _ in images:
            time.sleep(SLEEP_S / 4)

    monkeypatch.setattr(precise_bn, "compute_precise_statistics", compute)


@pytest.mark.slow
@pytest.mark.parametrize("sleep", [sleep_in_log_epoch, sleep_in_each_write, sleep_in_precise_bn])
def test_what_takes_longer_than_a_step_is_no_stall(small_cfg, monkeypatch, sleep):
    sleep(monkeypatch)
    words = ("DIST.TIMEOUT_S", 1, "DIST.STARTUP_TIMEOUT_S", 2, "TRAIN.BATCH_SIZE", 6, "MODEL.PRECISE_BN", 48)
    assert len(on_processes(2, train_model, small_cfg(*words, "OPTIM.MAX_EPOCH", 2))) == 2


def train_then_evaluate(cfg) -> float:
    """Train, then evaluate as a further group with another time-out; process 0 comes later to each."""
    sign = rendezvous._sign

    def sign_late(store, launch, wait):
        time.sleep(0.5 * (launch.rank == 0))
        return sign(store, launch, wait)

    rendezvous._sign = sign_late
    train_model(cfg)
    return evaluate(cfg, overrides=["DIST.TIMEOUT_S", 30])["top1"]


@pytest.mark.slow
def test_several_groups_of_the_same_processes_follow_each_other(small_cfg):
    cfg = small_cfg("TRAIN.BATCH_SIZE", 6, "OPTIM.MAX_EPOCH", 1, "DIST.TIMEOUT_S", 20)
    first, second = on_processes(2, train_then_evaluate, cfg)
    assert first == second
