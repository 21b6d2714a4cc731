#!/usr/bin/env python3
"""Rate of `distribuuuu predict` relative to the evaluation loop, on the same JPEGs with the same model.

Both load with the same number of workers. The passes alternate in one process; the ratio is the median over the rounds.
Evaluation computes loss and metrics, prediction writes the rows of a CSV file to its journal.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_support.loader_images import make_jpegs
from bench_support.machine import describe_run, show_spread

from distribuuuu.commands.predict.journal import Journal
from distribuuuu.commands.predict.prediction import format_rows, list_columns
from distribuuuu.config import load_cfg
from distribuuuu.data.datasets.table_file import csv_line
from distribuuuu.data.image_file import open_image
from distribuuuu.data.loader import build_loader
from distribuuuu.engine.evaluator import evaluate
from distribuuuu.inference.forward_chunks import list_spans
from distribuuuu.inference.image_arguments import list_images
from distribuuuu.inference.load_run import load_run
from distribuuuu.inference.loaded_run import LoadedRun, Selection
from distribuuuu.launch.detect import Launch
from distribuuuu.models import build_model

# Distinct images; the others are further names of them.
NUM_DISTINCT = 50


def make_images(root: Path, num: int, side: int) -> None:
    """Write `num` JPEGs, with a shorter side of `side` pixels (0: as they are), to root/val/CLASS."""
    make_jpegs(root, min(num, NUM_DISTINCT))
    files = sorted((root / "val").rglob("*.jpg"))
    for file in files if side else ():
        image = open_image(file.read_bytes())
        scale = side / min(image.size)
        image.resize([round(length * scale) for length in image.size]).save(file, quality=90)
    for number in range(len(files), num):
        file = files[number % len(files)]
        os.link(file, file.with_name(f"{number:06d}.jpg"))


def make_run(root: Path, options: argparse.Namespace) -> LoadedRun:
    """Return a model with random weights, saved and loaded as a run."""
    words = {
        "MODEL.ARCH": options.arch,
        "MODEL.NUM_CLASSES": 10,
        "TRAIN.DATASET": root,
        "TRAIN.WORKERS": options.workers,
        "TRAIN.IM_SIZE": options.px,
        "TEST.IM_SIZE": options.px + options.px // 7,
        "OUT_DIR": root / "out",
    }
    cfg = load_cfg(None, [str(word) for pair in words.items() for word in pair])
    (root / "out").mkdir()
    (root / "out" / "config.yaml").write_text(cfg.dump())
    classes = sorted(folder.name for folder in (root / "val").iterdir())
    torch.save({"state_dict": build_model(cfg).state_dict(), "classes": classes}, root / "out" / "best.pth.tar")
    return load_run(root / "out")


def time_evaluation(run: LoadedRun) -> float:
    """Return the seconds of an evaluation."""
    loader = build_loader(run.cfg, Launch("alone"), run.device, train=False)
    start = time.perf_counter()
    evaluate(run.task, run.model, loader)
    return time.perf_counter() - start


def time_prediction(run: LoadedRun, files: list[str], out: Path, options: argparse.Namespace) -> float:
    """Return the seconds of a prediction."""
    spans, selection = list_spans(len(files), run.cfg.TEST.BATCH_SIZE), Selection(topk=5)
    columns = list_columns(selection, len(run.classes))
    journal = Journal(out, {}, csv_line(["path", *columns]))
    start = time.perf_counter()
    loading = options.batch_size, options.workers, "process"
    for predictions in run.predict_chunks(files, spans, selection, *loading):
        journal.append(*format_rows(predictions, columns, is_json=False))
    journal.finish()
    journal.close()
    return time.perf_counter() - start


def main() -> None:
    """Measure, and print the rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--images", type=int, default=20_000)
    add("--side", type=int, default=0, help="shorter side of the JPEGs in pixels; 0: photographs of about 500 x 375")
    add("--arch", default="resnet14")
    add("--px", type=int, default=64, help="side of the crop in pixels")
    add("--workers", type=int, default=2)
    add("--batch-size", type=int, default=32)
    add("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(describe_run())
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make_images(root, options.images, options.side)
        run = make_run(root, options)
        files = list_images([str(root / "val")])
        evaluations, predictions = [], []
        for _ in range(options.rounds):
            evaluations.append(time_evaluation(run))
            predictions.append(time_prediction(run, files, root / "out.csv", options))
            (root / "out.csv").unlink()
    for title, seconds in (("evaluation", evaluations), ("prediction", predictions)):
        print(f"{title}: {options.images / statistics.median(seconds):.1f} images/s")
    ratios = [one / other for one, other in zip(evaluations, predictions, strict=True)]
    print(f"rate of prediction / rate of evaluation: {show_spread(ratios)}")


if __name__ == "__main__":
    if "OMP_WAIT_POLICY" not in os.environ:  # the commands set it too, before torch is imported
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    main()
