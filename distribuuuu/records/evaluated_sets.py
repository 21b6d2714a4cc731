"""File of the predictions of an evaluation: those of another set of images do not replace the run's own."""

import json
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu.config.run_files import PREDICTIONS


def choose_file(out_dir: str | os.PathLike, meta: Mapping[str, Any]) -> Path:
    """Return where an evaluation writes its predictions, by their `meta`.

    It is OUT_DIR/predictions.npz, unless that holds those of another set: then predictions_FOLDER_DIGEST.npz.
    """
    path = Path(out_dir) / PREDICTIONS
    own = _read_meta(path)
    names = ("digest",) if "digest" in own else ("folder", "data")
    if not own or all(own.get(name) == meta.get(name) for name in names):
        return path
    folder = re.sub(r"[^\w-]+", "-", Path(meta.get("folder") or meta["data"]).name)[:60]
    return path.with_name(f"{path.stem}_{folder}_{meta['digest'][:8]}{path.suffix}")


def list_predictions(out_dir: str | os.PathLike) -> list[Path]:
    """Return the files of predictions of a run, one for each evaluated set, the one written last first."""
    found = Path(out_dir).glob(f"{Path(PREDICTIONS).stem}*.npz")
    return sorted(found, key=lambda path: (-path.stat().st_mtime_ns, path.name))


def _read_meta(path: Path) -> dict[str, Any]:
    """Return the entry `meta` of a file; empty if there is none that can be read."""
    try:
        with np.load(path, allow_pickle=False) as file:
            meta = json.loads(str(file["meta"]))
            return meta if isinstance(meta, dict) else {}
    except (OSError, ValueError, LookupError, MemoryError, zipfile.BadZipFile):
        return {}
