"""A training process under test: read its output, send it signals, kill all of its processes (Linux).

The processes of a run are found in /proc by a variable in their environment, because torchrun gives its processes
process groups of their own and a killed launcher orphans them.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

MARK = "DISTRIBUUUU_BENCHMARK_RUN"
POLL_S = 0.0001
HANGS_AFTER_S = 300


class RunEnded(Exception):
    """The training ended before the expected moment."""


def _restore_signals() -> None:
    """Undo the effect of `nohup`, and of a shell's `&`, on this process and so on its children."""
    for signum in (signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)


class TrainingProcess:
    """A running `tools/train_net.py`, alone or under a launcher.

    Args:
        command: the command line.
        out_dir: its OUT_DIR.
        num_steps: steps per epoch.
        timeout_s: the seconds after which it hangs.
    """

    def __init__(self, command: list[str], out_dir: Path, num_steps: int = 0, timeout_s: float = HANGS_AFTER_S):
        self.out_dir = out_dir
        self.timeout_s = timeout_s
        self.num_steps = num_steps
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        self._started = time.time()
        self._console = open(f"{out_dir}.console", "ab")
        self._console_start = self._console.tell()
        name, _, value = self._mark.partition("=")
        self._process = subprocess.Popen(
            command,
            stdout=self._console,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", name: value},
            start_new_session=True,
            preexec_fn=_restore_signals,
        )
        self._writer: int | None = None

    def records(self) -> list[dict]:
        """Return the records that this start has appended to metrics.jsonl."""
        return [record for record in read_records(self.out_dir) if record["time"] >= self._started]

    def temporary_file(self) -> str | None:
        """Return the name of the file that is being saved at this moment; None: no save is in progress."""
        for folder in (self.out_dir / "checkpoints", self.out_dir):
            try:
                names = [name for name in os.listdir(folder) if name.startswith(".") and ".pth.tar." in name]
            except FileNotFoundError:
                continue
            if names:
                return names[0]
        return None

    def is_evaluating(self) -> bool:
        """Tell whether this start has finished the steps of an epoch but not its evaluation."""
        records = self.records()
        return bool(records) and records[-1]["kind"] == "train" and records[-1]["step"] == self.num_steps

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Poll until the condition is true.

        Raises:
            RunEnded: the training ended first.
            RuntimeError: the condition was false for `timeout_s` seconds.
        """
        while not condition():
            if self._process.poll() is not None:
                raise RunEnded(f"exit status {self._process.returncode}")
            if time.time() - self._started > self.timeout_s:
                raise RuntimeError(f"timeout after {self.timeout_s} s:\n{self.last_lines()}")
            time.sleep(POLL_S)

    def suspend(self) -> None:
        """Stop the main process, so that its phase can be verified before it is killed."""
        self._writer = self._writer or self._find_process("RANK=0")
        os.kill(self._writer, signal.SIGSTOP)
        self.wait_for(lambda: _state_of(self._writer) in "TtZX")

    def resume(self) -> None:
        """Continue a suspended process."""
        os.kill(self._writer, signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL to all processes of the run; return when none is left."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        while pids := self.list_pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)
        self._console.close()

    def signal_launcher(self, signum: int) -> None:
        """Send a signal to the process of the command: a launcher, or the training itself."""
        self._process.send_signal(signum)

    def signal_rank(self, rank: int, signum: int) -> None:
        """Send a signal to the training process of a rank."""
        os.kill(self._find_process(f"RANK={rank}"), signum)

    def signal_everybody(self, signum: int) -> None:
        """Send a signal to all processes of the run including loader workers, as Slurm does."""
        for pid in self.list_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def has_rank(self, rank: int) -> bool:
        """Tell whether the training process of a rank has been started."""
        return any(f"RANK={rank}" in _environment_of(pid) for pid in self.list_pids())

    def limit_files(self, most_bytes: int) -> None:
        """Limit the file size of all processes of the run, to simulate a full disk."""
        for pid in self.list_pids():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))

    def said_since_start(self) -> str:
        """Return the console output of this start."""
        return Path(self._console.name).read_bytes()[self._console_start :].decode(errors="replace")

    def wait(self, timeout_s: float) -> int:
        """Wait for the exit status, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: the process is still running.
        """
        return self._process.wait(timeout_s)

    def finish(self) -> None:
        """Wait for the end of the training.

        Raises:
            RuntimeError: it failed or timed out.
        """
        try:
            status: int | str = self._process.wait(timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            status = f"unknown, timeout after {self.timeout_s} s"
        finally:
            self.kill()
        if status:
            raise RuntimeError(f"the training failed, exit status {status}:\n{self.last_lines()}")

    def last_lines(self, number: int = 30) -> str:
        """Return the last lines of the console output."""
        return "\n".join(Path(self._console.name).read_text(errors="replace").splitlines()[-number:])

    def list_pids(self) -> list[int]:
        """Return the pids of the live processes of the run."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if self._mark in _environment_of(pid) and _state_of(pid) not in "ZX"]

    def _find_process(self, mark: str) -> int:
        """Return the training process with a variable; its loader workers inherit the variable and are excluded."""
        marked = [pid for pid in self.list_pids() if mark in _environment_of(pid)] or [self._process.pid]
        return next(pid for pid in marked if _parent_of(pid) not in marked)


def read_records(out_dir: Path) -> list[dict]:
    """Return the records of metrics.jsonl; an incomplete last line is ignored."""
    try:
        lines = (out_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _environment_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def _parent_of(pid: int) -> int:
    return int(_stat_of(pid)[1])


def _state_of(pid: int) -> str:
    return _stat_of(pid)[0]


def _stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0"]
