"""`--nproc N`: N processes of the same command on this machine, without torchrun; imports no torch."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence

from distribuuuu.launch.detect import NPROC_MARK
from distribuuuu.launch.host import count_cores
from distribuuuu.launch.ports import find_free_port
from distribuuuu.launch.signals import handled_by

# Seconds that the others get to end by themselves after one has failed: their watch tells them within two.
GRACE_S = 5.0
POLL_S = 0.05


def run_processes(num: int, command: Sequence[str]) -> int:
    """Run a command as processes 0 to num - 1 of one run; return the first exit status that is not 0, else 0.

    They are in sessions of their own: a Ctrl-C in the terminal reaches this process alone, which passes each signal on
    to all of them, once. When this process dies, the kernel tells them (see signals.die_with_parent).
    """
    shared = {
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
        NPROC_MARK: f"{os.getpid()} {uuid.uuid4().hex}",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, count_cores() // num)),
    }
    processes: list[subprocess.Popen] = []

    def pass_on(signum: int) -> None:
        for process in processes:
            process.send_signal(signum)

    with handled_by(pass_on, on_quit=pass_on):
        try:
            for rank in range(num):
                env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=env, start_new_session=True))
            return _wait_for(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def _wait_for(processes: list[subprocess.Popen]) -> int:
    """Return when all have ended, or some time after one has failed; a signal that killed one is the cause."""
    first_failure, give_up_at = 0, float("inf")
    while True:
        statuses = [process.poll() for process in processes]
        failed = [status for status in statuses if status]
        if failed and not first_failure:
            first_failure, give_up_at = failed[0], time.monotonic() + GRACE_S
        if None not in statuses or time.monotonic() > give_up_at:
            killed = [status for status in failed if status < 0]
            return 128 - killed[0] if killed else first_failure
        time.sleep(POLL_S)


def without_nproc(words: Sequence[str]) -> list[str]:
    """Return the command line of this process without its --nproc, for the processes it starts."""
    kept, skip = [], False
    for word in words:
        if not skip and not word.startswith("--nproc"):
            kept.append(word)
        skip = word == "--nproc"
    return kept


def own_command() -> list[str]:
    """Return what started this process: the interpreter with its flags, the script and its words."""
    return [sys.executable, *sys.orig_argv[1:]]
