"""Check of an exported folder: the code of its card, in a process of its own, answers as `predict` does.

The code gets the original files, and nothing that the export has in memory: what was checked is what the reader of a
card runs.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision.io import encode_png

from distribuuuu.config.config_node import changed
from distribuuuu.config.errors import counted
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import open_lazy_image
from distribuuuu.data.image_faults import describe_unread
from distribuuuu.data.loader import BadImageError
from distribuuuu.inference.forward_chunks import UnlabeledImages, list_spans
from distribuuuu.inference.loaded_run import LoadedRun, Prediction, Selection
from distribuuuu.launch.host import count_cores
from distribuuuu.records.run_log import progress

# An export is verified if at least this share of its answers equals those of `predict`, and if the probability of the
# answer differs by at most this much on average: a mistake may change no answer of a model that is sure. Another answer
# is a tie, and no mistake, if for both sides the less probable one of the two classes has more than TIE times the
# probability of the other: the resize of an ONNX file differs from torch's by a gray level here and there, which on 45
# photographs changed the ratio of the first two classes by 0.7 % (median), and by 3.5 % at most.
MIN_EQUAL, MAX_MEAN_DIFFERENCE, TIE = 0.999, 0.002, 0.97
# Classes of an answer that are compared, with one label per image.
_TOPK = 5

# Runs the code of a card, a file, in a process of its own on a list of files in standard input. For each of them, one
# line of JSON is written to standard output; what the code prints goes to standard error.
_RUNNER = """
import json, os, sys

results = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
card = {"__name__": "card"}
with open(sys.argv[1], encoding="utf-8") as code:
    exec(compile(code.read(), "README.md", "exec"), card)
for file in json.load(sys.stdin):
    try:
        pairs = card["predict"](file)
        found = {"answer": [(str(name), float(share)) for name, share in pairs[: int(sys.argv[2])]]}
        found["is_sure"] = "answer" not in card or card["answer"](pairs) is not None
    except Exception as error:  # of any type: the code is under test
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found), file=results, flush=True)
"""

# Pairs of a class and its probability, the most probable first; of the code, also whether it gives the first as answer.
Pairs = list[tuple[str, float]]
Answer = tuple[Pairs, bool]


def without_amp(run: LoadedRun) -> LoadedRun:
    """Return a run in float32."""
    return run if run.cfg.TRAIN.AMP == "none" else replace(run, cfg=changed(run.cfg, {"TRAIN.AMP": "none"}))


def _check_unread(run: LoadedRun, images: ImageDataset, unread: dict[int, str], is_none_read: bool) -> None:
    """Raise BadImageError unless the images that are not read, by index with the reason, may be skipped as damaged."""
    intact = [index for index, reason in unread.items() if "; fix: " in reason]
    if intact or (unread and (run.cfg.DATA.ON_BAD_IMAGE != "skip" or is_none_read)):
        first = [*intact, *unread][0]
        text = describe_unread(images.describe(first), unread[first])
        raise BadImageError(text if intact else f"{text}; fix: repair it, or set DATA.ON_BAD_IMAGE skip")


def check_export(
    run: LoadedRun, images: ImageDataset, folder: Path, code: str, max_images: int = 0, threshold: float | None = None
) -> dict[str, Any]:
    """Return how the answers of the code of a card compare with those of `predict`, in float32 on the CPU.

    An answer is the most probable class or, with several labels per image, the classes above probability 0.5. With a
    threshold, the code also has to give an answer exactly where its probability is above the threshold.

    Args:
        images: the evaluation set or other images; their labels are not read.
        folder: the exported folder, in which the code runs.
        code: the Python code, which defines `predict(path)`: pairs of a class and its probability, the best first.
        max_images: number of images, evenly spaced over the set; 0: all.
        threshold: the probability above which the code is to give an answer; None: it always gives one.

    Returns:
        Entries of export.json: number of images, share of equal answers in percent, number of ties, differences of
        probabilities, whether the export is verified, and `error` if the code has failed.

    Raises:
        BadImageError: an image cannot be read, and is intact, or DATA.ON_BAD_IMAGE is not skip.
    """
    num = min(max_images, len(images)) or len(images)
    indices = [position * len(images) // num for position in range(num)]
    temporary = folder / ".check"
    temporary.mkdir()
    files = [_original_file(run, images, index, temporary) for index in indices]
    predicted = _predict(run, files)
    unread = {index: one.error for index, one in zip(indices, predicted, strict=True) if one.error}
    _check_unread(run, images, unread, len(unread) == num)
    kept = [number for number, prediction in enumerate(predicted) if prediction.error is None]
    others, errors = _run_code(code, [files[number] for number in kept], folder, temporary, run.task.multilabel)
    own = [list(zip(predicted[number].labels, predicted[number].probabilities, strict=True)) for number in kept]
    shutil.rmtree(temporary)
    compared = [_compare(one, other, run.task.multilabel, threshold) for one, other in zip(own, others, strict=True)]
    equal, ties = (sum(answer == name for answer, _ in compared) for name in ("equal", "tie"))
    differences = [difference for _, difference in compared]
    mean = math.fsum(differences) / len(own)
    return {
        "verified": equal + ties >= MIN_EQUAL * len(own) and mean <= MAX_MEAN_DIFFERENCE,
        "images": len(own),
        "images_of_set": len(images),
        "equal_answers": 100 * equal / len(own),
        "ties": ties,
        "max_probability_difference": max(differences),
        "mean_probability_difference": mean,
        **({"error": f"{counted(len(errors), 'image')}: {errors[0]}"} if errors else {}),
    }


def _original_file(run: LoadedRun, images: ImageDataset, index: int, temporary: Path) -> str:
    """Return the path of an image: its own file; else its bytes, or its pixels as PNG, written to a file."""
    if images.has_files or isinstance(images, UnlabeledImages):
        return os.path.abspath(images.describe(index))
    options = run.transform.options
    path = temporary / f"{index:08d}.{'png' if options.is_rgb or options.is_gray else 'npy'}"
    try:
        item = images.read(index)
        if not isinstance(item, (bytes, bytearray, memoryview)):
            pixels = open_lazy_image(item, run.transform.decoder, options).pixels()
            if path.suffix == ".npy":
                np.save(path, pixels.permute(1, 2, 0).numpy().astype(options.pixels))
                return str(path)
            item = encode_png(pixels.contiguous()).numpy().tobytes()
    except (ValueError, RuntimeError, OSError):
        item = b""  # broken, which `predict` reports
    path.write_bytes(item)
    return str(path)


def _predict(run: LoadedRun, files: list[str]) -> list[Prediction]:
    """Return what `predict` answers for files, without mixed precision."""
    run = without_amp(run)
    selection = Selection(threshold=-1.0) if run.task.multilabel else Selection(topk=_TOPK)
    spans = list_spans(len(files), run.cfg.TEST.BATCH_SIZE)
    chunks = run.predict_chunks(files, spans, selection, min(count_cores(), len(files) // 2), "thread")
    return [each for chunk in progress(chunks, label="predict", total=len(spans)) for each in chunk]


def _run_code(
    code: str, files: list[str], folder: Path, temporary: Path, multilabel: bool
) -> tuple[list[Answer], list[str]]:
    """Return the answers of the code of a card for files, empty where the code has failed, and the errors."""
    (temporary / "code.py").write_text(code, encoding="utf-8")
    num_pairs = 1 << 30 if multilabel else 4 * _TOPK
    words = [sys.executable, "-c", _RUNNER, str(temporary / "code.py"), str(num_pairs)]
    # Plug-ins that are modules are found as here, e.g. in the folder from which `python -m distribuuuu` was started.
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    done = subprocess.run(words, input=json.dumps(files), capture_output=True, cwd=folder, env=environment,
                          encoding="utf-8", errors="replace")  # fmt: skip
    results = [json.loads(line) for line in done.stdout.splitlines()]
    printed = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
    results += [{"error": printed[-1][:300]}] * (len(files) - len(results))  # the code has ended the process
    answers = [(one.get("answer", []), one.get("is_sure", False)) for one in results]
    return answers, [one["error"] for one in results if "error" in one]


def _compare(one: Pairs, answer: Answer, multilabel: bool, threshold: float | None) -> tuple[str, float]:
    """Return whether an answer of the code of a card is "equal" to one of `predict`, a "tie" or "other", and their
    difference of probability.

    With one label per image, the first class is compared, see `TIE`; the difference is that of it. With several labels,
    it is those above 0.5; the difference is the greatest one of a label.
    """
    other, is_sure = answer
    own, given, pairs = dict(one), dict(other), one if multilabel else one[:1]
    differences = [abs(given.get(label, 0.0) - probability) for label, probability in pairs]
    difference = max(value if math.isfinite(value) else 1.0 for value in differences)
    # An answer is given by its own probability, whose difference is judged by itself.
    if not other or (threshold is not None and is_sure != (other[0][1] > threshold)):
        return "other", difference
    if multilabel:
        found, expected = ({label for label, probability in each if probability > 0.5} for each in (other, one))
        return ("equal" if found == expected else "other"), difference
    (first, share), (answered, given_share) = one[0], other[0]
    if first == answered:
        return "equal", difference
    is_tie = own.get(answered, 0.0) > TIE * share and given.get(first, 0.0) > TIE * given_share
    return ("tie" if is_tie else "other"), difference
