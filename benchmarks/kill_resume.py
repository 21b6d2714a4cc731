#!/usr/bin/env python3
"""Prove that an interrupted run ends with the same bits as an uninterrupted one.

A small model is trained on JPEGs through `tools/train_net.py` once in peace. Then again, with SIGKILL to all its
processes at random moments of its start, its steps, its saves and its evaluations, and another number of loader workers
after each. At the end every tensor of both runs' checkpoints and best weights, every other value in them and every
record of metrics.jsonl must be equal, and no kill may have cost more steps than lie between two checkpoints.

KEY VALUE words replace the model, e.g. `MODEL.ARCH timm/test_efficientnet MODEL.KWARGS.drop_rate 0.2`.
"""

import argparse
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from machine import describe_run
from PIL import Image
from same_runs import check_best, compare_runs
from training_process import RunEnded, TrainingProcess, read_records

TRAIN_NET = str(Path(__file__).resolve().parents[1] / "tools" / "train_net.py")
MODEL = ["MODEL.ARCH", "resnet8", "MODEL.KWARGS.width", "8"]
SETTINGS = (
    "MODEL.NUM_CLASSES 3 TRAIN.IM_SIZE 32 TRAIN.PRINT_FREQ 1 TEST.IM_SIZE 36 TEST.BATCH_SIZE 1 DATA.CROP_SCALE [0.5,1] "
    "OPTIM.BASE_LR 0.05 OPTIM.WARMUP_EPOCHS 1 OPTIM.LR_UPDATE step CHECKPOINT.EVERY_STEPS 2 "
    "CHECKPOINT.KEEP_EVERY 1 RNG_SEED 7"
)
EVERY_STEPS = 2
NUM_IMAGES = {"train": 90, "val": 37}
CLASSES = ("blue", "green", "red")
WORKERS = (0, 1, 2, 3)
AIMS = ("start", "steps", "save", "evaluation", "end save")


@dataclass
class Kill:
    """One kill: the phase it hit, the steps done by then (None: none yet), and after how many the run went on."""

    phase: str
    workers: int
    before: int | None
    resumed: int | None = None

    @property
    def lost(self) -> int:
        """How many steps had to be done again; a start without a step loses none."""
        return 0 if self.before is None else self.before - self.resumed

    def __str__(self) -> str:
        before = "-" if self.before is None else self.before
        return f"{self.phase:<11} {self.workers:>7} {before:>14} {self.resumed:>14} {self.lost:>11}"


@dataclass(frozen=True)
class Durations:
    """How long the phases of the uninterrupted run took, in seconds."""

    start: float
    step: float
    evaluation: float

    def __str__(self) -> str:
        step_ms, evaluation_ms = 1e3 * self.step, 1e3 * self.evaluation
        return f"start {self.start:.1f} s, step {step_ms:.0f} ms, evaluation {evaluation_ms:.0f} ms"


def draw_images(folder: Path) -> None:
    """Draw JPEGs of noise, each class with a tint, into folder/SPLIT/CLASS."""
    rng = random.Random(0)
    for split, number in NUM_IMAGES.items():
        for index in range(number):
            name = CLASSES[index % len(CLASSES)]
            tint = [10 * (name == other) for other in ("red", "green", "blue")]
            noise = Image.frombytes("RGB", (12, 10), rng.randbytes(360)).resize((48, 40))
            image = Image.blend(noise, Image.new("RGB", noise.size, tuple(100 + value for value in tint)), 0.5)
            path = folder / split / name / f"{index:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path, quality=90)


class Experiment:
    """The commands of the runs, and the moments to kill them at."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args = args
        self.folder = folder
        self.rng = random.Random(args.seed)
        self.num_steps = NUM_IMAGES["train"] // args.batch

    def start(self, name: str, workers: int) -> TrainingProcess:
        """Start the training into folder/name, or start it again."""
        args, out_dir = self.args, self.folder / name
        launcher = [sys.executable]
        if args.processes > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.processes}"]
        words = [*SETTINGS.split(), *(args.words or MODEL), "TRAIN.DATASET", str(self.folder / "data")]
        words += ["TRAIN.WORKERS", str(workers), "OPTIM.MAX_EPOCH", str(args.epochs), "OUT_DIR", str(out_dir)]
        words += ["TRAIN.GLOBAL_BATCH_SIZE", str(args.batch)]
        return TrainingProcess([*launcher, TRAIN_NET, *words], out_dir, self.num_steps)

    def run_in_peace(self, name: str, workers: int) -> Durations:
        """Train to the end; return how long the phases took.

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

    def wait_for_moment(self, aim: str, run: TrainingProcess, durations: Durations) -> None:
        """Wait for a random moment of the phase aimed at."""
        if aim == "start":
            moment = time.time() + self.rng.uniform(0.05, 1) * durations.start
            run.wait_for(lambda: time.time() > moment)
            return
        run.wait_for(run.records)
        if aim == "steps":
            number = self.rng.randint(1, self.num_steps)
            run.wait_for(lambda: len(run.records()) >= number)
            time.sleep(self.rng.uniform(0, durations.step))
        elif aim == "evaluation":
            self.wait_for_evaluation(run, durations.evaluation)
        else:
            self.wait_for_save(run, aim)

    def wait_for_save(self, run: TrainingProcess, aim: str) -> None:
        """Freeze the run while it writes a file: inside an epoch, at its end, or the best weights."""
        passed = {"save": self.num_steps // EVERY_STEPS, "end save": 1, "best save": 0}[aim]
        passed, seen = self.rng.randint(0, passed), set()

        def has_come() -> bool:
            name = run.temporary_file() or ""
            if name and (aim == "save" or name.startswith(".best") or aim == "end save" and "_step_" not in name):
                seen.add(name)
                return len(seen) > passed
            return False

        while True:
            run.wait_for(has_come)
            run.freeze()
            if has_come():
                return
            run.thaw()

    def wait_for_evaluation(self, run: TrainingProcess, evaluation_s: float) -> None:
        """Freeze the run at a random moment of an evaluation."""
        while True:
            run.wait_for(run.is_evaluating)
            time.sleep(self.rng.uniform(0, evaluation_s))
            run.freeze()
            if run.is_evaluating():
                return
            run.thaw()

    def kill_many(self, name: str, durations: Durations) -> list[Kill]:
        """Start and kill the run, over and over, then let it finish; return the kills.

        Raises:
            RuntimeError: the run ended before its last kill, or failed, or a kill has cost the best weights.
        """
        aims = [AIMS[number % len(AIMS)] for number in range(self.args.kills - 1)]
        self.rng.shuffle(aims)
        aims.insert(0, "best save")  # only the first epoch is sure to be the best so far
        kills: list[Kill] = []
        print("\nkill  phase hit   workers   steps before  resumed after  steps lost")
        for aim in aims:
            workers = self.rng.choice([number for number in WORKERS if not kills or number != kills[-1].workers])
            run = self.start(name, workers)
            try:
                self.wait_for_moment(aim, run, durations)
            except RunEnded as error:
                raise RuntimeError(f"the run ended after {len(kills)} kills, {error}; more --epochs?") from error
            finally:
                run.kill()
            before = self.note_resumption(kills, run.records())
            kills.append(Kill(self.phase_of(run), workers, before))
            check_best(run.out_dir)
        last = self.start(name, self.rng.choice(WORKERS))
        last.finish()
        self.note_resumption(kills, last.records())
        return kills

    def note_resumption(self, kills: list[Kill], records: list[dict]) -> int | None:
        """Complete the kills before this start by its first record and show them; return the steps done by its last."""
        if not records:
            return None
        for number, kill in enumerate(kills, 1):
            if kill.resumed is None:
                kill.resumed = self.position_of(records[0]) - (records[0]["kind"] == "train")
                print(f"{number:>4}  {kill}", flush=True)
        return self.position_of(records[-1])

    def position_of(self, record: dict) -> int:
        """Return the steps that the run had done at a record."""
        return (record["epoch"] - 1) * self.num_steps + record["step"]

    def phase_of(self, run: TrainingProcess) -> str:
        """Return the phase that a killed run was in, by what it left behind."""
        records = run.records()
        if not records:
            return "start"
        if run.temporary_file():
            name = run.temporary_file()
            return "best save" if name.startswith(".best") else "save" if "_step_" in name else "end save"
        if records[-1]["kind"] == "eval":
            return "epoch's end"
        return "evaluation" if run.is_evaluating() else "steps"


def judge(kills: list[Kill], folder: Path) -> bool:
    """Print the verdict; return whether both runs are the same and no kill has cost too much."""
    different, num_tensors = compare_runs(folder / "peaceful", folder / "killed")
    most = max((kill.lost for kill in kills), default=0)
    phases = sorted({kill.phase for kill in kills})
    print(f"\n{len(kills)} kills in {', '.join(f'{sum(k.phase == p for k in kills)} x {p}' for p in phases)}")
    print(f"steps lost by a kill: at most {most}; {EVERY_STEPS} lie between two checkpoints")
    print(f"{num_tensors} tensors and {len(read_records(folder / 'killed'))} records compared: "
          f"{'all equal' if not different else f'{len(different)} DIFFERENCES'}")  # fmt: skip
    for difference in different[:20]:
        print(f"  {difference}")
    return not different and most <= EVERY_STEPS


def main() -> int:
    """Run both trainings and compare; return 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="KEY VALUE", help=f"the model (default: {' '.join(MODEL)})")
    parser.add_argument("--kills", type=int, default=20, help="how often to kill")
    parser.add_argument("--processes", type=int, default=1, help="training processes; above 1 under torchrun")
    parser.add_argument("--epochs", type=int, default=16, help="epochs of the run")
    parser.add_argument("--batch", type=int, default=8, help=f"images a step, of {NUM_IMAGES['train']} an epoch")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and worker counts")
    parser.add_argument("--folder", type=Path, help="where to keep all files; default: a temporary folder")
    args = parser.parse_intermixed_args()
    if args.folder and args.folder.exists():
        parser.error(f"--folder {args.folder}: is there already; name a new one")
    print(describe_run())
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        started = time.time()
        draw_images(folder / "data")
        experiment = Experiment(args, folder)
        try:
            durations = experiment.run_in_peace("peaceful", workers=2)
            print(f"uninterrupted: {args.epochs} epochs of {experiment.num_steps} steps; {durations}")
            same = judge(experiment.kill_many("killed", durations), folder)
        except RuntimeError as error:
            print(f"FAILED: {error}")
            return 1
        print(f"{'interrupted = uninterrupted' if same else 'NOT THE SAME'}, {time.time() - started:.0f} s in all")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
