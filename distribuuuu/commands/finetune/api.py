"""The Python function of the command finetune."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distribuuuu.api import Overrides, _as_pairs, _run_of_program
from distribuuuu.launch.host import count_cores


@dataclasses.dataclass(frozen=True)
class FinetuneResult:
    """The result of a fine-tuning.

    Attributes:
        out_dir: the folder of the run, which `evaluate`, `predict` and `load_run` accept.
        top1: the accuracy on the test images, in percent.
        results: the content of finetune.json.
    """

    out_dir: Path
    top1: float
    results: dict[str, Any] = dataclasses.field(repr=False)


def finetune(
    folder: str | os.PathLike,
    minutes: float = 10.0,
    backbone: str | os.PathLike | Sequence[str] = (),
    out: str | os.PathLike | None = None,
    overrides: Overrides = (),
    seed: int = 0,
) -> FinetuneResult:
    """Make the best classifier of images that some minutes allow, like the command `distribuuuu finetune`.

    Args:
        folder: images in folders of classes or of splits, an archive of them, or a table.
        minutes: the time for all of it, roughly.
        backbone: timm/NAME, a run or a file; of several, the best one is fine-tuned. Empty: the default.
        out: the folder of the run; None: exp/NAME of the images.
        overrides: options of the training, as for `train`.
        seed: of the split and the training.

    Raises:
        ConfigError: the images, the backbone or the folder cannot be used.
    """
    from distribuuuu.commands.finetune.finetune import build_parser, prepare

    names = [os.fspath(backbone)] if isinstance(backbone, (str, os.PathLike)) else list(backbone)
    words = [os.fspath(folder), f"--minutes={minutes}", "--seed", str(seed), "--workers", str(count_cores())]
    words += ["--backbone", *names] if names else []
    words += ["--out", os.fspath(out)] if out else []
    flags = prepare(build_parser("finetune"), [*words, *_as_pairs(overrides)])
    with _run_of_program():
        from distribuuuu.commands.finetune.stages import run_stages

        results = run_stages(flags)
    return FinetuneResult(flags.out, results["test"]["top1"], results)
