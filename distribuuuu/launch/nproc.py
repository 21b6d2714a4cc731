"""`--nproc N`: N processes of the same command on this machine, without torchrun."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

from distribuuuu.launch.host import count_cores
from distribuuuu.launch.processes import start_child
from distribuuuu.launch.signals import handled_by

# Seconds that the other processes have to exit after one has failed: they find out which one within about four, but
# with a mirror, the first one uploads the last files. Those that still wait for it at the rendezvous are killed then.
GRACE_S = 15.0
POLL_S = 0.05


def find_free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def run_processes(num: int, command: Sequence[str]) -> int:
    """Run a command as processes 0 to num - 1 of one run; return the first nonzero exit status, else 0.

    Only this process receives a Ctrl-C; it forwards each signal once to all of them. They exit with it.
    """
    run_id = os.urandom(16).hex()
    shared = {
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, count_cores() // num)),
    }
    processes: list[subprocess.Popen] = []

    def forward(signum: int) -> None:
        for process in processes:
            process.send_signal(signum)

    with handled_by(forward):
        try:
            for rank in range(num):
                env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(start_child(command, run_id, env))
            return _wait_for(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def _wait_for(processes: list[subprocess.Popen]) -> int:
    """Wait until all have exited, or `GRACE_S` after one has failed; a status by signal precedes other failures."""
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
