"""Watchdog: healthy runs, unknown connections, stalls. Runs that it ends: test_graceful_stop.py."""

import ctypes
import json
import logging
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as torch_dist
from support.processes import on_processes, wait_for
from support.runs import ROOT

from distribuuuu.distributed import comm, watchdog, watchdog_monitor
from distribuuuu.distributed.process_group import process_group
from distribuuuu.distributed.watchdog import Watchdog
from distribuuuu.distributed.watchdog_monitor import UNREACHABLE_S, Monitor, State, format_address, keep_alive, period_s
from distribuuuu.launch.detect import Launch, detect_launch
from distribuuuu.launch.ports import choose_address, find_own_address

# The processes of these tests exit by the end of their threads.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class CountingStore(torch_dist.HashStore):
    num_requests = 0

    def set(self, *args):
        self.num_requests += 1
        return super().set(*args)

    def multi_get(self, *args):
        self.num_requests += 1
        return super().multi_get(*args)


class Member:
    """A process that runs no watchdog: it writes the states and reads the orders that a test asks for."""

    def __init__(self, store, rank: int, **values):
        self.store, self.rank, self.state = store, rank, State(host="here")
        self.connection = None
        store.set(f"order {rank}", "{}")
        self.write(**values)

    def connect(self, monitor: Monitor) -> None:
        self.connection = socket.create_connection(("127.0.0.1", monitor.port), timeout=60)
        self.write(sender=format_address(self.connection.getsockname()))

    def write(self, **values) -> None:
        for name, value in values.items():
            setattr(self.state, name, value)
        self.state.write(self.store, self.rank)

    def order(self) -> dict:
        return json.loads(self.store.get(f"order {self.rank}"))

    def message(self) -> str:
        wait_for(lambda: "end" in self.order())
        self.connection.close()
        return self.order()["end"]["message"]


class Group:
    """A monitor with bare members and, on request, with real watchdogs."""

    def __init__(self, tmp_path, world_size: int, timeout_s: float = 60, startup_timeout_s: float = 60):
        self.store, self.folder, self.limits = CountingStore(), tmp_path, (timeout_s, startup_timeout_s)
        self.members = [Member(self.store, rank) for rank in range(world_size)]
        self.monitor = Monitor(self.store, [member.state for member in self.members], self.limits)

    def start(self) -> "Group":
        for member in self.members:
            member.connect(self.monitor)
        self.monitor.start()
        return self

    def watch(self, *ranks: int) -> list[Watchdog]:
        world_size = len(self.members)
        launches = [Launch("test", rank, 0, world_size, "here") for rank in ranks]
        dogs = [Watchdog(launch, self.store, self.limits, self.folder) for launch in launches]
        self.monitor.start()
        for dog in dogs:
            dog.connect("here", "127.0.0.1", self.monitor.port)
            dog.start()
        wait_for(lambda: all(f'"sender": "{dog.state.sender}"' in self.store.get(f"state {dog.rank}").decode()
                             for dog in dogs))  # fmt: skip
        return dogs

    def is_over(self) -> bool:
        return self.monitor._is_over.is_set()


@pytest.fixture
def group(tmp_path, monkeypatch):
    """Return group(world_size, ...); its processes exit by the end of their thread, its periods are short."""
    groups = []

    def make(*args) -> Group:
        groups.append(Group(tmp_path, *args))
        return groups[-1]

    monkeypatch.setattr(watchdog_monitor, "PERIOD_S", 0.05)
    monkeypatch.setattr(watchdog, "end_process", sys.exit)
    yield make
    for made in groups:
        for member in made.members:
            member.write(has_left=True)
        if made.monitor.is_alive():
            made.monitor.close()
        made.monitor._listener.close()


@pytest.fixture
def short_grace(monkeypatch):
    """Let the monitor wait briefly for members that never leave."""
    monkeypatch.setattr(watchdog_monitor, "EXIT_GRACE_S", 0.2)


@pytest.mark.parametrize("is_monitor_first", [False, True])
def test_processes_leave_without_ending_the_run(group, caplog, is_monitor_first):
    run = group(2)
    dogs = run.watch(0, 1)
    dogs[1].mark("epoch 1, step 3")
    if is_monitor_first:
        run.monitor.close()
        for dog in dogs:
            dog.join(60)
    for dog in (dogs[1], dogs[0]):
        dog.close()
    run.monitor.close()
    assert not any(thread.is_alive() for thread in (run.monitor, *dogs)) and not caplog.records


def test_a_death_is_logged_by_one_process_with_its_last_step(group, caplog):
    run = group(3)
    dogs = run.watch(0, 1)
    run.members[2].connect(run.monitor)
    for dog in dogs:
        dog.mark("epoch 2, step 14")
    run.members[2].connection.close()
    for dog in dogs:
        dog.join(60)
    assert caplog.messages == ["process 2 on here died after epoch 2, step 14; the others stop"]


def test_a_death_of_rank_0_is_logged_by_the_last_process(group, caplog):
    run = group(3)
    dogs = run.watch(1, 2)
    for dog in dogs:
        dog.mark("epoch 2, step 14")
    run.monitor._is_over.set()  # the monitor ends with its process
    run.monitor.join(60)
    for key in list(run.monitor._selector.get_map().values()):
        key.fileobj.close()
    for dog in dogs:
        dog.join(60)
    assert caplog.messages == ["process 0 on here died after epoch 2, step 14; the others stop"]


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff\n", b"[" * 200_000])
def test_strangers_are_disconnected_and_end_no_run(group, words):
    run = group(1).start()
    with socket.create_connection(("127.0.0.1", run.monitor.port), timeout=60) as connection:
        try:
            connection.sendall(words)
            assert not words or connection.recv(1) == b"", "it is closed"
        except ConnectionError:
            pass
    seen = run.store.num_requests
    wait_for(lambda: run.store.num_requests > seen + 5)
    assert run.monitor.is_alive() and not run.is_over()


def test_errors_of_accept_are_survived(group, monkeypatch):
    errors, accept = [OSError(24, "EMFILE"), ConnectionAbortedError(103, "aborted")], socket.socket.accept

    def raise_or_accept(self):
        if errors:
            raise errors.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", raise_or_accept)
    run = group(2).start()
    run.members[1].connection.close()
    assert "process 1 on here died" in run.members[0].message() and not errors


def test_an_error_in_the_monitor_ends_no_run(group, monkeypatch, caplog):
    run = group(2)
    dogs = run.watch(0, 1)
    monkeypatch.setattr(run.monitor, "_check", lambda is_counted: 1 / 0)
    for dog in dogs:
        dog.join(60)
        dog.close()
    assert len(caplog.records) == 1 and "watchdog disabled: ZeroDivisionError" in caplog.text


def test_an_error_in_a_watchdog_ends_no_run(group, monkeypatch, caplog):
    run = group(2)
    dog = run.watch(1)[0]
    monkeypatch.setattr(dog, "_obey", lambda **order: 1 / 0)
    dog.join(60)
    wait_for(lambda: json.loads(run.store.get("state 1"))["has_left"])
    assert not run.is_over() and "watchdog disabled on this process" in caplog.text
    dog.close()


def test_the_monitor_listens_on_its_address_only(group):
    run = group(1)
    assert run.monitor._listener.getsockname()[0] == "127.0.0.1"
    if address := find_own_address("192.0.2.1"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, run.monitor.port), timeout=5)


def test_rank_0_listens_where_the_others_reach_it_and_both_ends_have_one_name(monkeypatch):
    ways = {"10.0.0.6": "10.0.0.5", "fe80::6%eth0": "fe80::5%eth0", "172.16.0.9": ""}
    monkeypatch.setattr("distribuuuu.launch.ports.find_own_address", ways.__getitem__)
    assert choose_address("10.0.0.5", []) == "127.0.0.1", "all are on this machine"
    assert choose_address("10.0.0.5", ["127.0.0.1"]) == "10.0.0.5", "the store is on another machine"
    # The host name of the first machine means 127.0.1.1 there, as on Debian.
    assert choose_address("127.0.1.1", ["172.16.0.9", "", "10.0.0.6"]) == "10.0.0.5"
    assert choose_address("::1", ["fe80::6%eth0"]) == "fe80::5%eth0"
    assert format_address(("::ffff:10.0.0.5", 7, 0, 0)) == format_address(("10.0.0.5", 7)) == "10.0.0.5:7"
    assert format_address(("fe80::5%eth0", 7, 0, 2)) == format_address(("fe80::5%eth1", 7, 0, 3))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems close a dead connection after their own time")
def test_the_kernel_closes_a_connection_to_a_vanished_machine():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        keep_alive(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == UNREACHABLE_S * 1000
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, interval, count = (connection.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert idle + interval * count <= UNREACHABLE_S


# Runs in a network of its own whose loopback device is switched off: no connection is closed.
VANISHING = """
    import json, subprocess, sys, time
    import torch.distributed
    from distribuuuu.distributed import watchdog, watchdog_monitor
    from distribuuuu.launch.detect import Launch
    watchdog_monitor.UNREACHABLE_S = 3
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    store = torch.distributed.HashStore()
    launches = [Launch("test", rank, 0, 2, "here") for rank in (0, 1)]
    dogs = [watchdog.Watchdog(launch, store, (600, 600), sys.argv[1]) for launch in launches]
    monitor = watchdog_monitor.Monitor(store, [dog.state for dog in dogs], (600, 600))
    monitor.start()
    watchdog.end_process = lambda status: print("the process ends", status, flush=True)
    dogs[1].connect("here", "127.0.0.1", monitor.port)
    dogs[1].start()
    time.sleep(2)
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    monitor.join(30)
    dogs[1].join(30)
    print(json.loads(store.get("order 0"))["end"]["message"])
"""


@pytest.mark.slow
def test_a_vanished_machine_is_noticed(tmp_path):
    command = ["unshare", "--user", "--map-root-user", "--net"]
    if not all(map(shutil.which, ("unshare", "ip"))) or subprocess.run([*command, "true"]).returncode:
        pytest.skip("this system lets nobody have a network of one's own")
    code = [sys.executable, "-c", textwrap.dedent(VANISHING), str(tmp_path)]
    done = subprocess.run([*command, *code], cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert re.search("process 1 on .* could not be reached", done.stdout) and "process ends 1" in done.stdout, done
    assert "process 0 on here could not be reached" in done.stderr


def hold_interpreter_lock(seconds: float, timeout_s: float, alarm_s: float) -> bool:
    """Hold the lock on every process; return whether the watchdog is alive afterwards."""
    watchdog_monitor.PERIOD_S, watchdog.ALARM_S = 0.02, alarm_s
    logging.getLogger("distribuuuu").addHandler(logging.StreamHandler())
    with process_group(detect_launch(), torch.device("cpu"), timeout_s):
        assert Watchdog.current
        watchdog.mark_position("step 1")
        time.sleep(0.5)
        ctypes.PyDLL(None).usleep(int(1e6 * seconds))
        time.sleep(0.5)
        comm.barrier()
        return Watchdog.current.is_alive()


@pytest.mark.slow
def test_a_held_interpreter_lock_is_no_death():
    assert on_processes(2, hold_interpreter_lock, 1.5, 60, 60) == [True, True]


@pytest.mark.slow
def test_an_interpreter_lock_that_is_held_too_long_ends_the_process(capfd):
    with pytest.raises(AssertionError, match=r"process 1 ended without a result, exit status 1"):
        on_processes(2, hold_interpreter_lock, 600, 1, 2)
    assert "Timeout (0:00:03)!" in capfd.readouterr().err


@pytest.mark.parametrize("starting, silent, event", [
    (False, False, "has made no step for 1 s (DIST.TIMEOUT_S) after step 7"),
    (False, True, "has been silent and has made no step for 1 s (DIST.TIMEOUT_S) after step 7"),
    (True, False, "has made no step for 2 s (DIST.STARTUP_TIMEOUT_S) after step 7"),
])  # fmt: skip
def test_a_process_without_progress_is_named_after_all_have_written_their_stacks(group, starting, silent, event):
    """A process that ends breaks the collectives of the others: they would no longer be where they were stuck."""
    main, stuck = (run := group(2, 1, 2).start()).members
    main.write(is_starting=starting)
    stuck.write(position="step 7", is_starting=False)
    began, number = time.monotonic(), 0
    while "stacks" not in main.order():
        number += 1
        main.write(num_marks=number)
        if not silent:
            stuck.write()
        time.sleep(0.01)
        assert time.monotonic() < began + 60
    assert time.monotonic() - began > (2 if starting else 1)
    main.write(wrote_stacks=True)
    time.sleep(0.3)
    assert "end" not in stuck.order() or silent
    stuck.write(wrote_stacks=True)
    assert stuck.message() == f"process 1 on here {event}; all stop" == main.message()
    assert run.is_over()


def test_a_suspended_job_has_not_hung(group, monkeypatch):
    """After an hour's suspension all clocks jump, and nobody has been stuck."""
    run, clock = group(1).start(), time.monotonic
    seen = run.store.num_requests
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600)
    wait_for(lambda: run.store.num_requests > seen + 20)
    assert not run.is_over()


def test_a_silent_rank_0_is_named(group, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(watchdog, "UNREACHABLE_S", 0)
    run = group(2, 0.5, 0.5)
    run.monitor._check = lambda is_counted: None
    (dog,) = run.watch(1)
    dog.join(60)
    assert "process 0 on here has been silent for" in caplog.text
    assert "test_watchdog" in (tmp_path / "stacks" / "rank_1.txt").read_text()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "status, message", [(None, "process {} on here failed, see below, after its start; the others stop"), (2, None)]
)
def test_a_failure_has_its_status_and_precedes_its_consequences(group, short_grace, rank, status, message):
    run = group(3).start()
    failure = {"status": status or 1, "is_known": status is not None}
    run.members[2].write(failure={**failure, "is_consequence": True})
    time.sleep(0.3)
    run.members[rank].write(failure={**failure, "is_consequence": False})
    assert run.members[2].message() == (message and message.format(rank))
    end = run.members[2].order()["end"]
    assert (end["status"], end["culprit"], end["reporter"]) == (status or 1, rank, 1 - rank)


def test_a_consequence_without_a_cause_is_a_failure(group, short_grace, monkeypatch):
    monkeypatch.setattr(watchdog_monitor, "CAUSE_WAIT_S", 0.2)
    run = group(2).start()
    run.members[1].write(failure={"status": 1, "is_known": False, "is_consequence": True})
    assert "process 1 on here failed, see below" in run.members[0].message()


def test_four_thousand_processes_send_a_limited_number_of_requests(group):
    assert period_s(8) == 0.05 and period_s(4096) * watchdog_monitor.MAX_REQUESTS_PER_S == 2 * 4096
    run = group(1)
    dog = Watchdog(Launch("test"), run.store, (60, 60), run.folder)
    for count in (2, 1):  # of a process, and of the monitor for all processes
        before = run.store.num_requests
        if count == 2:
            dog._wake.set()
            dog._wake.wait = lambda seconds: dog._is_over.set()
            dog._exchange()
        else:
            run.monitor._check(is_counted=True)
        assert run.store.num_requests == before + count


def test_many_processes_receive_the_end(group):
    run = group(200).start()
    run.members[77].connection.close()
    messages = {member.message() for member in run.members if member.rank not in (0, 77)}
    assert messages == {"process 77 on here died after {last step}; the others stop"}
    assert "died" in run.members[0].message()


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
