"""Calibration of a trained model: its temperature, and the confidence from which validation images justify answers."""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distribuuuu.checkpoint.manager import hash_tensors
from distribuuuu.config import ConfigError
from distribuuuu.config.run_files import CALIBRATION
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.untrusted import MAX_JSON, InvalidFileError, parse_json, read_regular, untrusted
from distribuuuu.inference.linear_probe import fit_temperature
from distribuuuu.tasks.class_metrics import ExpectedCalibrationError
from distribuuuu.tasks.metrics import StepOutput

logger = logging.getLogger(__name__)

# Parts of the validation images, the most confident ones first, at whose ends a threshold is tested.
PARTS = 20
# Probability, over the choice of the validation images, that a threshold does not keep its promise.
LEVEL = 0.05


class CalibrationError(ConfigError):
    """A calibration that cannot be read: without it, the confidences would be others than those that were promised."""


@dataclass(frozen=True)
class Calibration:
    """The calibration of the confidence of some weights, the probability of the answer, by validation images.

    Attributes:
        temperature: the logits are divided by it before the softmax (Guo et al., arXiv 1706.04599).
        thresholds: of each part of the images, the confidence above which they are, their number, and the mistakes.
        images: the number of validation images.
        digest: that of the validation set; empty: unknown.
        weights_sha256: the weights, see `hash_tensors`; empty: not known yet.
    """

    temperature: float
    thresholds: tuple[tuple[float, int, int], ...]
    images: int
    digest: str = ""
    weights_sha256: str = ""

    def find_threshold(self, precision: float) -> float:
        """Return the least confidence above which at least the share `precision` of the answers is right.

        This holds with a probability of 95 % for images drawn like the validation images, if a higher confidence is not
        less accurate. From the most confident images on, threshold by threshold, the hypothesis that more answers are
        wrong is rejected while so few mistakes are improbable, by the exact binomial test (Clopper and Pearson). The
        first threshold that fails ends the search: fixed-sequence testing with two starts, half of the 5 % for each
        ("Learn then Test", arXiv 2110.01052). The thresholds are confidences of images, those above one a random sample
        of all images above it ("Selective Classification for Deep Neural Networks", arXiv 1705.08500).

        Raises:
            ConfigError: the precision is not between 0 and 1, or no threshold is justified.
        """
        if not 0 < precision < 1:
            raise ConfigError(f"--precision: got {precision:g}; expected a value above 0 and below 1")
        level, found = LEVEL / 2, list[float]()
        needed = math.ceil(math.log(level) / math.log(precision))
        tested = [row for row in self.thresholds if row[1] >= needed]
        for start in (0, len(tested) // 2):
            for threshold, images, mistakes in tested[start:]:
                if binomial_tail(mistakes, images, 1 - precision) > level:
                    break
                found.append(threshold)
        if found:
            return min(found)
        what = f"{self.images:,} validation images justify no threshold; it takes {needed:,} or more confident answers"
        fix = "a lower precision, or more images, see distribuuuu calibrate --help"
        raise ConfigError(f"--precision: got {precision:g}: {what}, nearly all of them right; fix: {fix}")


def binomial_tail(most: int, num: int, share: float) -> float:
    """Return the probability of at most `most` mistakes in `num` answers, each of which has the probability `share`."""
    logs = [math.lgamma(num + 1) - math.lgamma(wrong + 1) - math.lgamma(num - wrong + 1)
            + wrong * math.log(share) + (num - wrong) * math.log1p(-share) for wrong in range(most + 1)]  # fmt: skip
    return math.fsum(map(math.exp, logs))


def fit_calibration(logits: Tensor, labels: Tensor, digest: str = "") -> Calibration:
    """Return the calibration by validation images: logits (N, classes) and labels (N,)."""
    temperature, num = fit_temperature(logits, labels), len(labels)
    confidence, predicted = (logits.double() / temperature).softmax(dim=1).max(dim=1)
    ranked, wrong = confidence.sort(descending=True).values.tolist(), predicted.ne(labels)
    rows = []
    for count in sorted({num * part // PARTS for part in range(1, PARTS + 1)} - {0}):
        above = confidence > (threshold := ranked[count] if count < num else 0.0)
        rows.append((threshold, int(above.sum()), int((wrong & above).sum())))
    return Calibration(temperature, tuple(rows), num, digest)


def write_calibration(folder: Path, calibration: Calibration, tensors: Mapping[str, Tensor]) -> None:
    """Write calibration.json of some weights beside them."""
    content = {**asdict(calibration), "weights_sha256": hash_tensors(dict(tensors))}
    with replacing(folder / CALIBRATION, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=1) + "\n")


def read_calibration(folder: Path | None, tensors: Mapping[str, Tensor] | None) -> Calibration | None:
    """Return the calibration of some weights in their folder; None if there is none, or with a warning one of others.

    Raises:
        CalibrationError: the file cannot be read, or is damaged.
    """
    if folder is None or tensors is None:
        return None
    path = folder / CALIBRATION
    try:
        with untrusted(path, "calibration"):
            content: dict[str, Any] = parse_json(read_regular(path, MAX_JSON))
            rows = tuple((float(row[0]), int(row[1]), int(row[2])) for row in content["thresholds"])
            numbers = float(content["temperature"]), rows, int(content["images"])
            found = Calibration(*numbers, str(content["digest"]), str(content["weights_sha256"]))
            if not 1e-3 < found.temperature < 1e3:
                raise ValueError(f"temperature {found.temperature}")
    except FileNotFoundError:
        return None
    except (InvalidFileError, OSError) as error:
        fix = f"remove it, then distribuuuu calibrate {folder}"
        raise CalibrationError(f"RUN: calibration.json: {error}; fix: {fix}") from error
    if found.weights_sha256 != hash_tensors(dict(tensors)):
        logger.warning("%s is ignored: it is that of other weights; fix: distribuuuu calibrate %s", path, folder)
        return None
    return found


def calibration_error(logits: Tensor, labels: Tensor) -> float:
    """Return the expected calibration error, from 0 to 1, see `ExpectedCalibrationError`."""
    metric = ExpectedCalibrationError(logits.shape[1])
    sums = metric.batch_sums(StepOutput(torch.tensor(0.0), logits, labels))
    return metric.value(sums, len(labels)) / 100
