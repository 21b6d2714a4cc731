"""Stall timer and watchdog: healthy runs, unknown connections, stalls. Runs that it ends: test_graceful_stop.py."""

import ctypes
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from support.processes import on_processes, wait_for
from support.runs import ROOT
from support.tables import slow

from distribuuuu import trainer
from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.distributed import comm, process_group, rendezvous, stall_timer
from distribuuuu.distributed.comm import mark_position
from distribuuuu.distributed.stall_timer import StallTimer
from distribuuuu.distributed.watchdog import monitor as monitor_module
from distribuuuu.distributed.watchdog import process
from distribuuuu.distributed.watchdog.monitor import Channel, Monitor
from distribuuuu.distributed.watchdog.process import Watchdog
from distribuuuu.engine import precise_bn
from distribuuuu.launch.detect import Launch, detect_launch
from distribuuuu.trainer import train_model

PERIOD_S = 0.05


class Member:
    """A process that runs no watchdog: it sends the messages that a test asks for."""

    def __init__(self, monitor: Monitor, rank: int):
        self.rank = rank
        self.channel = Channel(socket.create_connection(("127.0.0.1", monitor.port), timeout=60))
        self.send = self.channel.send
        self.send(token="secret", rank=rank, host="here", pid=rank)
        self.orders: list[dict] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while not self.channel.broken:
            self.orders += [order for order in self.channel.receive() if order]

    def was_told(self, name: str) -> bool:
        return any(order.get(name) is not None for order in self.orders)


class Group:
    """A monitor with bare members and, on request, with real watchdogs; `ends` are the statuses of processes."""

    def __init__(self, tmp_path, num: int, limits=(60.0, 60.0)):
        self.ends: list[int] = []
        self.timers = [StallTimer(rank, limits, None) for rank in range(num)]
        self.monitor = Monitor("secret", num, self.timers[0], is_local=True)
        self.monitor.start()
        self.num, self.dogs = num, list[Watchdog]()

    def join(self, *ranks: int) -> list[Member]:
        members = [Member(self.monitor, rank) for rank in ranks]
        wait_for(lambda: {*ranks} <= {*self.monitor._peers})
        return members

    def watch(self, *ranks: int, start: bool = True) -> list[Watchdog]:
        dogs = []
        for rank in ranks:
            channel = Channel(socket.create_connection(("127.0.0.1", self.monitor.port), timeout=60))
            monitor = self.monitor if rank == 0 else None
            launch = Launch("test", rank, 0, self.num)
            dogs.append(Watchdog(launch, self.timers[rank], channel, "secret", ("here", 1), monitor))
        wait_for(lambda: {*ranks} <= {*self.monitor._peers})
        for dog in dogs if start else ():
            dog.start()
        self.dogs += dogs
        return dogs

    def close(self) -> None:
        for dog in self.dogs:
            dog._is_over.set()
            dog._channel.close()
            if dog.ident:
                dog.join(60)
        self.monitor.close()


@pytest.fixture
def group(tmp_path, monkeypatch):
    """Return group(number of processes, limits); its periods are short, and no process ends."""
    groups: list[Group] = []

    def make(*args) -> Group:
        groups.append(Group(tmp_path, *args))
        return groups[-1]

    for module in (monitor_module, process, stall_timer):
        monkeypatch.setattr(module, "PERIOD_S", PERIOD_S)
    for module in (monitor_module, process):
        monkeypatch.setattr(module, "end_process", lambda status: groups[0].ends.append(status))
    monkeypatch.setattr(monitor_module, "EXIT_GRACE_S", 0.5)
    yield make
    for made in groups:
        made.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("is_busy", [False, True])
def test_processes_leave_without_ending_the_run(group, caplog, order, is_busy):
    """A busy process learns only after rank 0 has gone that the run is over."""
    run = group(2)
    dogs = run.watch(0, 1, start=not is_busy)
    run.timers[1].mark("epoch 1, step 3")
    for rank in order:
        dogs[rank].close()
    for dog in dogs:
        if is_busy:
            dog.start()
        dog.join(60)
    assert not any(thread.is_alive() for thread in (run.monitor, *dogs))
    assert not caplog.records and not run.ends


@pytest.mark.parametrize("rank", [0, 2])
def test_a_death_is_logged_by_one_process_with_its_last_step(group, caplog, rank):
    run = group(3)
    run.watch(*({0, 1, 2} - {rank}))
    for timer in run.timers:
        timer.mark("epoch 2, step 14")
    if rank == 0:  # the monitor dies with it
        run.monitor._is_over.set()
        run.monitor._send = lambda peers, **message: None
        run.monitor.join(60)
        for peer in run.monitor._peers.values():
            peer.channel.close()
    else:
        run.join(2)[0].channel.close()
    wait_for(lambda: len(run.ends) >= 2)
    assert caplog.messages == [f"process {rank} on here died after epoch 2, step 14; the others stop"]
    assert {*run.ends} == {1}


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff\n", b"[" * 200_000, b"[]\n",
    b'{"token": "guess", "rank": 0, "host": "x", "pid": 1}\n'])  # fmt: skip
def test_unknown_connections_are_closed_and_end_no_run(group, words):
    run = group(1)
    with socket.create_connection(("127.0.0.1", run.monitor.port), timeout=60) as connection:
        try:
            connection.sendall(words)
            assert not words or connection.recv(1) == b"", "it is closed"
        except ConnectionError:
            pass
    run.join(0)
    assert run.monitor.is_alive() and not run.ends


def test_the_monitor_of_one_machine_listens_on_loopback_only(group, tmp_path):
    assert group(1).monitor._listener.getsockname()[0] == "127.0.0.1"
    monitor = Monitor("secret", 2, StallTimer(0, (1, 1), None), is_local=False)
    socket.create_connection(("127.0.0.1", monitor.port), timeout=60).close()
    monitor._listener.close()


def test_the_others_reach_rank_0_at_its_address_or_at_that_of_the_store(monkeypatch):
    assert process._find_own_address("localhost") == "", "it is the machine of the store, whose name the others know"
    assert process._find_own_address("192.0.2.1") != "127.0.0.1"


def hold_interpreter_lock() -> None:
    """Hold the lock on process 1."""
    with process_group.process_group(detect_launch(), torch.device("cpu"), 60):
        mark_position("step 1")
        time.sleep(0.5)
        if comm.rank() == 1:
            ctypes.PyDLL(None).usleep(1_500_000)
        comm.barrier()


@pytest.mark.slow
def test_a_held_interpreter_lock_is_no_death():
    on_processes(2, hold_interpreter_lock)


@pytest.mark.parametrize("is_slow, silent, event", [
    (False, False, "has made no step for 1 s (DIST.TIMEOUT_S) after step 7"),
    slow(False, True, "has been silent and has made no step for 1 s (DIST.TIMEOUT_S) after step 7"),
    slow(True, False, "has made no step for 1 s (DIST.STARTUP_TIMEOUT_S) after step 7"),
])  # fmt: skip
def test_a_process_without_progress_is_named_after_all_have_written_their_stacks(group, caplog, is_slow, silent, event):
    """A process that ends breaks the collectives of the others: they would no longer be where they were stuck."""
    run = group(2, (60, 1) if is_slow else (1, 60))
    main, stuck = run.join(0, 1)
    stuck.send(position="step 7", slow=False)
    began, number = time.monotonic(), 0
    while not main.was_told("write_stacks"):
        number += 1
        main.send(marks=number, slow=is_slow)
        if not silent:
            stuck.send()
        time.sleep(0.01)
        assert time.monotonic() < began + 60
    assert time.monotonic() - began > 1 and not run.ends
    main.send(stacks=True)
    stuck.send(stacks=True)
    wait_for(lambda: run.ends)
    assert f"process 1 on here {event}; all stop" in caplog.text and stuck.was_told("end")


def test_a_suspended_job_has_not_hung(group, monkeypatch):
    """After an hour's suspension all clocks jump, and no process has stalled."""
    run, clock = group(1), time.monotonic
    (member,) = run.join(0)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600)
    for number in range(8):
        member.send(marks=number)
        time.sleep(PERIOD_S)
    assert not run.ends and run.monitor.is_alive()


def test_a_silent_rank_0_is_named(group, monkeypatch, caplog):
    monkeypatch.setattr(process, "LATE_S", 0.0)
    run = group(2, (0.5, 0.5))
    run.monitor._check = lambda is_counted: None
    run.monitor._send = lambda peers, **message: None
    (dog,) = run.watch(1)
    wait_for(lambda: not dog._is_watched())
    assert "process 0 on here has been silent for" in caplog.text


@pytest.mark.parametrize(("rank", "status"), [(0, 2), slow(1, None)])
def test_a_failure_has_its_status_and_precedes_its_consequences(group, rank, status, caplog):
    run = group(3)
    members = run.join(0, 1, 2)
    members[2].send(failed=True, status=status, is_consequence=True)
    time.sleep(0.3)
    members[rank].send(failed=True, status=status, is_consequence=False)
    wait_for(lambda: members[rank].was_told("may_raise"))
    assert {"end": status or 1, "kill": None} in members[2].orders
    wait_for(lambda: run.ends == ([] if rank == 0 else [status or 1]))  # rank 0 prints its own error
    said = [] if status else [f"process {rank} on here failed, see below, after its start; the others stop"]
    assert caplog.messages == said


def test_a_consequence_without_a_cause_is_a_failure(group, monkeypatch, caplog):
    monkeypatch.setattr(monitor_module, "CAUSE_WAIT_S", 0.2)
    run = group(2)
    run.join(0, 1)[1].send(failed=True, is_consequence=True)
    wait_for(lambda: run.ends)
    assert "process 1 on here failed, see below" in caplog.text


def stall(timeout_s: float) -> None:
    """Let process 1 sleep in its second step."""
    with process_group.process_group(detect_launch(), torch.device("cpu"), timeout_s, report_dir="."):
        mark_position("step 1")
        comm.barrier()
        if comm.rank() == 1:
            time.sleep(600)
        comm.barrier()


@pytest.mark.slow
def test_without_the_package_each_process_ends_by_its_own_timer_with_its_stacks_on_disk(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stall_timer, "LATE_S", 1.0)
    monkeypatch.setattr(rendezvous, "find_spec", lambda name: None)
    with pytest.raises(AssertionError) as caught:
        on_processes(2, stall, 3)
    assert "exit status 1" in str(caught.value)
    for rank in (0, 1):
        assert "in stall" in (tmp_path / "stacks" / f"rank_{rank}.txt").read_text()


SLEEP_S = 5.0


def sleep_in_log_epoch(monkeypatch) -> None:
    monkeypatch.setattr(trainer, "call_log_hook", lambda run, *batch: time.sleep(SLEEP_S if run.state.epoch else 0))


def sleep_in_the_last_write(monkeypatch) -> None:
    finish = CheckpointManager.finish

    def finish_slowly(self) -> None:
        time.sleep(SLEEP_S if comm.is_main() else 0)
        finish(self)

    monkeypatch.setattr(CheckpointManager, "finish", finish_slowly)


def sleep_in_precise_bn(monkeypatch) -> None:
    def compute(model, images, autocast) -> None:
        for _ in images:
            time.sleep(SLEEP_S / 4)

    monkeypatch.setattr(precise_bn, "compute_precise_statistics", compute)


@pytest.mark.slow
@pytest.mark.parametrize("sleep", [sleep_in_log_epoch, sleep_in_the_last_write, sleep_in_precise_bn])
def test_a_slow_phase_that_goes_on_is_no_stall(small_cfg, monkeypatch, sleep):
    monkeypatch.setattr(stall_timer, "LATE_S", 1.0)
    sleep(monkeypatch)
    words = ("DIST.TIMEOUT_S", 1, "DIST.STARTUP_TIMEOUT_S", 60, "TRAIN.BATCH_SIZE", 6, "MODEL.PRECISE_BN", 48)
    assert len(on_processes(2, train_model, small_cfg(*words))) == 2


@pytest.mark.slow
def test_the_end_waits_for_a_checkpoint_but_not_for_idle_threads(tmp_path):
    code = """
        import threading, time, sys
        from pathlib import Path
        from concurrent.futures import ThreadPoolExecutor
        from distribuuuu.launch import signals
        pools = [ThreadPoolExecutor(1) for _ in range(4)]
        for pool in pools:
            pool.submit(len, "").result()
        def write():
            time.sleep(0.5)
            Path(sys.argv[1]).write_text("whole")
        threading.Thread(target=write, name=signals.WRITER_NAME).start()
        signals.SAVE_S = 60
        signals.end_process(7)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "file")]
    assert subprocess.run(command, cwd=ROOT, timeout=50).returncode == 7
    assert (tmp_path / "file").read_text() == "whole"
