#!/usr/bin/env python3
"""Disturb small trainings in every way, at random moments, and prove that nothing is lost and no bit is changed.

Each run is a small model trained on JPEGs through `tools/train_net.py`. Each event disturbs it, in its start or later;
if that ends it, the same command is started again with another number of loader workers. When the events are spent the
run finishes, and is compared with one left in peace. The runs take turns:

1. one process; 2. two under --nproc; 3. two under torchrun: the last checkpoint, the best weights, all checkpoints of
   epochs and all records of metrics.jsonl equal those of the undisturbed run of as many processes, bit by bit;
4. one, two or three processes, another number each start: the last weights are those of the undisturbed run of one
   process up to rounding (rtol = atol = 1e-5), and every step is recorded once. Rounding grows with the learning rate,
   because a ReLU that flips changes the gradient at once; so this run has a small one, and a norm of each image alone.

What an event may cost, in steps recorded before it that the next start does again; E is CHECKPOINT.EVERY_STEPS:

- SIGTERM, SIGINT, SIGUSR1 (to the launcher; "to all": to every process, loader workers included): 0.
- kill -9 of a rank, the launcher or all: E.
- truncate (kill -9 of all, then the newest checkpoint is cut off somewhere): E, and the steps between the file that was
  cut, which cannot be avoided, and the newest whole one.
- disk full (no file may grow to the size of a checkpoint, for some steps): 0, the same process goes on, and after the
  disk has room again it writes a checkpoint within 2 E steps.
- full, kill -9 all: E, and the steps made while it was full, which cannot be avoided.

After each event no process may be left after 30 s, the exit status must be that of the event, no traceback may be
printed, the best weights must be those that the newest checkpoint knows of or newer, and the next start must go on from
the newest whole checkpoint. Linux only.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from chaos_events import EVERY_STEPS, HEADER, NAMES, positions
from chaos_run import NUM_STEPS, DisturbedRun, Trainings
from machine import describe_run
from same_runs import compare_runs

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.checkpoint.manager import checkpoint_name

TOLERANCE = 1e-5
# Of a run: enough that its last event comes before its end.
SPARE_EPOCHS = 8
EPOCHS_PER_EVENT = 2


def compare(run: DisturbedRun, reference: Path) -> tuple[bool, str]:
    """Return whether a run is as it should be beside the undisturbed one, and a line that says so."""
    last = checkpoint_name(run.trainings.epochs, 0)
    if run.any_world:
        return compare_roughly(reference, run.out_dir, f"checkpoints/{last}")
    different, num_tensors = compare_runs(reference, run.out_dir)
    missing = {line: line.split()[0] for line in different if line.endswith("is only in one of them")}
    excused = [line for line, name in missing.items() if name not in (last, "best.pth.tar") and run.may_lack(name)]
    for line in excused:
        print(f"  note: {line}: it is of the middle of an epoch, or the disk was full; not compared")
    different = [line for line in different if line not in excused]
    if not different:
        return True, f"identical: yes, {num_tensors} tensors and {len(positions(reference))} records compared"
    return False, "\n".join(["identical: NO", *(f"  {line}" for line in different[:20])])


def compare_roughly(reference: Path, out_dir: Path, last: str) -> tuple[bool, str]:
    """Return whether two runs end with the same weights up to rounding and recorded the same steps, and a line."""
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
    """Return by how much two state dicts differ at most."""
    return max((one[key].double() - other[key].double()).abs().max().item() for key in one)


def main() -> int:
    """Disturb and compare all runs; return 1 if anything was lost or is different."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=60, help="how often to disturb, over all runs")
    parser.add_argument("--runs", type=int, default=4, help="how many trainings to disturb")
    parser.add_argument("--seed", type=int, default=1, help="of the events, moments and worker counts")
    parser.add_argument("--folder", type=Path, help="where to keep all files; default: a temporary folder")
    args = parser.parse_args()
    if args.folder and args.folder.exists():
        parser.error(f"--folder {args.folder}: is there already; name a new one")
    if not 1 <= args.runs <= args.events:
        parser.error("--runs: at least 1, and at least one event each")
    print(describe_run())
    started = time.time()
    with tempfile.TemporaryDirectory() as temporary:
        sound = disturb_all(args, args.folder or Path(temporary))
    print(f"{time.time() - started:.0f} s in all")
    return 0 if sound else 1


def disturb_all(args: argparse.Namespace, folder: Path) -> bool:
    """Run everything and print it; return whether nothing was lost and nothing is different."""
    names = draw_names(args.events, args.seed)
    epochs = SPARE_EPOCHS + EPOCHS_PER_EVENT * -(-args.events // args.runs)
    trainings = Trainings(folder, epochs)
    print(f"{epochs} epochs of {NUM_STEPS} steps; checkpoints: EVERY_STEPS {EVERY_STEPS}\n{HEADER}")
    runs, verdicts = [], []
    for number in range(1, args.runs + 1):
        runs.append(DisturbedRun(number, names[number - 1 :: args.runs], trainings, args.seed))
        try:
            reference, start_s = trainings.run_in_peace(runs[-1].kind)
            runs[-1].go(start_s)
            same, line = compare(runs[-1], reference)
        except RuntimeError as error:
            same, line = False, f"FAILED: {error}"
        verdicts.append(same)
        print(f"run {number}: {line}", flush=True)
    events = [event for run in runs for event in run.events]
    num_lost = args.events - sum(event.survived for event in events)
    most = max((event.lost - event.unavoidable for event in events), default=0)
    num_broken = sum(bool(event.problems) for event in events)
    print(f"events with a broken rule: {num_broken}")
    print(f"{args.events} events over {args.runs} runs: {num_lost} lost, {verdicts.count(False)} different, "
          f"at most {most} steps lost (allowed {EVERY_STEPS})")  # fmt: skip
    return all(verdicts) and not num_lost and not num_broken


def draw_names(number: int, seed: int) -> list[str]:
    """Return what the events are: each kind equally often, in random order."""
    rng, names = random.Random(seed), []
    while len(names) < number:
        names += rng.sample(NAMES, len(NAMES))
    return names[:number]


if __name__ == "__main__":
    sys.exit(main())
