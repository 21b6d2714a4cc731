"""The end of a process: with its parent, and after a checkpoint that is being written."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from distribuuuu.launch.processes import die_with_parent
from distribuuuu.launch.signals import ECHO_S, SignalState, exit_now


@pytest.mark.parametrize(("rank", "has_begun", "said"), [
    ("0", True, "SIGTERM: ended at once; the newest checkpoint stays\n"),
    ("0", False, "SIGTERM: ended at once; no step was made, nothing is lost\n"), ("1", True, ""),
])  # fmt: skip
def test_a_process_exits_at_once_with_the_status_of_its_signal(monkeypatch, capfd, rank, has_begun, said):
    state, statuses = SignalState(), []
    state.has_begun = has_begun
    monkeypatch.setattr(SignalState, "current", state)
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setenv("RANK", rank)
    exit_now(signal.SIGTERM)
    assert statuses == [143] and capfd.readouterr().err == said
    state.receive(signal.SIGTERM)
    exit_now(signal.SIGTERM)  # the run has stopped on the first signal, and the process is about to exit
    state.first, state.is_ending = None, True  # it has an error to print, and exits by itself
    exit_now(signal.SIGTERM)
    assert statuses == [143] and capfd.readouterr().err == ""


def test_a_child_whose_parent_has_exited_before_it_listens_exits_too(monkeypatch):
    for parent, status in ((os.getpid(), 0), (1, 1)):
        monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
        child = multiprocessing.get_context("fork").Process(target=die_with_parent)
        child.start()
        child.join()
        assert child.exitcode == status


@pytest.mark.parametrize(("received", "num"), [
    ([(0.0, 100), (ECHO_S / 2, 100), (3.0, 1)], 0), ([(0.0, 100), (3.0, 1), (3.0 + ECHO_S, 1)], 1),
    ([(0.0, 100), (30.0, 1)], 1), ([(0.0, 100), (2 * ECHO_S, 100)], 1),
])  # fmt: skip
def test_the_signal_of_a_parent_that_takes_seconds_to_exit_is_not_a_second_one(monkeypatch, received, num):
    second: list[int] = []
    state = SignalState(second.append)
    for seconds, parent in received:
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: 50 + seconds)
        monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
        assert second == []
        state.receive(signal.SIGTERM)
    assert second == [signal.SIGTERM] * num


def test_each_thread_of_a_killed_parent_may_send_a_signal_until_the_parent_is_gone(monkeypatch):
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    second: list[int] = []
    state = SignalState(second.append)
    monkeypatch.setattr(os, "getppid", lambda: parent.pid)
    state.receive(signal.SIGTERM)
    later = time.monotonic() + 2 * ECHO_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    parent.kill()
    os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    state.receive(signal.SIGTERM)
    assert second == []
    parent.communicate()
    state.receive(signal.SIGTERM)
    assert second == [signal.SIGTERM]
