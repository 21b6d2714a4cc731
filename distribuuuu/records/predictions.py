"""predictions.npz: the answer of a model for every evaluation image, in the order of the data set.

Arrays of N images and C classes, to be opened with `numpy.load`:

- `path` (N,): the file relative to the data folder (`folder` in `meta`), or "image 17" of a data set without files.
- `label`: the class of each image, int32 (N,); of a multi-label set uint8 (N, C), 1 for the classes of an image.
- `logits` (N, C): float32. Of more than 4 million values, float16; with one label per image they are then relative to
  the largest of the image, where float16 is most precise.
- instead of `logits`, where they would exceed 110 MB: `top_class` int32 (N, 10) and `top_logits` float16 (N, 10), the
  largest of each image in descending order, and `log_total` float32 (N,), the logarithm of the sum of exp(logits). Both
  are relative to the largest logit if an image has one label.
- `loss` float32 (N,): cross-entropy, or with several labels per image the mean binary cross-entropy of the classes.
- `classes` (C,): the names. `meta`: JSON with `weights` (raw or ema), `epoch` (null after a separate evaluation),
  `folder`, `data`, `multilabel` and `schema`; and `images`, the folder of all images, if some are outside of `folder`.

On the CPU, with the same number of threads per process, the bytes depend neither on the number of processes nor on
TEST.BATCH_SIZE. For that, images are evaluated there once more, in chunks of equal size.
"""

import contextlib
import json
import logging
import operator
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map, tree_map_only

from distribuuuu.config import run_files
from distribuuuu.config.errors import counted
from distribuuuu.config.registry import dataset_name
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.fsdp import is_sharded
from distribuuuu.distributed.watchdog import begin_start_up
from distribuuuu.files.atomic_file import replacing

logger = logging.getLogger(__name__)

FILE_NAME, SCHEMA_VERSION = run_files.PREDICTIONS, 1
MAX_IMAGES = 1_000_000
# Maximum number of logits that are stored as float32, and as float16; of more, the TOP largest of each image.
MAX_FLOAT32, MAX_LOGITS, TOP = 2**22, 52_000_000, 10
# Images of a forward pass on the CPU, whose kernels round differently for each number of images, but not for each
# position among them.
_CHUNK = 32
_LARGEST_HALF = 65504.0


class Recorder:
    """A task that records the logits and losses of its evaluation steps, for the evaluation of one model.

    Args:
        task: the task.
        num_images: images of the whole data set.
        indices: the images of this process, in the order in which they are evaluated; what follows them is ignored.
        repeats: evaluate images once more in chunks of equal size, and record those outputs.
        layout: the memory format of the images.
    """

    def __init__(
        self,
        task: Any,
        num_images: int,
        indices: Sequence[int],
        repeats: bool = False,
        layout: torch.memory_format = torch.contiguous_format,
    ):
        self._task, self.classes = task, task.classes
        self._num_images, self._indices, self._repeats, self._layout = num_images, indices, repeats, layout
        self._waiting: Any = None  # a batch, or None
        self._parts: list[dict[str, torch.Tensor]] = []
        self._fits = True  # whether all outputs had one column for each class

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def eval_step(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return the output of the task, and record it."""
        if not self._repeats:
            output = self._task.eval_step(model, batch)
            self._keep(output)
            return output
        chunked = getattr(model, "unpadded", model)  # a chunk has its own size
        joined = tree_map(_join, self._waiting, batch) if self._waiting else batch
        num = len(joined.images)
        for start in range(0, num - num % _CHUNK, _CHUNK):
            rows = operator.itemgetter(slice(start, start + _CHUNK))
            self._evaluate(chunked, tree_map_only(torch.Tensor, rows, joined))
        self._waiting = tree_map_only(torch.Tensor, lambda part: part[num - num % _CHUNK :].clone(), joined)
        return self._task.eval_step(model, batch)

    def _evaluate(self, model: torch.nn.Module, batch: Any, num: int = _CHUNK) -> None:
        if not self._parts:  # a compiled model is compiled for the size of a chunk
            begin_start_up()
        # A copy has the same alignment in memory for every batch size.
        copied = batch._replace(images=batch.images.clone(memory_format=self._layout))
        self._keep(self._task.eval_step(model, copied), num)

    @torch.no_grad()
    def finish(self, model: torch.nn.Module) -> None:
        """Evaluate the images of the last, incomplete chunk."""
        if self._waiting and (num := len(self._waiting.images)):

            def pad(part: torch.Tensor) -> torch.Tensor:
                return torch.cat([part, part.new_zeros((_CHUNK - num, *part.shape[1:]))])

            padded = tree_map_only(torch.Tensor, pad, self._waiting)
            self._evaluate(model, padded, num)

    def _keep(self, output: Any, num: int | None = None) -> None:
        logits, targets = output.logits.detach()[:num].float(), output.targets[:num]
        shape = logits.shape if self.multilabel else logits.shape[:1]
        self._fits &= logits.shape[1:] == (len(self.classes),) and targets.shape == shape
        if not self._fits:
            return
        if self.multilabel:
            loss = F.binary_cross_entropy_with_logits(logits, targets.float(), reduction="none").mean(dim=1)
        else:
            loss = F.cross_entropy(logits, targets, reduction="none")
        label = targets.to(torch.uint8 if self.multilabel else torch.int32)
        self._parts.append({"label": label, "loss": loss, **self._pack(logits)})

    def _pack(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the logits (N, classes) as they are stored."""
        size = self._num_images * len(self.classes)
        if size <= MAX_FLOAT32:
            return {"logits": logits.clone()}
        if not self.multilabel:
            logits = logits - logits.amax(dim=1, keepdim=True)
        half = logits.clamp(-_LARGEST_HALF, _LARGEST_HALF).half()
        if size <= MAX_LOGITS:
            return {"logits": half}
        chosen = logits.topk(min(TOP, len(self.classes))).indices
        total = logits.logsumexp(dim=1)
        return {"top_class": chosen.to(torch.int32), "top_logits": half.gather(1, chosen), "log_total": total}

    def gather(self, device: torch.device) -> dict[str, np.ndarray] | None:
        """Return the arrays of all processes in the order of the data set; every process must call it.

        Returns:
            None if an output of some process did not have one column for each class.
        """
        if dist.all_reduce_max([not self._fits])[0]:
            return None
        empty = torch.zeros(0, len(self.classes), device=device)
        label = empty.to(torch.uint8) if self.multilabel else empty[:, 0].to(torch.int32)
        parts = [{"label": label, "loss": empty[:, 0], **self._pack(empty)}, *self._parts]
        self._parts, num, names = [], len(self._indices), list(parts[0])
        order = dist.gather_rows(torch.tensor(self._indices, dtype=torch.int64, device=device)).cpu().numpy().argsort()
        columns = {name: torch.cat([part.pop(name) for part in parts])[:num] for name in names}  # frees the parts
        return {name: dist.gather_rows(columns.pop(name)).cpu().numpy()[order] for name in names}


def _join(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Return the rows of two parts of a batch; None if they are unknown."""
    return None if one is None or other is None else torch.cat([one, other])


def build_recorder(cfg, task: Any, model: torch.nn.Module, loader: Any) -> Recorder | None:
    """Return the recorder of an evaluation; None if no predictions are saved."""
    num_images, is_cpu = len(loader.images), loader.device.type == "cpu"
    if cfg.TEST.SAVE_PREDICTIONS and num_images > MAX_IMAGES:
        logger.info("%s is not written for more than %s images", FILE_NAME, f"{MAX_IMAGES:,}")
    saves = cfg.TEST.SAVE_PREDICTIONS and 0 < num_images <= MAX_IMAGES
    if saves and not task.has_scores:
        logger.info("%s is not written: %s has no score for each class", FILE_NAME, type(task).__name__)
    if not saves or not task.has_scores or cfg.TEST.LABELS == "imagenet_real":
        return None
    layout = torch.channels_last if cfg.MODEL.CHANNELS_LAST else torch.contiguous_format
    repeats = is_cpu and not is_sharded(model) and not task.eval_gradients
    return Recorder(task, num_images, loader.sampler.indices, repeats, layout)


@contextlib.contextmanager
def recording(
    cfg, task: Any, model: torch.nn.Module, loader: Any, weights: str, epoch: int | None = None, is_last: bool = True
) -> Iterator[Any]:
    """Yield a task whose evaluation steps are recorded; write OUT_DIR/predictions.npz when the block ends.

    If the file cannot be written, a warning is logged. Every process must call it.

    Args:
        cfg: the config.
        task: the task that evaluates a batch.
        model: the model that is evaluated in the block.
        loader: the evaluation loader.
        weights: "raw" or "ema".
        epoch: the number of finished epochs; None: not the evaluation of a training run.
        is_last: False: yield the task itself, and write nothing.
    """
    recorder = build_recorder(cfg, task, model, loader) if is_last else None
    if not recorder:
        yield task
        return
    yield recorder
    recorder.finish(model)
    arrays = recorder.gather(loader.device)
    if arrays is None or not dist.is_main():
        return
    folder = os.path.abspath(cfg.TEST.DATASET) if loader.images.describe(0) != "image 0" else ""
    meta = {"schema": SCHEMA_VERSION, "weights": weights, "epoch": epoch, "folder": folder,
            "data": dataset_name(cfg), "multilabel": task.multilabel,
            **({"images": outside} if (outside := find_outside_folder(loader.images, folder)) else {})}  # fmt: skip
    save_predictions(Path(cfg.OUT_DIR) / FILE_NAME, loader.images, cfg.TEST.DATASET, meta, arrays)


def find_outside_folder(images: Any, folder: str) -> str:
    """Return the folder that holds all files of a set, with links followed; empty if `folder` or no file is it."""
    if not images.has_files or not folder:
        return ""
    parents = {os.path.dirname(images.describe(index)) for index in range(len(images))}
    common = os.path.commonpath([os.path.realpath(parent) for parent in parents])
    return "" if Path(common).is_relative_to(os.path.realpath(folder)) else common


def save_predictions(path: Path, images: Any, folder: str, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write the gathered arrays, with the names of the images and their classes; log a warning if that fails."""
    names = [name_of(images, index, folder) for index in range(len(images))]
    texts = {"meta": json.dumps(meta, sort_keys=True), "classes": images.classes, "path": names}
    try:
        write_npz(path, {**{name: np.array(text) for name, text in texts.items()}, **arrays})
    except OSError as error:
        logger.warning("%s CANNOT BE WRITTEN: %s", path, error)
    else:
        logger.info("predictions of %s: %s", counted(len(images), "image"), path)


def name_of(images: Any, index: int, folder: str) -> str:
    """Return the path of an image relative to the data folder, or its index in a data set without files."""
    name = re.sub(r" \(image \d+ of .*\)$", "", images.describe(index), flags=re.DOTALL)  # an image of a pack
    return name.removeprefix(os.path.join(folder, ""))


def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays atomically in the format of `numpy.savez`; the same arrays give the same bytes.

    Logits, which do not compress well, are stored as they are.

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_STORED if "logits" in name else zipfile.ZIP_DEFLATED
            with archive.open(entry, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array).reshape(array.shape), allow_pickle=False)
