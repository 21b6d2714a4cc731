"""A trained model with its classes, its evaluation transform and predictions for images in memory or on disk."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from distribuuuu.checkpoint.host_copy import copy_to_host
from distribuuuu.checkpoint.io import load_state_dict
from distribuuuu.checkpoint.manager import hash_tensors
from distribuuuu.checkpoint.weights_files import RAW, describe_kind
from distribuuuu.config import Config, ConfigError
from distribuuuu.config.config_node import iter_options
from distribuuuu.config.declaration import AUTO
from distribuuuu.config.derived import show_size
from distribuuuu.config.errors import NonFiniteError, counted
from distribuuuu.config.options import PIXEL_RANGES, option_of
from distribuuuu.config.registry import task_class
from distribuuuu.config.run_files import RESULTS
from distribuuuu.data.batch import Normalizer
from distribuuuu.data.build_transform import build_eval_crop
from distribuuuu.data.crops import EvalCrop
from distribuuuu.data.decode import DecodeOptions, build_decode_options, open_lazy_image
from distribuuuu.data.image_faults import describe_unread
from distribuuuu.data.loader import BadImageError
from distribuuuu.data.seeding import SampleRNG
from distribuuuu.data.transforms import CenterCrop
from distribuuuu.distributed.process_group import pick_device
from distribuuuu.distributed.sharding import inference
from distribuuuu.engine.build import explaining_out_of_memory, set_backends
from distribuuuu.engine.resume import restore_task
from distribuuuu.inference.calibration import Calibration
from distribuuuu.inference.forward_chunks import LOADED, ChunkLoader, UnlabeledImages, list_spans, one_behind
from distribuuuu.inference.image_arguments import list_images
from distribuuuu.launch.host import count_cores
from distribuuuu.models import build_model
from distribuuuu.models.finetune import load_weights
from distribuuuu.optim.precision import build_precision
from distribuuuu.records.read_results import read_results
from distribuuuu.tasks.base import Task, build_task, has_classes
from distribuuuu.tasks.metrics import rank_classes

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
# What can be predicted: a path, a PIL image, or uint8 pixels (H, W, 3) or (H, W).
Image = Any


@dataclass(frozen=True)
class EvalTransform:
    """The evaluation transform of a run: decode, resize, crop, normalize.

    Attributes:
        decoder, options: DATA.DECODER, and DATA.MAX_PIXELS, DATA.EXIF_ROTATE, DATA.CHANNELS and DATA.PIXELS.
        mean, std: per channel, of pixel values 0 to 1.
    """

    crop: EvalCrop
    decoder: str
    options: DecodeOptions
    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels_last: bool = False

    def __call__(self, image: Image) -> torch.Tensor:
        """Return float32 (3, H, W) on the CPU from a path, a PIL image or uint8 pixels.

        Raises:
            ValueError, RuntimeError, OSError: it is no image.
        """
        item = UnlabeledImages([image]).read(0)
        pixels = self.crop(open_lazy_image(item, self.decoder, self.options), SampleRNG(0, 0))
        return self.normalizer()(pixels[None])[0]

    def normalizer(self, device: torch.device = CPU, channels_last: bool = False) -> Normalizer:
        """Return the normalization of uint8 crops (N, 3, H, W) on a device, in a memory layout."""
        return Normalizer(device, self.mean, self.std, channels_last, one=PIXEL_RANGES[self.options.pixels])


def build_eval_transform(cfg) -> EvalTransform:
    """Return the evaluation transform of a config that sets DATA.MEAN and DATA.STD."""
    data, options = cfg.DATA, build_decode_options(cfg)
    return EvalTransform(build_eval_crop(cfg), data.DECODER, options, data.MEAN, data.STD, cfg.MODEL.CHANNELS_LAST)


@dataclass(frozen=True)
class Prediction:
    """The classes of one image, the most probable first.

    Attributes:
        image: its path; `image N`, from 0, for an image in memory.
        labels: the class names: the `topk` most probable ones, or with several labels per image those above a
            threshold. Of a task that does not classify, the names of the values.
        probabilities: of the labels, by softmax, or with several labels per image by sigmoid; or the values.
        error: why the image cannot be read; None if it can.
    """

    image: str
    labels: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None


class Selection(NamedTuple):
    """The number of classes or, with several labels per image, the least probability, exclusive, of a prediction.

    With neither, it is the values of a task.
    """

    topk: int | None = None
    threshold: float | None = None


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A trained model, ready to predict. Its files have been read; it is built at the first use of `model`.

    Attributes:
        source: the file of the weights, or the name of published weights.
        weights: "raw", "ema" (their moving average), "published", or a kind of `Task.averages`.
        cfg: the frozen config; DATA.MEAN, DATA.STD and MODEL.NUM_CLASSES are set.
        state_dict: the weights of the file; None for published ones.
        folder: the folder with results.json; None: there is none.
        given_device: the device of the model; None: a GPU if there is one.
        task_state: the state of the task in the file; None: there is none.
        has_classifier: whether the weights include a head; else its random weights are of no use.
        is_deployed: whether the weights are those of `Task.deploy_model`, as in an export.
        exported_results: the results of the run that an exported folder was written from; None: unknown.
        calibration: that of these weights; None: there is none, and the probabilities are those of the softmax.
    """

    source: str
    weights: str
    cfg: Config
    classes: tuple[str, ...]
    state_dict: dict[str, torch.Tensor] | None
    folder: Path | None = None
    given_device: torch.device | None = None
    task_state: Mapping[str, Any] | None = None
    has_classifier: bool = True
    is_deployed: bool = False
    exported_results: dict | None = None
    calibration: Calibration | None = None

    @cached_property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.given_device or pick_device(0)

    @cached_property
    def transform(self) -> EvalTransform:
        """The evaluation transform of the run."""
        return build_eval_transform(self.cfg)

    @cached_property
    def task(self) -> Task:
        """The task of the run."""
        return build_task(self.cfg, self.classes, self.device, build_precision(self.cfg, self.device))

    @cached_property
    def model(self) -> nn.Module:
        """The model in evaluation mode, on `device`: images (N, 3, H, W) -> logits (N, classes).

        Raises:
            ConfigError: it cannot be built, or the weights do not fit.
        """
        set_backends(self.cfg, self.device)
        # The algorithm must not depend on measurements of the process.
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
        model = build_model(self.cfg)
        if self.state_dict is None:
            load_weights(self.cfg, model, self.source, self.classes, "RUN", needs_head=self.has_classifier)
        model = self.task.adapt_model(model)
        model = self.task.deploy_model(model) if self.is_deployed else model
        if self.state_dict is not None:
            load_state_dict(model, self.state_dict, self.source)
            restore_task(self.task, self.task_state, self.source, in_training=False)
        model = model if self.is_deployed else self.task.deploy_model(model)
        return model.to(self.device).eval()

    def build(self) -> "LoadedRun":
        """Build the model now, so that its errors are raised here; return the run."""
        _ = self.model
        return self

    @cached_property
    def results(self) -> dict | None:
        """The content of results.json; None if there is none, or if it is damaged, with a warning."""
        if self.folder is None or not os.path.lexists(self.folder / RESULTS):
            return self.exported_results
        try:
            return read_results(self.folder / RESULTS)
        except ConfigError as error:
            logger.warning("left out: %s", error)
            return None

    def describe(self) -> str:
        """Return a line about the model, its weights, the preprocessing of images, and a mode that was measured."""
        kind = "" if self.weights == RAW else f" ({describe_kind(self.weights)})"
        crop = self.transform.crop
        sizes = f"images resized to {show_size(crop.resize_to)} px, cropped to {show_size(crop.size)} px"
        sizes = sizes if isinstance(crop, CenterCrop) else f"images: {crop}"
        sizes += "".join(f"; {note}" for _, note in self.cfg.notes if f": {AUTO}, " in note)  # see engine/fast_mode.py
        sizes += f"; calibrated, temperature {self.temperature:.3g}" if self.calibration else ""
        return f"model: {self.cfg.MODEL.ARCH}, {counted(len(self.classes), 'class')}; {self.source}{kind}; {sizes}"

    def predict(
        self, images: Any, topk: int | None = None, threshold: float | None = None, skip_bad: bool = False
    ) -> list[Prediction]:
        """Return the prediction of each image, in order.

        Args:
            images: an image or several ones: paths of files or folders, PIL images, uint8 pixels (H, W, 3) or (H, W).
            topk: the number of classes (5), for a model with one label per image.
            threshold: the least probability of a label (0.5), for a model with several labels per image.
            skip_bad: return a prediction with `error` for an image that cannot be read.

        Raises:
            ConfigError: a path does not exist, or `topk` or `threshold` does not suit the model.
            BadImageError: an image cannot be read, and `skip_bad` is False.
        """
        selection = choose_selection(self.cfg, len(self.classes), topk, threshold)
        items, size = _as_items(images), self.cfg.TEST.BATCH_SIZE
        # Threads, as processes cannot be forked safely from a notebook.
        workers = min(count_cores(), len(items) // 2), "thread"
        chunks = self.predict_chunks(items, list_spans(len(items), size), selection, *workers)
        predictions = [prediction for chunk in chunks for prediction in chunk]
        bad = next((prediction for prediction in predictions if prediction.error), None)
        if bad and not skip_bad:
            text = describe_unread(bad.image, str(bad.error))
            raise BadImageError(f"{text}{'' if '; fix: ' in text else '; fix: remove it'}, or pass skip_bad=True")
        return predictions

    def hash_job(self, files: Sequence[str], *details: Any) -> str:
        """Return a hash of what results for files depend on: the model, options, files, details and torch's version."""
        settings = [(key, value) for key, value in iter_options(self.cfg)
                    if key == "TEST.BATCH_SIZE" or option_of(key).hashed and not option_of(key).neutral]  # fmt: skip
        sizes = [os.stat(file).st_size if os.path.exists(file) else -1 for file in files]
        weights = hash_tensors(self.state_dict) if self.state_dict else self.source
        texts = weights, self.classes, self.calibration, settings, [*files], sizes, details
        run = repr((*texts, torch.__version__, torch.cuda.is_available()))
        return hashlib.blake2b(run.encode(), digest_size=16).hexdigest()

    def check_classifier(self) -> None:
        """Raise ConfigError if there are no scores, or the weights are a backbone's, whose answers would be random."""
        if not self.task.has_scores:
            reason = "whose model has no score for each class; fix: define predict_step in the task"
            raise ConfigError(f"TASK.NAME: got {self.cfg.TASK.NAME}, {reason}")
        if not self.has_classifier:
            message = f"{self.source} is published without a classifier of these classes"
            fix = f"train one first, distribuuuu finetune FOLDER --backbone {self.source}"
            raise ConfigError(f"RUN: {message}; fix: {fix}")

    def predict_chunks(
        self, items: Sequence[Image], spans: Sequence[range], selection: Selection, workers: int, kind: str
    ) -> Iterator[list[Prediction]]:
        """Yield the predictions of each chunk, whose images are loaded by workers of a kind, "process" or "thread"."""
        self.check_classifier()
        images = UnlabeledImages(items)
        loader = ChunkLoader(images, self.transform, spans, self.device, LOADED, workers, kind)
        self.build()  # after the workers have been forked: the model may be on a GPU
        started = (
            (span, start_selection(self.compute_scores(pixels), selection, self.cfg.TRAIN.TOPK), causes)
            for span, pixels, causes in loader.chunks()
        )
        for span, finish, causes in one_behind(started, self.device):
            predictions = []
            for index, (numbers, probabilities) in zip(span, finish(), strict=True):
                name = images.describe(index)
                if index in causes:
                    predictions.append(Prediction(name, error=causes[index].reason))
                else:
                    labels = tuple(self.classes[number] for number in numbers)
                    predictions.append(Prediction(name, labels, tuple(probabilities)))
            yield predictions

    def compute_scores(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores (N, classes) of normalized images (N, 3, H, W) on the device, see `Task.predict_step`.

        They are divided by the temperature of the calibration.
        """
        with inference(self.model), explaining_out_of_memory(self.cfg.MODEL.ARCH):
            scores = self.task.predict_step(self.model, images)
            return scores if self.temperature == 1 else scores.float() / self.temperature

    @property
    def temperature(self) -> float:
        """The temperature by which scores are divided; 1 without a calibration."""
        return self.calibration.temperature if self.calibration else 1.0

    def find_threshold(self, precision: float) -> float:
        """Return the probability above which at least the share `precision` of the answers is right.

        Raises:
            ConfigError: the weights are not calibrated, or as `Calibration.find_threshold`.
        """
        if self.calibration is None:
            reason = f"{self.source} has no calibration by validation images"
            raise ConfigError(f"--precision: {reason}; fix: distribuuuu calibrate {self.folder or 'OUT_DIR'}")
        return self.calibration.find_threshold(precision)


def choose_selection(cfg, num_classes: int, topk: int | None, threshold: float | None) -> Selection:
    """Return which classes are to be predicted; raise ConfigError if `topk` or `threshold` does not suit the model."""
    classifies, multilabel = has_classes(cfg, num_classes), task_class(cfg).multilabel
    given = "values" if not classifies else "several labels" if multilabel else "one label"
    if topk is not None and given != "one label":
        raise ConfigError(f"--topk: the model gives an image {given}; fix: use --threshold P, or leave it out")
    if threshold is not None and given != "several labels":
        raise ConfigError(f"--threshold: the model gives an image {given}; fix: use --topk K, or leave it out")
    if not classifies:
        return Selection()
    if topk is not None and topk < 1:
        raise ConfigError(f"--topk: got {topk}; expected 1 or more")
    if threshold is not None and not 0 <= threshold <= 1:
        raise ConfigError(f"--threshold: got {threshold:g}; expected 0 to 1")
    if multilabel:
        return Selection(threshold=0.5 if threshold is None else threshold)
    return Selection(topk=5 if topk is None else topk)


def start_selection(
    scores: torch.Tensor, selection: Selection, eval_topk: int
) -> Callable[[], list[tuple[list[int], list[float]]]]:
    """Start to copy scores (N, classes) from the device; return the function that waits for it.

    It returns the numbers of the chosen classes of each image and their probabilities, the most probable first. With
    one label per image, the first class is that of the metric top1, also if several logits are equal.
    """
    wait = copy_to_host([scores, rank_classes(scores, eval_topk)[:, :1]])

    def select() -> list[tuple[list[int], list[float]]]:
        logits, first = wait()
        logits = logits.double()
        num = logits.shape[1]
        if (logits.isnan() | logits.eq(torch.inf)).any():
            raise NonFiniteError("RUN: the model has scores that are not finite; fix: name another checkpoint")
        if selection.topk is not None:
            order = logits.scatter(1, first, torch.inf).topk(min(selection.topk, num)).indices
            return list(zip(order.tolist(), logits.softmax(dim=1).gather(1, order).tolist(), strict=True))
        if selection.threshold is None:
            return [(list(range(num)), row) for row in logits.tolist()]
        ranked, order = logits.sigmoid().sort(dim=1, descending=True, stable=True)
        rows = zip(order.tolist(), ranked.tolist(), (ranked > selection.threshold).sum(1).tolist(), strict=True)
        return [(numbers[:count], values[:count]) for numbers, values, count in rows]

    return select


def _as_items(images: Any) -> list[Image]:
    """Return a list of single images from the argument of `predict`; folders are listed."""
    if isinstance(images, (str, os.PathLike, bytes)) or hasattr(images, "getexif"):  # a PIL image has this method
        images = [images]
    elif isinstance(images, (np.ndarray, torch.Tensor)):
        images = [images] if images.ndim < 4 else list(images)
    items: list[Image] = []
    for item in images:
        items += list_images([os.fspath(item)]) if isinstance(item, (str, os.PathLike)) else [item]
    return items
