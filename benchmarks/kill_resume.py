#!/usr/bin/env python3
"""Check that an interrupted run is bitwise equal to an uninterrupted one.

A small model is trained on JPEGs through `tools/train_net.py` without interruption, then again with SIGKILL to all of
its processes at random moments of start-up, steps, saves and evaluations, and with another number of loader workers
after each kill. In the end all tensors and other values of both runs' checkpoints and best weights and all records of
metrics.jsonl must be equal, and no kill may cost more steps than lie between two checkpoints.

`--compile` trains a compiled model.
KEY VALUE overrides replace the model, e.g. `MODEL.ARCH timm/test_efficientnet MODEL.KWARGS.drop_rate 0.2`.
"""

import argparse
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench_support.machine import describe_run
from bench_support.same_runs import check_best, compare_runs
from bench_support.small_training import COMPILED_HANGS_AFTER_S, NUM_IMAGES, SETTINGS, TRAIN_NET, WORKERS, draw_images
from bench_support.training_process import RunEnded, TrainingProcess, read_records

MODEL = ["MODEL.ARCH", "resnet8", "MODEL.KWARGS.width", "8"]
EVERY_STEPS = 2
# With compiled models: evaluations with a shorter last batch.
COMPILED = "TEST.BATCH_SIZE 2 MODEL.COMPILE"
PHASES = ("start", "steps", "save", "evaluation", "end save")


@dataclass
class Kill:
    """One kill.

    Attributes:
        phase: the phase that was hit.
        workers: the loader workers of the start that was killed.
        before: the steps of the whole run done by then; None: this start had made none.
        resumed: the step after which the next start resumed.
    """

    phase: str
    workers: int
    before: int | None
    resumed: int | None = None

    @property
    def lost(self) -> int:
        """The number of steps that were repeated; a start without a step loses none."""
        return 0 if self.before is None or self.resumed is None else self.before - self.resumed

    def __str__(self) -> str:
        before = "-" if self.before is None else self.before
        return f"{self.phase:<11} {self.workers:>7} {before:>14} {self.resumed:>14} {self.lost:>11}"


@dataclass(frozen=True)
class Durations:
    """Durations of the phases of the uninterrupted run in seconds."""

    start: float
    step: float
    evaluation: float

    def __str__(self) -> str:
        step_ms, evaluation_ms = 1e3 * self.step, 1e3 * self.evaluation
        return f"start {self.start:.1f} s, step {step_ms:.0f} ms, evaluation {evaluation_ms:.0f} ms"


class Experiment:
    """The commands of the runs and the moments of the kills."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args = args
        self.folder = folder
        self.rng = random.Random(args.seed)
        self.num_steps = NUM_IMAGES["train"] // args.batch

    def start(self, name: str, workers: int) -> TrainingProcess:
        """Start or resume the training in folder/name."""
        args, out_dir = self.args, self.folder / name
        launcher = [sys.executable]
        if args.processes > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.processes}"]
        overrides = [*SETTINGS.split(), *(args.overrides or MODEL), "TRAIN.DATASET", str(self.folder / "data")]
        overrides += ["TRAIN.WORKERS", str(workers), "OPTIM.MAX_EPOCH", str(args.epochs), "OUT_DIR", str(out_dir)]
        overrides += ["TRAIN.GLOBAL_BATCH_SIZE", str(args.batch)]
        if args.compile == "none":
            return TrainingProcess([*launcher, TRAIN_NET, *overrides], out_dir, self.num_steps)
        command = [*launcher, TRAIN_NET, *overrides, *COMPILED.split(), args.compile]
        return TrainingProcess(command, out_dir, self.num_steps, COMPILED_HANGS_AFTER_S)

    def run_uninterrupted(self, name: str, workers: int) -> Durations:
        """Train to the end; return the durations of the phases.

        Raises:
            RuntimeError: the training failed.
        """
        started = time.time()
        self.start(name, workers).finish()
        records = read_records(self.folder / name)
        evaluations = [record["seconds"] for record in records if record["kind"] == "eval"]
        end = max(record["time"] for record in records)
        start = records[0]["time"] - started
        step = (end - records[0]["time"] - sum(evaluations)) / (len(records) - len(evaluations))
        return Durations(start, step, sum(evaluations) / len(evaluations))

    def wait_for_moment(self, target: str, run: TrainingProcess, durations: Durations) -> None:
        """Wait for a random moment of the target phase."""
        if target == "start":
            moment = time.time() + self.rng.uniform(0.05, 1) * durations.start
            run.wait_for(lambda: time.time() > moment)
            return
        run.wait_for(run.records)
        if target == "steps":
            number = self.rng.randint(1, self.num_steps)
            run.wait_for(lambda: len(run.records()) >= number)
            time.sleep(self.rng.uniform(0, durations.step))
        elif target == "evaluation":
            self.wait_for_evaluation(run, durations.evaluation)
        else:
            self.wait_for_save(run, target)

    def wait_for_save(self, run: TrainingProcess, target: str) -> None:
        """Suspend the run while it saves a checkpoint within an epoch, at its end, or the best weights."""
        max_skipped = {"save": self.num_steps // EVERY_STEPS, "end save": 1, "best save": 0}[target]
        num_skipped, seen = self.rng.randint(0, max_skipped), set()

        def is_saving() -> bool:
            name = run.temporary_file() or ""
            if name and (target == "save" or name.startswith(".best") or target == "end save" and "_step_" not in name):
                seen.add(name)
                return len(seen) > num_skipped
            return False

        while True:
            run.wait_for(is_saving)
            run.suspend()
            if is_saving():
                return
            run.resume()

    def wait_for_evaluation(self, run: TrainingProcess, evaluation_s: float) -> None:
        """Suspend the run at a random moment of an evaluation."""
        while True:
            run.wait_for(run.is_evaluating)
            time.sleep(self.rng.uniform(0, evaluation_s))
            run.suspend()
            if run.is_evaluating():
                return
            run.resume()

    def kill_many(self, name: str, durations: Durations) -> list[Kill]:
        """Start and kill the run repeatedly, then let it finish; return the kills.

        Raises:
            RuntimeError: the run ended before the last kill, failed, or lost its best weights.
        """
        targets = [PHASES[number % len(PHASES)] for number in range(self.args.kills - 1)]
        self.rng.shuffle(targets)
        targets.insert(0, "best save")  # only the first epoch is certain to be the best so far
        kills: list[Kill] = []
        print("\nkill  phase hit   workers   steps before  resumed after  steps lost")
        for target in targets:
            workers = self.rng.choice([number for number in WORKERS if not kills or number != kills[-1].workers])
            run = self.start(name, workers)
            try:
                self.wait_for_moment(target, run, durations)
            except RunEnded as error:
                raise RuntimeError(f"the run ended after {len(kills)} kills, {error}; fix: more --epochs") from error
            finally:
                run.kill()
            before = self.record_resumption(kills, run.records())
            kills.append(Kill(self.phase_of(run), workers, before))
            check_best(run.out_dir)
        last = self.start(name, self.rng.choice(WORKERS))
        last.finish()
        self.record_resumption(kills, last.records())
        return kills

    def record_resumption(self, kills: list[Kill], records: list[dict]) -> int | None:
        """Complete and print the kills before this start by its first record; return the steps done at its last one."""
        if not records:
            return None
        for number, kill in enumerate(kills, 1):
            if kill.resumed is None:
                kill.resumed = self.position_of(records[0]) - (records[0]["kind"] == "train")
                print(f"{number:>4}  {kill}", flush=True)
        return self.position_of(records[-1])

    def position_of(self, record: dict) -> int:
        """Return the number of steps of the run at a record."""
        return (record["epoch"] - 1) * self.num_steps + record["step"]

    def phase_of(self, run: TrainingProcess) -> str:
        """Return the phase in which a run was killed, according to its files."""
        records = run.records()
        if not records:
            return "start"
        if run.temporary_file():
            name = run.temporary_file()
            return "best save" if name.startswith(".best") else "save" if "_step_" in name else "end save"
        if records[-1]["kind"] == "eval":
            return "epoch's end"
        return "evaluation" if run.is_evaluating() else "steps"


def report(kills: list[Kill], folder: Path) -> bool:
    """Print the comparison; return whether both runs are equal and no kill cost too many steps."""
    different, num_tensors = compare_runs(folder / "uninterrupted", folder / "killed")
    most = max((kill.lost for kill in kills), default=0)
    phases = sorted({kill.phase for kill in kills})
    print(f"\n{len(kills)} kills in {', '.join(f'{sum(k.phase == p for k in kills)} x {p}' for p in phases)}")
    print(f"steps lost per kill: at most {most}; checkpoint interval: {EVERY_STEPS} steps")
    print(f"{num_tensors} tensors and {len(read_records(folder / 'killed'))} records compared: "
          f"{'all equal' if not different else f'{len(different)} DIFFERENCES'}")  # fmt: skip
    for difference in different[:20]:
        print(f"  {difference}")
    return not different and most <= EVERY_STEPS


def main() -> int:
    """Run both trainings and compare them; return 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY VALUE", help=f"the model (default: {' '.join(MODEL)})")
    parser.add_argument("--kills", type=int, default=20, help="number of kills")
    parser.add_argument("--processes", type=int, default=1, help="training processes; above 1 under torchrun")
    parser.add_argument("--epochs", type=int, default=16, help="epochs of the run")
    parser.add_argument("--batch", type=int, default=8, help=f"images per step; an epoch has {NUM_IMAGES['train']}")
    parser.add_argument("--compile", nargs="?", const="default", default="none", help="MODEL.COMPILE; default: none")
    parser.add_argument("--seed", type=int, default=1, help="of moments and worker counts")
    parser.add_argument("--folder", type=Path, help="folder for all files (default: a temporary folder)")
    args = parser.parse_intermixed_args()
    if args.folder and args.folder.exists():
        parser.error(f"--folder {args.folder}: exists already; fix: name a new folder")
    print(describe_run())
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        started = time.time()
        draw_images(folder / "data")
        experiment = Experiment(args, folder)
        try:
            durations = experiment.run_uninterrupted("uninterrupted", workers=2)
            print(f"uninterrupted: {args.epochs} epochs of {experiment.num_steps} steps; {durations}")
            same = report(experiment.kill_many("killed", durations), folder)
        except RuntimeError as error:
            print(f"FAILED: {error}")
            return 1
        verdict = "equal" if same else "NOT EQUAL"
        print(f"interrupted and uninterrupted runs: {verdict}; {time.time() - started:.0f} s in total")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
