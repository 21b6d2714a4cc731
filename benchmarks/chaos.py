#!/usr/bin/env python3
"""Inject faults into small trainings at random moments and check that no step and no bit is lost.

Each run trains a small model on JPEGs through `tools/train_net.py`. Each event is a fault during start-up or later. If
it ends the run, the same command is started again with another number of loader workers. After its last event the run
finishes and is compared with an uninterrupted run. The kinds of run alternate:

1. one process; 2. two under --nproc; 3. two under torchrun: the last checkpoint, the best weights, all checkpoints of
   epochs and all records of metrics.jsonl are bitwise equal to those of the uninterrupted run on as many processes;
4. one, two or three processes, another number at each start: the last weights equal those of the uninterrupted run of
   one process up to rounding (rtol = atol = 1e-5), and every step is recorded once. Rounding errors grow with the
   learning rate, because a ReLU that switches changes the gradient; so this run has a small one, and group norm.

Limits on lost steps, which are recorded before the event and repeated by the next start; E is CHECKPOINT.EVERY_STEPS:

- SIGTERM, SIGINT, SIGUSR1 (to the launcher; "to all": to every process, loader workers included): 0.
- kill -9 of a rank, the launcher or all: E.
- truncate (kill -9 of all, then the newest of several checkpoints is truncated; a run whose only one is damaged does
  not start): E, plus the unavoidable steps between the truncated file and the newest valid one.
- disk full (for some steps no file may grow to the size of a checkpoint): 0, the same process continues and writes a
  checkpoint within 2 E steps after the disk has space again.
- full, kill -9 all: E, plus the unavoidable steps made while the disk was full.

After each event no process may be left after 30 s, the exit status must be that of the event, no traceback may be
printed, the best weights must be at least as new as the newest checkpoint says, and the next start must resume from the
newest valid checkpoint. Linux only.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_support.chaos_events import EVERY_STEPS, HEADER, NAMES, positions
from bench_support.chaos_run import NUM_STEPS, DisturbedRun, Trainings
from bench_support.machine import describe_run
from bench_support.same_runs import compare_runs

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.checkpoint.manager import checkpoint_name

TOLERANCE = 1e-5
# Enough epochs that the last event of a run comes before its end.
SPARE_EPOCHS = 8
EPOCHS_PER_EVENT = 2


def compare(run: DisturbedRun, reference: Path) -> tuple[bool, str]:
    """Compare a run with the uninterrupted one; return whether it is as expected, and a line for the report."""
    last = checkpoint_name(run.trainings.epochs, 0)
    if run.any_world:
        return compare_roughly(reference, run.out_dir, f"checkpoints/{last}")
    different, num_tensors = compare_runs(reference, run.out_dir)
    missing = {line: line.split()[0] for line in different if line.endswith("exists in one run only")}
    excused = [line for line, name in missing.items() if name not in (last, "best.pth.tar") and run.may_lack(name)]
    for line in excused:
        print(f"  note: {line}: saved within an epoch, or the disk was full; not compared")
    different = [line for line in different if line not in excused]
    if not different:
        return True, f"identical: yes, {num_tensors} tensors and {len(positions(reference))} records compared"
    return False, "\n".join(["identical: NO", *(f"  {line}" for line in different[:20])])


def compare_roughly(reference: Path, out_dir: Path, last: str) -> tuple[bool, str]:
    """Compare the last weights of two runs up to rounding, and their recorded steps; return as `compare`."""
    one, other = (read_checkpoint(folder / last)["state_dict"] for folder in (reference, out_dir))
    first = read_checkpoint(reference / "checkpoints" / checkpoint_name(1, 0))["state_dict"]
    close = all(torch.allclose(one[key], other[key], rtol=TOLERANCE, atol=TOLERANCE) for key in one)
    steps = positions(reference) == positions(out_dir)
    return close and steps, (
        f"equal up to rounding: {'yes' if close else 'NO'}, {len(one)} tensors, largest difference "
        f"{largest_difference(one, other):.1e}; they moved by {largest_difference(one, first):.1e}"
        f" since epoch 1; the records are of the same steps: {'yes' if steps else 'NO'}"
    )


def largest_difference(one: dict, other: dict) -> float:
    """Return the largest absolute difference of two state dicts."""
    return max((one[key].double() - other[key].double()).abs().max().item() for key in one)


def main() -> int:
    """Disturb and compare all runs; return 1 if anything is lost or different."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=60, help="number of events over all runs")
    parser.add_argument("--runs", type=int, default=4, help="number of runs")
    parser.add_argument("--compile", nargs="?", const="default", default="none", help="MODEL.COMPILE; default: none")
    parser.add_argument("--seed", type=int, default=1, help="of events, moments and worker counts")
    parser.add_argument("--folder", type=Path, help="folder for all files (default: a temporary folder)")
    args = parser.parse_args()
    if args.folder and args.folder.exists():
        parser.error(f"--folder {args.folder}: exists already; fix: name a new folder")
    if not 1 <= args.runs <= args.events:
        parser.error("--runs: expected at least 1, and at least one event per run")
    print(describe_run())
    started = time.time()
    with tempfile.TemporaryDirectory() as temporary:
        passed = disturb_all(args, args.folder or Path(temporary))
    print(f"{time.time() - started:.0f} s in total")
    return 0 if passed else 1


def disturb_all(args: argparse.Namespace, folder: Path) -> bool:
    """Run and print everything; return whether nothing is lost and nothing different."""
    names = draw_names(args.events, args.seed)
    epochs = SPARE_EPOCHS + EPOCHS_PER_EVENT * -(-args.events // args.runs)
    trainings = Trainings(folder, epochs, args.compile)
    print(f"{epochs} epochs of {NUM_STEPS} steps; checkpoints: EVERY_STEPS {EVERY_STEPS}\n{HEADER}")
    runs, verdicts = [], []
    for number in range(1, args.runs + 1):
        runs.append(DisturbedRun(number, names[number - 1 :: args.runs], trainings, args.seed))
        try:
            reference, start_s = trainings.run_uninterrupted(runs[-1].kind)
            runs[-1].run(start_s)
            same, line = compare(runs[-1], reference)
        except RuntimeError as error:
            same, line = False, f"FAILED: {error}"
        verdicts.append(same)
        print(f"run {number}: {line}", flush=True)
    events = [event for run in runs for event in run.events]
    num_lost = args.events - sum(event.survived for event in events)
    most = max((event.lost - event.unavoidable for event in events), default=0)
    num_broken = sum(bool(event.problems) for event in events)
    print(f"events that violate a rule: {num_broken}")
    print(f"{args.events} events over {args.runs} runs: {num_lost} lost, {verdicts.count(False)} different, "
          f"at most {most} steps lost (allowed {EVERY_STEPS})")  # fmt: skip
    return all(verdicts) and not num_lost and not num_broken


def draw_names(number: int, seed: int) -> list[str]:
    """Return the names of the events: each equally often, in random order."""
    rng, names = random.Random(seed), []
    while len(names) < number:
        names += rng.sample(NAMES, len(NAMES))
    return names[:number]


if __name__ == "__main__":
    sys.exit(main())
