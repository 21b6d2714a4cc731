"""A run of `finetune`, which has no results.json: its data and its test, for model cards and reports."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from distribuuuu.commands.stats.intervals import wilson_interval
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.config.json_file import load_json
from distribuuuu.config.run_files import DECISIONS, TEST_RESULTS
from distribuuuu.files.untrusted import printable
from distribuuuu.records.read_results import read_results

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FineTuned:
    """The data and the test accuracy of a fine-tuned model, as finetune.json records them.

    Attributes:
        name: that of the folder of the images, or DATA.NAME.
        images: the numbers of training, validation and test images, as text.
        epochs: those of the fine-tuning; 0: there was none.
        kept: the weights that were kept, as text.
        tested: the number of test images, by which nothing was chosen.
        top1: of these, in percent.
        interval: the 95 % interval of `top1`, as text.
        commit: of the code that has tested it; None: unknown.
    """

    name: str
    images: str
    epochs: int
    kept: str
    tested: int
    top1: float
    interval: str
    commit: str | None


def read_finetuned(folder: Path | None) -> FineTuned | None:
    """Return the record in the finetune.json of a folder; None without one, or with a warning if it is damaged."""
    if folder is None or not os.path.lexists(folder / DECISIONS):
        return None
    try:
        content = load_json(folder / DECISIONS)
        data, test, share = content["data"], content["test"], float(content["choice"]["share"])
        sizes = [f"{len(data['parts'][key]):,} {name}" for key, name in (("train", "training"), ("val", "validation"))]
        name, top1 = printable(str(data.get("name") or folder.resolve().name)), float(test["top1"])
        images = f"{', '.join(sizes)} and {counted(int(test['count']), 'test image')}"
        kept = {0.0: "probe", 1.0: "fine-tuned"}.get(share, f"interpolation with {share:.0%} of the fine-tuned weights")
        epochs, tested = int(content["training"]["epochs"]), int(test["count"])
        low, high = wilson_interval(top1 * tested / 100, tested)  # a ValueError of impossible numbers, too
        interval = f"95 % interval {100 * low:.2f} to {100 * high:.2f} %"
    except (ConfigError, TypeError, KeyError, ValueError, AttributeError) as error:
        logger.warning("%s is left out: %r", folder / DECISIONS, error)
        return None
    try:
        record = read_results(folder / TEST_RESULTS, "evaluation")
        is_own = (record["evaluation"]["count"], record["accuracy"]["raw"]["top1"]) == (tested, top1)
    except (ConfigError, KeyError):
        is_own = False
    return FineTuned(name, images, epochs, kept, tested, top1, interval, record["commit"] if is_own else None)
