"""Predictions of many files, written in the order of the files."""

import contextlib
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from distribuuuu.commands.output import ending_with_reader
from distribuuuu.commands.scan.journal import Journal
from distribuuuu.config.errors import counted
from distribuuuu.data.datasets.file_check import find_reduced
from distribuuuu.data.datasets.table_file import csv_line
from distribuuuu.data.decode import build_decode_options
from distribuuuu.data.image_faults import describe_unread
from distribuuuu.files.untrusted import printable
from distribuuuu.inference.forward_chunks import UnlabeledImages, list_spans
from distribuuuu.inference.load_run import find_run
from distribuuuu.inference.loaded_run import Prediction, Selection, choose_selection
from distribuuuu.records.run_log import LOG_INTERVAL_S, has_progress_bar, progress


def predict_files(job: Namespace) -> int:
    """Predict the files of a job, resuming from its partial output; return the number of broken images.

    Args:
        job: the flags of the command, with `files`, the image files; `out` is a path or None: standard output.

    Raises:
        ConfigError: the run cannot be loaded, an option does not suit it, or the output cannot be written.
    """
    run = find_run(job.run, job.cfg, job.overrides)
    selection = choose_selection(run.cfg, len(run.classes), job.topk, job.threshold)
    spans = list_spans(len(job.files), run.cfg.TEST.BATCH_SIZE)
    columns = list_columns(selection, run.classes)
    header, threshold = ["path", *columns], None if job.precision is None else run.find_threshold(job.precision)
    if threshold is not None:
        header.insert(1, "answer")
        print(f"answers have a probability above {threshold:.6g}", file=sys.stderr)
    out = Journal(job.out, run.hash_job(job.files, *selection, threshold)) if job.out else None
    num_done, num_broken = (out.num_chunks, len(out.broken)) if out else (0, 0)
    if not out:
        print_rows(csv_line(header))
    print(printable(run.describe()), file=sys.stderr)
    images = UnlabeledImages(job.files)
    images.has_files = True
    if reduced := find_reduced(images, build_decode_options(run.cfg)):
        print(printable(reduced), file=sys.stderr)
    left, total = spans[num_done:], len(job.files)
    if done := total - sum(map(len, left)):
        print(f"resumed after {done:,} of {counted(total, 'image')}", file=sys.stderr)
    interval_s = 0.1 if has_progress_bar() else LOG_INTERVAL_S
    closing = contextlib.closing(out) if out else contextlib.nullcontext()
    options: dict[str, Any] = {"unit": "image", "disable": False, "leave": True, "mininterval": interval_s}
    with closing, progress(None, "predict", total, done, **options) as bar:
        chunks = run.predict_chunks(job.files, left, selection, job.workers, "process")
        for span, predictions in zip(left, chunks, strict=True):
            rows = "".join(format_row(one, columns, threshold) for one in predictions if one.error is None)
            errors = [[one.image, one.error] for one in predictions if one.error is not None]
            for path, cause in errors:
                bar.write(printable(describe_unread(path, cause)), file=sys.stderr)
            if out:
                out.append(rows, errors)
            else:
                print_rows(rows)
            num_broken += len(errors)
            bar.update(len(span))
        if out:
            out.finish(csv_line(header))
    if num_broken:
        print(f"not read: {counted(num_broken, 'image')}", file=sys.stderr)
    return num_broken


def print_rows(rows: str) -> None:
    """Print the text of rows; on a terminal with escapes for what would control it."""
    shown = printable(rows, keep="\n") if sys.stdout.isatty() else rows
    with ending_with_reader():
        sys.stdout.buffer.write(shown.encode(errors="surrogateescape"))


def list_columns(selection: Selection, classes: Sequence[str]) -> list[str]:
    """Return the names of the columns after `path`."""
    if selection == Selection():
        return list(classes)
    if selection.topk is None:
        return ["labels", "probabilities"]
    suffixes = ["", *(f"_{rank}" for rank in range(2, min(selection.topk, len(classes)) + 1))]
    return [f"{name}{suffix}" for suffix in suffixes for name in ("label", "probability")]


def format_row(prediction: Prediction, columns: Sequence[str], threshold: float | None = None) -> str:
    """Return the row of an image that could be read.

    Probabilities have 12 significant digits, so that sorting by them is sorting by logits. With a threshold, the first
    column is the most probable class, or empty if its probability is not above the threshold.
    """
    labels, values = prediction.labels, [f"{value:.12g}" for value in prediction.probabilities]
    if tuple(columns) == labels:  # values
        cells = values
    elif columns[0] == "labels":
        cells = [";".join(labels), ";".join(values)]
    else:
        cells = [cell for pair in zip(labels, values, strict=True) for cell in pair]
    if threshold is not None:
        cells.insert(0, labels[0] if prediction.probabilities[0] > threshold else "")
    return csv_line([prediction.image, *cells])
