"""Events of chaos.py: the fault that each injects into a training, and the steps that it may cost (Linux)."""

import contextlib
import random
import re
import resource
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench_support.training_process import RunEnded, TrainingProcess, read_records

from distribuuuu.checkpoint.io import CheckpointError, read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager, position_of
from distribuuuu.checkpoint.weights_files import best_path
from distribuuuu.launch.signals import STATUS_OF

EVERY_STEPS = 4
SIGNALS = {
    "SIGTERM": signal.SIGTERM,
    "SIGINT": signal.SIGINT,
    "SIGUSR1": signal.SIGUSR1,
    "SIGUSR1 to all": signal.SIGUSR1,
}
KILLS = ("kill -9 rank", "kill -9 launcher", "kill -9 all", "truncate")
FULL_DISKS = ("disk full", "full, kill -9 all")
NAMES = (*SIGNALS, *KILLS, *FULL_DISKS)
# Seconds for a run to end after a signal or the death of a process.
GONE_S = 30.0
POLL_S = 0.01
# Bytes by which console, records and TensorBoard files may grow while the disk is full.
ROOM = 1 << 16
# Marks of torchrun's own traceback, which it prints whenever a process fails.
TORCHRUN = ("<frozen runpy>", "torch/distributed/run.py", "torch/distributed/elastic")
HEADER = (
    f"{'run':>3} {'no':>3}  {'event':<17} {'start':<24} {'phase':<10} {'survived':<8} {'gone s':>6} {'reached':>7} "
    f"{'left':>5} {'lost':>4} {'of it unavoidable':>17} {'allowed':>7}"
)


@dataclass
class Event:
    """One event and its outcome. Positions are counted in steps of the whole run.

    Attributes:
        start: the launcher and the loader workers of the start that was hit.
        reached: the steps done at its end.
        left: the position of the newest valid checkpoint after it.
        unavoidable: lost steps that no training could have saved.
        seconds: the time until no process was left; None: the same process continued.
        problems: violated rules.
        output: the console output of the start that was hit.
    """

    run: int
    number: int
    name: str
    start: str
    processes: int
    launcher: str
    phase: str = "start"
    reached: int = 0
    left: int = 0
    unavoidable: int = 0
    seconds: float | None = None
    survived: bool = False
    problems: list[str] = field(default_factory=list)
    output: str = ""

    @property
    def lost(self) -> int:
        """The number of steps that were repeated."""
        return self.reached - self.left

    @property
    def allowed(self) -> int:
        """The number of steps that may be lost beyond the unavoidable ones."""
        return 0 if self.name in SIGNALS or self.name == "disk full" else EVERY_STEPS

    def __str__(self) -> str:
        seconds = "-" if self.seconds is None else f"{self.seconds:.1f}"
        return (
            f"{self.run:>3} {self.number:>3}  {self.name:<17} {self.start:<24} {self.phase:<10} "
            f"{'yes' if self.survived else 'NO':<8} {seconds:>6} {self.reached:>7} {self.left:>5} {self.lost:>4} "
            f"{self.unavoidable:>17} {self.allowed:>7}"
        )


class Progress:
    """The progress of a run according to its files.

    Args:
        out_dir: the OUT_DIR of the run.
        num_steps: steps per epoch.
    """

    def __init__(self, out_dir: Path, num_steps: int):
        self.out_dir = out_dir
        self.num_steps = num_steps
        self._checkpoints = CheckpointManager(out_dir)

    def of_record(self, record: dict) -> int:
        """Return the number of steps done at a record."""
        return (record["epoch"] - 1) * self.num_steps + record["step"]

    def of_file(self, path: Path) -> int:
        """Return the number of steps done at a checkpoint."""
        epoch, step = position_of(path)
        return epoch * self.num_steps + step

    def newest(self) -> Path | None:
        """Return the newest checkpoint according to the file names."""
        return (self._checkpoints.list() or [None])[-1]

    def newest_size(self) -> int:
        """Return the bytes of the newest checkpoint; a living run may remove it meanwhile."""
        while True:
            with contextlib.suppress(FileNotFoundError):
                return self.newest().stat().st_size

    def valid(self) -> list[Path]:
        """Return the two newest readable checkpoints, oldest first."""
        found: list[Path] = []
        for path in reversed(self._checkpoints.list()):
            if _read(path):
                found.insert(0, path)
            if len(found) == 2:
                break
        return found

    def saved(self) -> int:
        """Return the position of the newest valid checkpoint."""
        found = self.valid()
        return self.of_file(found[-1]) if found else 0

    def find_problem_of_best(self) -> str | None:
        """Return the problem if the best weights are older than the newest valid checkpoint says."""
        content = next(filter(None, map(_read, reversed(self._checkpoints.list()))), None)
        if content is None:
            return None
        known = content["best_epoch"]
        best = best_path(self._checkpoints.folder.parent)
        saved = read_checkpoint(best)["epoch"] if best.exists() else -1
        return f"best.pth.tar is of epoch {saved + 1}, expected {known + 1}" if saved < known else None


def _read(path: Path) -> dict | None:
    """Return the content of a checkpoint; None if it is damaged, or if a living run has removed it meanwhile."""
    try:
        return read_checkpoint(path)
    except CheckpointError:
        return None


def inject(event: Event, run: TrainingProcess, progress: Progress, rng: random.Random) -> None:
    """Inject the fault of an event and wait for its end; record time, cost and problems."""
    began = time.monotonic()
    status = None
    if event.name in SIGNALS:
        if event.name == "SIGUSR1 to all":
            run.signal_everybody(signal.SIGUSR1)
        else:
            run.signal_launcher(SIGNALS[event.name])
    elif event.name == "kill -9 rank":
        run.signal_rank(rng.randrange(event.processes), signal.SIGKILL)
    elif event.name == "kill -9 launcher":
        run.signal_launcher(signal.SIGKILL)
    elif event.name in FULL_DISKS:
        fill_disk(event, run, progress, rng)
        if event.name == "disk full":
            return
        began = time.monotonic()
        run.kill()
    else:
        run.kill()
    while run.list_pids() and time.monotonic() - began < GONE_S:
        time.sleep(POLL_S)
    event.seconds = time.monotonic() - began
    if run.list_pids():
        event.problems.append(f"{len(run.list_pids())} processes are left after {GONE_S:.0f} s")
    try:
        status = run.wait(1)
    except subprocess.TimeoutExpired:
        status = None
    run.kill()
    check_end(event, run, status)
    record_cost(event, run, progress, rng)


def fill_disk(event: Event, run: TrainingProcess, progress: Progress, rng: random.Random) -> None:
    """Let the run fail to write a checkpoint; for 'disk full', free space and wait for one.

    The run makes steps until the next save, which waits for the one before.
    """
    files = [path for path in progress.out_dir.rglob("*") if path.is_file() and ".pth.tar" not in path.name]
    limit = max(path.stat().st_size for path in [*files, Path(f"{run.out_dir}.console")]) + ROOM
    if limit >= progress.newest_size():
        raise RuntimeError("the records are larger than a checkpoint; fix: fewer --events per run")
    before = progress.of_record(run.records()[-1])
    console = Path(f"{run.out_dir}.console")

    def count_warnings() -> int:
        return console.read_text(errors="replace").count("Cannot write checkpoint")

    known = count_warnings()
    run.limit_files(limit)
    most = progress.of_record(run.records()[-1])
    try:
        wait_polling(run, lambda: count_warnings() > known)
        time.sleep(rng.random())
        if progress.of_file(progress.newest()) > most:
            event.problems.append("the full disk did not prevent a checkpoint")
        event.reached = progress.of_record(run.records()[-1])
        event.unavoidable = event.reached - before
        if event.name != "disk full":
            return
        run.limit_files(resource.RLIM_INFINITY)
        freed_at = progress.of_record(run.records()[-1])
        wait_polling(run, lambda: progress.of_file(progress.newest()) > freed_at)
    except RunEnded as error:
        raise RuntimeError(f"the run ended on a full disk, {error}:\n{run.last_lines()}") from error
    event.reached = event.left = progress.of_record(run.records()[-1])
    event.unavoidable = 0
    event.survived = True
    event.output = run.said_since_start()
    check_output(event)
    late = progress.of_file(progress.newest()) - freed_at
    if late > 2 * EVERY_STEPS:
        event.problems.append(f"first checkpoint {late} steps after the disk had space, allowed are {2 * EVERY_STEPS}")


def wait_polling(run: TrainingProcess, condition) -> None:
    """Wait for a condition that reads files; sleeps between two checks to leave the CPU to the run."""
    run.wait_for(lambda: condition() or time.sleep(POLL_S))


def check_end(event: Event, run: TrainingProcess, status: int | None) -> None:
    """Check the exit status and the console output."""
    event.output = run.said_since_start()
    signum = SIGNALS.get(event.name)
    under_torchrun = event.launcher == "torchrun" and event.processes > 1
    expected = STATUS_OF[signum] if signum else -signal.SIGKILL
    if event.name == "kill -9 rank" and event.processes > 1:
        expected = 128 + signal.SIGKILL
    if (not status) if under_torchrun else (status != expected):
        event.problems.append(f"exit status {status} instead of {'any but 0' if under_torchrun else expected}")
    check_output(event)


def check_output(event: Event) -> None:
    """Check the console output for tracebacks other than torchrun's."""
    for part in event.output.split("Traceback (most recent call last)")[1:]:
        lines = part.splitlines()[1:]
        end = next(
            (number for number, line in enumerate(lines) if not re.match(r"\s|\[rank\d+\]:\s", line)), len(lines)
        )
        if not any(mark in "\n".join(lines[:end]) for mark in TORCHRUN):
            event.problems.append(f"a traceback: {lines[end] if end < len(lines) else '?'}")


def record_cost(event: Event, run: TrainingProcess, progress: Progress, rng: random.Random) -> None:
    """Record the position reached and that of the newest valid checkpoint; for 'truncate', truncate it first."""
    records = run.records()
    if records:
        reached = progress.of_record(records[-1])
        if event.name in FULL_DISKS:  # the disk was full until the end
            event.unavoidable += reached - event.reached
        event.reached = reached
    if event.name == "truncate" and len(valid := progress.valid()) > 1:
        newest = valid[-1]
        event.unavoidable = progress.of_file(newest) - progress.of_file(valid[-2])
        with open(newest, "r+b") as file:
            file.truncate(rng.randrange(newest.stat().st_size))
    event.left = progress.saved()
    if event.lost - event.unavoidable > event.allowed:
        event.problems.append(f"{event.lost - event.unavoidable} steps lost, allowed are {event.allowed}")


def phase_of(run: TrainingProcess) -> str:
    """Return the phase of a run."""
    if not run.records():
        return "start"
    if run.temporary_file():
        return "save"
    return "evaluation" if run.is_evaluating() else "steps"


def positions(out_dir: Path) -> list[tuple]:
    """Return kind, epoch and step of the records of a run."""
    return [(record["kind"], record["epoch"], record["step"]) for record in read_records(out_dir)]
