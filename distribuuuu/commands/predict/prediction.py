"""Predictions of many files by one or several processes, written in the order of the files.

The main process appends the rows of each chunk to a journal. Of N processes, each predicts every Nth chunk, with the
same number of threads as a single one; so the bytes of the output do not depend on N.
"""

import contextlib
import hashlib
import json
import multiprocessing
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from distribuuuu.commands.output import ending_with_reader
from distribuuuu.commands.scan.journal import Journal
from distribuuuu.config import ConfigError
from distribuuuu.config.config_node import iter_options
from distribuuuu.config.errors import counted
from distribuuuu.config.options import option_of
from distribuuuu.data.datasets.file_check import find_reduced
from distribuuuu.data.datasets.table_file import csv_line
from distribuuuu.data.decode import build_decode_options
from distribuuuu.distributed.process_group import pick_device
from distribuuuu.files.untrusted import printable
from distribuuuu.inference.forward_chunks import UnlabeledImages, list_spans
from distribuuuu.inference.load_run import find_run
from distribuuuu.inference.loaded_run import LoadedRun, Prediction, Selection, choose_selection
from distribuuuu.launch.processes import die_with_parent
from distribuuuu.launch.signals import ignore_signals
from distribuuuu.records.run_log import LOG_INTERVAL_S, has_progress_bar, progress

# The rows of a chunk as text, and [path, cause] of each broken image.
Rows = tuple[str, list[list[str]]]


def predict_files(job: Namespace) -> int:
    """Predict the files of a job, resuming from its partial output; return the number of broken images.

    Args:
        job: the flags of the command, with `files`, the image files; `out` is a path or None: CSV on standard output.

    Raises:
        ConfigError: the run cannot be loaded, an option does not suit it, or the output cannot be written.
    """
    run = find_run(job.run, job.cfg, job.overrides)
    # All processes use the mode that this one has found for auto.
    job.overrides = [*job.overrides, "TRAIN.AMP", run.cfg.TRAIN.AMP]
    job.overrides += ["MODEL.CHANNELS_LAST", str(run.cfg.MODEL.CHANNELS_LAST)]
    selection = choose_selection(run.cfg, len(run.classes), job.topk, job.threshold)
    spans = list_spans(len(job.files), run.cfg.TEST.BATCH_SIZE)
    if job.precision is not None:
        print(f"answers have a probability above {run.find_threshold(job.precision):.4f}", file=sys.stderr)
    columns = [*([] if job.precision is None else ["answer"]), *list_columns(selection, run.classes)]
    header = "" if _is_json(job) else csv_line(["path", *columns])
    out = Journal(job.out, hash_job(job, run, selection)) if job.out else None
    num_done, num_broken = (out.num_chunks, len(out.broken)) if out else (0, 0)
    if not out:
        print_rows(header)
    print(printable(run.describe()), file=sys.stderr)
    images = UnlabeledImages(job.files)
    images.has_files = True
    if reduced := find_reduced(images, build_decode_options(run.cfg)):
        print(printable(reduced), file=sys.stderr)
    left, total = spans[num_done:], len(job.files)
    done = total - sum(map(len, left))
    if done:
        print(f"resumed after {done:,} of {counted(total, 'image')}", file=sys.stderr)
    interval_s = 0.1 if has_progress_bar() else LOG_INTERVAL_S
    closing = contextlib.closing(out) if out else contextlib.nullcontext()
    options: dict[str, Any] = {"unit": "image", "disable": False, "leave": True, "mininterval": interval_s}
    with closing, progress(None, "predict", total, done, **options) as bar:
        for span, (rows, errors) in zip(left, predict_spans(job, run, selection, left), strict=True):
            for error in errors:
                bar.write(_describe_broken(*error), file=sys.stderr)
            if out:
                out.append(rows, errors)
            else:
                print_rows(rows)
            num_broken += len(errors)
            bar.update(len(span))
        if out:
            out.finish(header)
    if num_broken:
        print(f"broken: {counted(num_broken, 'image')}", file=sys.stderr)
    return num_broken


def _describe_broken(path: str, cause: str) -> str:
    return printable(f"{'cannot read' if '; fix: ' in cause else 'broken image:'} {path}: {cause}")


def print_rows(rows: str) -> None:
    """Print the text of rows; on a terminal with escapes for what would control it."""
    shown = printable(rows, keep="\n") if sys.stdout.isatty() else rows
    with ending_with_reader():
        sys.stdout.buffer.write(shown.encode(errors="surrogateescape"))


def _is_json(job: Namespace) -> bool:
    return job.out is not None and job.out.suffix == ".jsonl"


def hash_job(job: Namespace, run: LoadedRun, selection: Selection) -> str:
    """Return a hash of what the rows of a job depend on: the model, options, images, and the version of torch."""
    settings = [(key, value) for key, value in iter_options(run.cfg)
                if key == "TEST.BATCH_SIZE" or option_of(key).hashed and not option_of(key).neutral]  # fmt: skip
    tensors = run.state_dict or {}
    model = [*tensors] or run.source, run.classes
    selected = (*selection, job.precision, run.calibration)
    texts = model, settings, job.files, selected, torch.__version__, torch.cuda.is_available()
    state = hashlib.blake2b(repr(texts).encode(), digest_size=16)
    for tensor in tensors.values():
        state.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


# --------------------------------------------------------------------------------------- processes


def predict_spans(job: Namespace, run: LoadedRun, selection: Selection, spans: Sequence[range]) -> Iterator[Rows]:
    """Yield the rows of chunks, in order, predicted by `job.nproc` processes."""
    if job.nproc == 1 or len(spans) < 2:
        yield from predict_share(job, run, selection, spans)
        return
    context = multiprocessing.get_context("spawn")
    running = []
    for rank in range(min(job.nproc, len(spans))):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run_process, args=(job, selection, spans[rank :: job.nproc], rank, sender))
        process.start()
        sender.close()
        running.append((process, receiver))
    try:
        for number in range(len(spans)):
            process, receiver = running[number % job.nproc]
            try:
                result = receiver.recv()
            except EOFError:
                process.join()
                fix = "fix: see its message above, then rerun the same command"
                raise ConfigError(f"--nproc: a process ended with status {process.exitcode}; {fix}") from None
            if isinstance(result, ConfigError):
                raise result
            yield result
    finally:
        for process, _ in running:
            process.kill()
            process.join()


def _run_process(job: Namespace, selection: Selection, spans: Sequence[range], rank: int, sender: Connection) -> None:
    """Predict chunks in a process of its own, and send their rows, or a ConfigError, to the main process."""
    ignore_signals()
    die_with_parent()
    try:
        run = replace(find_run(job.run, job.cfg, job.overrides), given_device=pick_device(rank))
        for rows in predict_share(job, run, selection, spans):
            sender.send(rows)
    except ConfigError as error:
        sender.send(error)


def predict_share(job: Namespace, run: LoadedRun, selection: Selection, spans: Sequence[range]) -> Iterator[Rows]:
    """Yield the rows of chunks that this process predicts on its own device."""
    columns = list_columns(selection, run.classes)
    threshold = None if job.precision is None else run.find_threshold(job.precision)
    for predictions in run.predict_chunks(job.files, spans, selection, job.workers, "process"):
        yield format_rows(predictions, columns, _is_json(job), threshold)


# -------------------------------------------------------------------------------------------- rows


def list_columns(selection: Selection, classes: Sequence[str]) -> list[str]:
    """Return the names of the columns after `path`."""
    if selection == Selection():
        return list(classes)
    if selection.topk is None:
        return ["labels", "probabilities"]
    suffixes = ["", *(f"_{rank}" for rank in range(2, min(selection.topk, len(classes)) + 1))]
    return [f"{name}{suffix}" for suffix in suffixes for name in ("label", "probability")]


def format_rows(
    predictions: Sequence[Prediction], columns: Sequence[str], is_json: bool, threshold: float | None = None
) -> Rows:
    """Return the text of the rows of images, and [path, cause] of the broken ones, which have no row.

    Probabilities have 12 significant digits, so that sorting by them is sorting by logits. With a threshold, the first
    column is the most probable class, or empty (JSON: null) if its probability is not above the threshold.
    """
    rows, errors = [], []
    for prediction in predictions:
        if prediction.error is not None:
            errors.append([prediction.image, prediction.error])
            continue
        labels, texts = list(prediction.labels), [f"{value:.12g}" for value in prediction.probabilities]
        values: list[Any] = [float(text) for text in texts] if is_json else texts
        cells: list[Any] = [cell for pair in zip(labels, values, strict=True) for cell in pair]
        if tuple(columns) == prediction.labels:  # values
            cells = values
        elif columns[0] == "labels":
            cells = [labels, values] if is_json else [";".join(labels), ";".join(texts)]
        answer = {}
        if threshold is not None:
            answer["answer"] = labels[0] if prediction.probabilities[0] > threshold else None
        if is_json:
            rows.append(
                json.dumps({"path": prediction.image, **answer, **dict(zip(columns, cells, strict=True))}) + "\n"
            )
        else:
            rows.append(csv_line([prediction.image, *(text or "" for text in answer.values()), *cells]))
    return "".join(rows), errors
