"""The events of chaos.py: what each does to a running training, and what it may cost. For Linux."""

import random
import re
import resource
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from training_process import RunEnded, TrainingProcess, read_records

from distribuuuu.checkpoint.io import CheckpointError, read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager, position_of
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
# Seconds that a run gets to end after a signal or the death of a process.
GONE_S = 30.0
POLL_S = 0.01
# What the console, the records and the curves may grow by while the disk is full.
ROOM = 1 << 16
# In a traceback: it is torchrun's own, which prints one however its processes end.
TORCHRUN = ("<frozen runpy>", "torch/distributed/run.py", "torch/distributed/elastic")
HEADER = (
    f"{'run':>3} {'no':>3}  {'event':<17} {'start':<24} {'phase':<10} {'survived':<8} {'gone s':>6} {'reached':>7} "
    f"{'left':>5} {'lost':>4} {'of it unavoidable':>17} {'allowed':>7}"
)


@dataclass
class Event:
    """One event, what it hit and what came of it. Positions are counted in steps of the whole run.

    Attributes:
        start: the launcher and the loader workers of the start that was hit.
        reached: the steps done when it was over.
        left: the position of the newest whole checkpoint after it.
        unavoidable: the lost steps that no training could have kept.
        seconds: how long it took until no process was left; None: the same process went on.
        problems: the rules that were broken.
        said: what the start that was hit has printed.
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
    said: str = ""

    @property
    def lost(self) -> int:
        """How many steps had to be done again."""
        return self.reached - self.left

    @property
    def allowed(self) -> int:
        """How many steps may be lost beyond the unavoidable ones."""
        return 0 if self.name in SIGNALS or self.name == "disk full" else EVERY_STEPS

    def __str__(self) -> str:
        seconds = "-" if self.seconds is None else f"{self.seconds:.1f}"
        return (
            f"{self.run:>3} {self.number:>3}  {self.name:<17} {self.start:<24} {self.phase:<10} "
            f"{'yes' if self.survived else 'NO':<8} {seconds:>6} {self.reached:>7} {self.left:>5} {self.lost:>4} "
            f"{self.unavoidable:>17} {self.allowed:>7}"
        )


class Progress:
    """How far a run has come, by what is on disk.

    Args:
        out_dir: the OUT_DIR of the run.
        num_steps: steps of an epoch.
    """

    def __init__(self, out_dir: Path, num_steps: int):
        self.out_dir = out_dir
        self.num_steps = num_steps
        self._checkpoints = CheckpointManager(out_dir)

    def of_record(self, record: dict) -> int:
        """Return the steps that were done at a record."""
        return (record["epoch"] - 1) * self.num_steps + record["step"]

    def of_file(self, path: Path) -> int:
        """Return the steps that were done at a checkpoint."""
        epoch, step = position_of(path)
        return epoch * self.num_steps + step

    def newest(self) -> Path | None:
        """Return the newest checkpoint by its name."""
        return (self._checkpoints.list() or [None])[-1]

    def whole(self) -> list[Path]:
        """Return the checkpoints that can be read, oldest first, as far back as the two newest of them."""
        found: list[Path] = []
        for path in reversed(self._checkpoints.list()):
            try:
                read_checkpoint(path)
            except CheckpointError:
                continue
            found.insert(0, path)
            if len(found) == 2:
                break
        return found

    def saved(self) -> int:
        """Return the position of the newest whole checkpoint."""
        return self.of_file(self.whole()[-1]) if self.whole() else 0

    def find_problem_of_best(self) -> str | None:
        """Return what is wrong if the best weights are older than those the newest whole checkpoint knows of."""
        if not self.whole():
            return None
        known = read_checkpoint(self.whole()[-1])["best_epoch"]
        best = self._checkpoints.bests["raw"]
        there = read_checkpoint(best)["epoch"] if best.exists() else -1
        return f"best.pth.tar is of epoch {there + 1}, but the best was {known + 1}" if there < known else None


def strike(event: Event, run: TrainingProcess, progress: Progress, rng: random.Random) -> None:
    """Do to the run what the event says and wait until it is over; note the time, the cost and the problems."""
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
    note_cost(event, run, progress, rng)


def fill_disk(event: Event, run: TrainingProcess, progress: Progress, rng: random.Random) -> None:
    """Let the run do some steps on a full disk; for 'disk full' make room and wait for a checkpoint."""
    whole = progress.newest()
    files = [path for path in progress.out_dir.rglob("*") if path.is_file() and ".pth.tar" not in path.name]
    limit = max(path.stat().st_size for path in [*files, Path(f"{run.out_dir}.console")]) + ROOM
    if limit >= whole.stat().st_size:
        raise RuntimeError("the records have outgrown a checkpoint, no limit is between them; fewer --events a run")
    before = progress.of_record(run.records()[-1])
    run.limit_files(limit)
    most = progress.of_record(run.records()[-1])
    enough = before + rng.randint(4, 16)
    try:
        wait_slowly(run, lambda: progress.of_record(run.records()[-1]) >= enough)
        if progress.of_file(progress.newest()) > most:
            event.problems.append("the disk did not refuse a checkpoint")
        event.reached = progress.of_record(run.records()[-1])
        event.unavoidable = event.reached - before
        if event.name != "disk full":
            return
        run.limit_files(resource.RLIM_INFINITY)
        lifted = progress.of_record(run.records()[-1])
        wait_slowly(run, lambda: progress.of_file(progress.newest()) > lifted)
    except RunEnded as error:
        raise RuntimeError(f"a full disk ended the run, {error}:\n{run.last_lines()}") from error
    event.reached = event.left = progress.of_record(run.records()[-1])
    event.unavoidable = 0
    event.survived = True
    event.said = run.said_since_start()
    check_words(event)
    late = progress.of_file(progress.newest()) - lifted
    if late > 2 * EVERY_STEPS:
        event.problems.append(f"the first checkpoint after the disk was full came {late} steps late")


def wait_slowly(run: TrainingProcess, condition) -> None:
    """Wait for a condition that reads files: without taking the processor from the run that makes it true."""
    run.wait_for(lambda: condition() or time.sleep(POLL_S))


def check_end(event: Event, run: TrainingProcess, status: int | None) -> None:
    """Note what is wrong with the exit status and with what was printed."""
    event.said = run.said_since_start()
    signum = SIGNALS.get(event.name)
    under_torchrun = event.launcher == "torchrun" and event.processes > 1
    expected = STATUS_OF[signum] if signum else -signal.SIGKILL
    if event.name == "kill -9 rank" and event.processes > 1:
        expected = 128 + signal.SIGKILL
    if (not status) if under_torchrun else (status != expected):
        event.problems.append(f"exit status {status} instead of {'any but 0' if under_torchrun else expected}")
    check_words(event)


def check_words(event: Event) -> None:
    """Note a traceback on the console that is not torchrun's."""
    for part in event.said.split("Traceback (most recent call last)")[1:]:
        lines = part.splitlines()[1:]
        end = next(
            (number for number, line in enumerate(lines) if not re.match(r"\s|\[rank\d+\]:\s", line)), len(lines)
        )
        if not any(mark in "\n".join(lines[:end]) for mark in TORCHRUN):
            event.problems.append(f"a traceback: {lines[end] if end < len(lines) else '?'}")


def note_cost(event: Event, run: TrainingProcess, progress: Progress, rng: random.Random) -> None:
    """Note the position reached and the newest whole checkpoint; for 'truncate' break the newest one before."""
    records = run.records()
    if records:
        reached = progress.of_record(records[-1])
        if event.name in FULL_DISKS:  # the disk was full until the end
            event.unavoidable += reached - event.reached
        event.reached = reached
    if event.name == "truncate" and progress.whole():
        *older, newest = progress.whole()
        event.unavoidable = progress.of_file(newest) - (progress.of_file(older[-1]) if older else 0)
        with open(newest, "r+b") as file:
            file.truncate(rng.randrange(newest.stat().st_size))
    event.left = progress.saved()
    if event.lost - event.unavoidable > event.allowed:
        event.problems.append(f"{event.lost - event.unavoidable} steps lost, allowed are {event.allowed}")


def phase_of(run: TrainingProcess) -> str:
    """Return what a run is doing."""
    if not run.records():
        return "start"
    if run.temporary_file():
        return "save"
    return "evaluation" if run.is_evaluating() else "steps"


def positions(out_dir: Path) -> list[tuple]:
    """Return what the records of a run are about, without what they measured."""
    return [(record["kind"], record["epoch"], record["step"]) for record in read_records(out_dir)]
