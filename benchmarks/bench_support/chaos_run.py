"""Runs of chaos.py: their commands, starts and events."""

import random
import sys
import time
from pathlib import Path

from bench_support.chaos_events import EVERY_STEPS, FULL_DISKS, Event, Progress, inject, phase_of, wait_polling
from bench_support.small_training import COMPILED_HANGS_AFTER_S, NUM_IMAGES, SETTINGS, TRAIN_NET, WORKERS, draw_images
from bench_support.training_process import HANGS_AFTER_S, RunEnded, TrainingProcess, read_records

BATCH = 6
NUM_STEPS = NUM_IMAGES["train"] // BATCH
# Wide enough that a checkpoint is larger than all records of a run.
MODEL = f"MODEL.ARCH resnet8 MODEL.KWARGS.width 16 TRAIN.GLOBAL_BATCH_SIZE {BATCH} CHECKPOINT.EVERY_STEPS {EVERY_STEPS}"
SAME_FOR_ANY_WORLD = "MODEL.KWARGS.norm group OPTIM.BASE_LR 0.00003"
# The launcher of each kind of run, and the numbers of processes of its starts.
KINDS = (("python", (1,)), ("--nproc", (2,)), ("torchrun", (2,)), ("--nproc", (1, 2, 3)))
# The maximum number of steps of a start before an event, and the share of events during start-up.
MAX_STEPS = 12
SHARE_AT_START = 0.25
# Seconds before which a signal would hit the bare interpreter.
PYTHON_STARTS_S = 0.5


class Trainings:
    """The commands of all runs.

    Args:
        folder: the folder of the images and runs.
        epochs: epochs of a run.
        compile_mode: MODEL.COMPILE.
    """

    def __init__(self, folder: Path, epochs: int, compile_mode: str = "none"):
        self.compile_mode = compile_mode
        self.folder = folder
        self.epochs = epochs
        self._start_s: dict[str, float] = {}
        draw_images(folder / "data")

    def start(self, name: str, launcher: str, processes: int, workers: int, overrides: str) -> TrainingProcess:
        """Start or resume the training in folder/name."""
        out_dir, before, flags = self.folder / name, [], []
        if processes > 1 and launcher == "torchrun":
            before = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        elif processes > 1:
            flags = ["--nproc", str(processes)]
        settings = dict(zip(*[iter([*SETTINGS.split(), *MODEL.split(), *overrides.split()])] * 2, strict=True))
        settings |= {"TRAIN.DATASET": str(self.folder / "data"), "TRAIN.WORKERS": str(workers)}
        settings |= {"OPTIM.MAX_EPOCH": str(self.epochs), "OUT_DIR": str(out_dir)}
        settings |= {} if self.compile_mode == "none" else {"MODEL.COMPILE": self.compile_mode, "TEST.BATCH_SIZE": "2"}
        command = [sys.executable, *before, TRAIN_NET, *flags, *(word for pair in settings.items() for word in pair)]
        timeout_s = HANGS_AFTER_S if self.compile_mode == "none" else COMPILED_HANGS_AFTER_S
        return TrainingProcess(command, out_dir, NUM_STEPS, timeout_s)

    def run_uninterrupted(self, kind: int) -> tuple[Path, float]:
        """Train without events, once per kind; return the OUT_DIR and the seconds until the first step."""
        processes, overrides = KINDS[kind][1], SAME_FOR_ANY_WORLD if len(KINDS[kind][1]) > 1 else ""
        name = f"uninterrupted{processes[0]}{'any' if overrides else ''}"
        if name not in self._start_s:
            started = time.time()
            self.start(name, "--nproc", processes[0], 2, overrides).finish()
            self._start_s[name] = read_records(self.folder / name)[0]["time"] - started
        return self.folder / name, self._start_s[name]


class DisturbedRun:
    """A run with its events and starts.

    Args:
        number: the number of the run, from 1.
        names: the names of its events.
        trainings: the commands.
        seed: of moments, worker counts and numbers of processes.
    """

    def __init__(self, number: int, names: list[str], trainings: Trainings, seed: int):
        self.number = number
        self.names = names
        self.trainings = trainings
        self.rng = random.Random(f"{seed} {number}")
        self.kind = (number - 1) % len(KINDS)
        self.launcher, self.sizes = KINDS[self.kind]
        self.any_world = len(self.sizes) > 1
        self.overrides = SAME_FOR_ANY_WORLD if self.any_world else ""
        self.out_dir = trainings.folder / f"run{number}"
        self.progress = Progress(self.out_dir, NUM_STEPS)
        self.events: list[Event] = []
        self.full: list[range] = []
        self._left = self._workers = self._processes = 0
        self._pending: list[Event] = []
        self._seen: set[str] = set()

    def run(self, start_s: float) -> None:
        """Inject all events, then let the run finish.

        Raises:
            RuntimeError: a start failed without an event, or the run ended before its last event.
        """
        run = None
        for number, name in enumerate(self.names, 1):
            run = run or self.start_again()
            start = f"{self.launcher if self._processes > 1 else 'python'}, {self._processes} x {self._workers} workers"
            event = Event(self.number, number, name, start, self._processes, self.launcher, reached=self._left)
            self.events.append(event)
            try:
                self.wait_for_moment(event, run, start_s)
                event.phase = phase_of(run)
                inject(event, run, self.progress, self.rng)
                self.record_outcome(event, run)
            except RunEnded as error:
                raise RuntimeError(f"run {self.number}: the start before event {number} ended, {error}:\n"
                                   f"{run.last_lines()}") from error  # fmt: skip
            finally:
                if not event.survived:
                    run.kill()
            run = run if event.survived else None
        run = run or self.start_again()
        try:
            run.finish()
        finally:
            self.record_resumption(run)
            for event in self._pending:  # no start after them made a step
                show(event)

    def start_again(self) -> TrainingProcess:
        """Start the run with another number of workers and, if allowed, of processes."""
        others = [size for size in self.sizes if size != self._processes or len(self.sizes) == 1]
        self._processes = self.rng.choice(others)
        self._workers = self.rng.choice([number for number in WORKERS if number != self._workers])
        return self.trainings.start(self.out_dir.name, self.launcher, self._processes, self._workers, self.overrides)

    def wait_for_moment(self, event: Event, run: TrainingProcess, start_s: float) -> None:
        """Wait for a random moment of start-up, or for a random number of further steps and a part of one."""
        at_start = event.name not in FULL_DISKS and not run.records() and self.rng.random() < SHARE_AT_START
        if at_start:
            start_s *= (1 + self._processes) / (1 + self.sizes[0])
            moment = time.time() + self.rng.uniform(min(PYTHON_STARTS_S, start_s), start_s)
            wait_polling(run, lambda: time.time() > moment)
            if event.name == "kill -9 rank" and self._processes > 1:
                wait_polling(run, lambda: run.has_rank(self._processes - 1))
            return
        enough = len(run.records()) + self.rng.randint(1, MAX_STEPS)
        wait_polling(run, lambda: len(run.records()) >= enough and self.progress.newest())
        time.sleep(self.rng.uniform(0, 0.05))

    def record_outcome(self, event: Event, run: TrainingProcess) -> None:
        """Record the state after an event; events that ended the run are completed by the next start."""
        self.record_resumption(run)
        if event.name in FULL_DISKS:
            self.full.append(range(event.reached - event.unavoidable - MAX_STEPS, event.reached + 2 * EVERY_STEPS))
        problem = self.progress.find_problem_of_best()
        if problem and problem not in self._seen:
            event.problems.append(problem)
            self._seen.add(problem)
        self._left = event.left
        if event.survived:
            show(event)
        else:
            self._pending.append(event)

    def record_resumption(self, run: TrainingProcess) -> None:
        """Complete and print the pending events once a start has made a step, by the position of its first record."""
        records = run.records()
        if not records or not self._pending:
            return
        resumed = self.progress.of_record(records[0]) - (records[0]["kind"] == "train")
        last = self._pending[-1]
        if resumed != last.left:
            last.problems.append(f"the next start resumed from {resumed}, expected {last.left}")
        for event in self._pending:
            event.survived = True
            show(event)
        self._pending.clear()

    def may_lack(self, name: str) -> bool:
        """Tell whether a checkpoint may be missing: saved within an epoch, or while the disk was full."""
        position = self.progress.of_file(Path(name))
        return "_step_" in name or any(position in steps for steps in self.full)


def show(event: Event) -> None:
    """Print an event and its problems."""
    print(event, flush=True)
    for problem in event.problems:
        print(f"      PROBLEM: {problem}")
    if event.problems:
        print("\n".join(f"        | {line}" for line in event.output.splitlines()[-12:]), flush=True)
