"""Functions run on several processes, the end of a training's processes, and free ports."""

import multiprocessing
import os
import pickle
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

# Limits that catch a hang: a result, or the end of a run, takes seconds.
RESULT_S = 300
END_S = 60


def free_port() -> int:
    """Return a TCP port that no process listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def _run(rank: int, num: int, port: int, function: Callable, args: tuple, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        result = (True, function(*args))
    except BaseException:
        result = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(result))


def on_processes(num: int, function: Callable, *args: Any) -> list[Any]:
    """Run function(*args) on `num` forked processes with the variables of a launcher; return the results by rank.

    Raises:
        AssertionError: a process raised an exception, died without a result, or had none after `RESULT_S`.
    """
    context, port, running = multiprocessing.get_context("fork"), free_port(), []
    for rank in range(num):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(rank, num, port, function, args, sender))
        process.start()
        sender.close()
        running.append((process, receiver))
    results = [_receive(rank, process, receiver) for rank, (process, receiver) in enumerate(running)]
    errors = [result for succeeded, result in results if not succeeded]
    assert not errors, "\n".join(errors)
    return [result for _, result in results]


def _receive(rank: int, process: multiprocessing.Process, receiver: Connection) -> tuple[bool, Any]:
    """Return whether the function of a process succeeded, and its result or its traceback."""
    if not receiver.poll(RESULT_S):
        process.kill()
        return False, f"process {rank} had no result after {RESULT_S} s"
    try:
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join()
        return False, f"process {rank} ended without a result, exit status {process.exitcode}"
    finally:
        process.join()


class HasProcesses(Protocol):
    """A run whose processes can be listed."""

    def list_pids(self) -> list[int]:
        """Return the processes that are left."""
        ...


def ends(run: HasProcesses, timeout_s: float = END_S) -> bool:
    """Wait until no process of a run is left; return False if some are left after the timeout."""
    try:
        wait_for(lambda: not run.list_pids(), timeout_s=timeout_s)
    except AssertionError:
        return False
    return True


def wait_for(condition: Callable[[], Any], *processes: subprocess.Popen, timeout_s: float = RESULT_S) -> None:
    """Poll until a condition is true; the processes must not end before."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.02)


def list_children(pid: int) -> list[int]:
    """Return the processes that a process has started (Linux)."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def list_trackers(out: Path) -> list[int]:
    """Return the processes that follow a run, started by this process."""
    found = []
    for pid in list_children(os.getpid()):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        found += [pid] if b"--follow" in words and str(out).encode() in words else []
    return found


def have_ended(pids: Iterable[int]) -> bool:
    """Tell whether none of these processes exists any more."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)
