"""predictions.npz: the answer of a model for every evaluation image, in the order of the data set.

docs/report.md describes the arrays. Images that cannot be read are left out, or have an answer that counts as
wrong, see TEST.BROKEN.
"""

import json
import logging
import os
import re
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from distribuuuu.config import run_files
from distribuuuu.config.errors import counted
from distribuuuu.config.registry import dataset_name
from distribuuuu.distributed import comm as dist
from distribuuuu.files.atomic_file import replacing

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
MAX_IMAGES, MAX_LOGITS = 1_000_000, 52_000_000


class Recorder:
    """The answers of an evaluation of a data set on this process, until they are gathered and written."""

    def __init__(self, cfg, task: Any, images: Any):
        self.cfg, self.images = cfg, images
        self.multilabel, self.classes, self.classifies = task.multilabel, task.classes, task.classifies
        self._parts: list[dict[str, torch.Tensor]] = []
        self._fits = True  # whether all outputs had one column for each class

    def add(self, batch: Any, output: Any) -> None:
        logits, targets = output.logits.detach().float(), output.targets
        if not self.classifies:
            self._fits &= logits.shape == (len(targets), len(self.classes))
            self._parts.append({"index": batch.index, "target": targets.float(), "score": logits.clone()})
            return
        shape = logits.shape if self.multilabel else logits.shape[:1]
        self._fits &= logits.shape[1:] == (len(self.classes),) and targets.shape == shape
        if not self._fits:
            return
        if self.multilabel:
            loss = F.binary_cross_entropy_with_logits(logits, targets.float(), reduction="none").mean(dim=1)
        else:
            loss = F.cross_entropy(logits, targets, reduction="none")
        label = targets.to(torch.uint8 if self.multilabel else torch.int32)
        self._parts.append({"index": batch.index, "label": label, "loss": loss, "logits": logits.clone()})

    def gather(self, device: torch.device) -> dict[str, np.ndarray] | None:
        """Return the arrays of all processes in the order of the data set; every process must call it.

        They are None if an output of some process did not have one column for each class.
        """
        if dist.all_reduce_max([not self._fits])[0]:
            return None
        empty = torch.zeros(0, len(self.classes), device=device)
        label = empty.to(torch.uint8) if self.multilabel else empty[:, 0].to(torch.int32)
        first = {"index": empty[:, 0].to(torch.int64)}
        if self.classifies:
            first |= {"label": label, "loss": empty[:, 0], "logits": empty}
        else:
            own = tuple(self._parts[0]["target"].shape[1:]) if self._parts else None
            shapes = [shape for shape in dist.gather_objects(own) if shape is not None]  # others have no images
            first |= {"target": empty.new_zeros(0, *next(iter(shapes), ())), "score": empty}
        parts, self._parts = [first, *self._parts], []
        columns = {name: torch.cat([part.pop(name) for part in parts]) for name in list(first)}  # frees the parts
        arrays = {name: dist.gather_rows(columns.pop(name)).cpu().numpy() for name in list(columns)}
        order = arrays["index"].argsort()
        return {name: array[order] for name, array in arrays.items()}

    def write(self, device: torch.device, weights: str, epoch: int | None = None) -> None:
        """Write OUT_DIR/predictions.npz; log a warning if that fails. Every process must call it.

        In a training, `epoch` is the number of finished epochs. A separate evaluation of another set has its own file.
        """
        arrays = self.gather(device)
        if arrays is None or not dist.is_main():
            return
        cfg, images = self.cfg, self.images
        folder = os.path.abspath(cfg.TEST.DATASET) if images.describe(0) != "image 0" else ""
        meta = {"schema": SCHEMA_VERSION, "weights": weights, "epoch": epoch, "folder": folder,
                "data": dataset_name(cfg), "digest": images.digest, "multilabel": self.multilabel,
                **({} if self.classifies else {"classifies": False}),
                **({"images": outside} if (outside := find_outside_folder(images, folder)) else {})}  # fmt: skip
        path, names = Path(cfg.OUT_DIR) / run_files.PREDICTIONS, arrays.pop("index").tolist()
        if epoch is None:
            path = import_module("distribuuuu.records.evaluated_sets").choose_file(cfg.OUT_DIR, meta)
        names = [name_of(images, index, cfg.TEST.DATASET) for index in names]
        texts = {"meta": json.dumps(meta, sort_keys=True), "classes": images.classes, "path": names}
        try:
            write_npz(path, {**{name: np.array(text) for name, text in texts.items()}, **arrays})
        except OSError as error:
            logger.warning("%s CANNOT BE WRITTEN: %s", path, error)
        else:
            logger.info("predictions of %s: %s", counted(len(names), "image"), path)


def build_recorder(cfg, task: Any, images: Any) -> Recorder | None:
    """Return the recorder of an evaluation; None if no predictions are saved."""
    if not cfg.TEST.SAVE_PREDICTIONS or not len(images):
        return None
    if len(images) > MAX_IMAGES or len(images) * len(task.classes) > MAX_LOGITS:
        logger.info("%s is not written for more than %s images or %s scores", run_files.PREDICTIONS, f"{MAX_IMAGES:,}",
                    f"{MAX_LOGITS:,}")  # fmt: skip
    elif not task.has_scores:
        logger.info("%s is not written: %s has no score for each class", run_files.PREDICTIONS, type(task).__name__)
    else:
        return Recorder(cfg, task, images)
    return None


def find_outside_folder(images: Any, folder: str) -> str:
    """Return the folder that holds all files of a set, with links followed; empty if `folder` or no file is it."""
    if not images.has_files or not folder:
        return ""
    parents = {os.path.dirname(images.describe(index)) for index in range(len(images))}
    common = os.path.commonpath([os.path.realpath(parent) for parent in parents])
    return "" if Path(common).is_relative_to(os.path.realpath(folder)) else common


def name_of(images: Any, index: int, folder: str) -> str:
    """Return the path of an image relative to the data folder, or its index in a data set without files."""
    name = re.sub(r" \(image \d+ of .*\)$", "", images.describe(index), flags=re.DOTALL)  # an image of a pack
    return name.removeprefix(os.path.join(folder, ""))


def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays atomically in the format of `numpy.savez`; the same arrays give the same bytes.

    Logits, which do not compress well, are stored as they are.
    """
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_STORED if "logits" in name else zipfile.ZIP_DEFLATED
            with archive.open(entry, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array).reshape(array.shape), allow_pickle=False)
