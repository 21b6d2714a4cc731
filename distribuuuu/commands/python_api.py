"""The Python API of the commands that work on data and on trained models: export, probe, report, doctor and split.

A command can be deleted, and its function then raises a ConfigError. Errors are exceptions; nothing exits the process.
"""

import contextlib
import importlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distribuuuu.api import Overrides, _as_pairs
from distribuuuu.commands.main import find_commands
from distribuuuu.config import ConfigError

Run = str | os.PathLike


def export(
    run: Run,
    format: str,
    out: str | os.PathLike,
    images: str | os.PathLike | Sequence[str | os.PathLike] = (),
    check: bool = True,
    overrides: Overrides = (),
) -> dict[str, Any]:
    """Write a trained model to a new folder for other programs, and check it, like `distribuuuu export`.

    Args:
        run: the OUT_DIR of a run, a checkpoint, an exported folder, or the name of published weights, e.g. timm/NAME.
        format: timm, safetensors or onnx.
        out: the new folder.
        images: files or folders to check it on; empty: the evaluation set.
        check: False: do not check it.
        overrides: options as for `train`.

    Returns:
        The content of export.json: `verified` is False if it does not answer as `predict` does, None if not checked.

    Raises:
        ConfigError: it cannot be exported.
    """
    words = [run, "--format", format, "--out", out, *_as_pairs(overrides)]
    images = [images] if isinstance(images, (str, os.PathLike)) else images
    _call("export", [*words, *([] if check else ["--no-check"]), *(["--images", *images] if images else [])])
    return json.loads(Path(out).expanduser().joinpath("export.json").read_text(encoding="utf-8"))


def probe(run: Run, overrides: Overrides = ()) -> dict[str, Any]:
    """Measure the features of a model by k-NN and a linear probe, like `distribuuuu probe`; return probe.json."""
    return json.loads(_call("probe", [run, "--format", "json", *_as_pairs(overrides)]))


def report(run: Run, out: str | os.PathLike | None = None) -> dict[str, Any]:
    """Write the page of a run, like `distribuuuu report`; return all its figures.

    Args:
        run: its OUT_DIR, with the predictions of an evaluation.
        out: the page; None: report.html in OUT_DIR.
    """
    _call("report", [run, *(["--out", out] if out else [])])
    return json.loads(_call("report", [run, "--format", "json"]))


def doctor(data: str | os.PathLike | None = None, overrides: Overrides = ()) -> dict[str, Any]:
    """Check a data set, like `distribuuuu doctor --format json`; return its report, whose `status` is "clean" if it is.

    Args:
        data: the folder; None: the data of the overrides.
        overrides: options as for `train`, e.g. {"TRAIN.DATASET": "photos", "DATA.NAME": "list"}.
    """
    return json.loads(_call("doctor", [*([data] if data else []), *_as_pairs(overrides), "--format", "json"]))


def split(source: str | os.PathLike, out: str | os.PathLike, overrides: Overrides = (), **flags: Any) -> list[Path]:
    """Divide the images of a folder or a table into lists, like `distribuuuu split`; return the files of the lists.

    Args:
        source: FOLDER/CLASS/IMAGE, or a table.
        out: the folder of the lists.
        overrides: of a table, its columns: {"DATA.TABLE.path": "id"}.
        flags: those of the command, e.g. val=0.2, test=0.2, folds=5, group_by=REGEX, seed=1.
    """
    words = [word for name, value in flags.items() if value for word in (f"--{name.replace('_', '-')}", value)]
    _call("split", [source, *_as_pairs(overrides), "--out", out, *words])
    return sorted(Path(out).rglob("*.csv"))


def _call(name: str, words: Sequence[Any]) -> str:
    """Return what a command prints to standard output."""
    if (command := find_commands().get(name)) is None:
        raise ConfigError(f"the command {name} is not part of this installation")
    function = getattr(importlib.import_module(command.module), name)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        function("", _as_pairs(words))
    return printed.getvalue()
