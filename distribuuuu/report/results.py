"""What a run comes to, in results.json: what is in it, writing it whole, and reading it back.

Epochs count from 1, accuracies are percent; null stands for what is not known. `SCHEMA` in result_shape.py says what is
where:

- `config`: the file, e.g. `fashion_mnist/resnet14`; `overrides`: what the command line changed in it;
  `config_hash`: the same for all seeds of one config, see `hash_config`.
- `accuracy`: loss and metrics of the `raw` weights and, where there is one, of their moving average, `ema`; each of the
  last epoch and of the best one, which was selected by the same images, so that it is optimistic.
- `evaluation.metrics`: the metrics and their display names, the selecting one first; `evaluation.k`: that of `topk`.
- `training.hours`: of all starts, evaluation included; `training.images_per_s`: of the steps of all starts.
- `peak_memory.mib`: the most that a process had allocated on its GPU (`of`: "cuda"), else the most that the main
  process had of the machine ("host"); of all starts.

test_net.py leaves test_results.json: the same without `training` and `seed`, and with `weights`, the file evaluated.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distribuuuu.config import Config, ConfigError
from distribuuuu.config.atomic_file import replacing
from distribuuuu.config.tree import iter_options
from distribuuuu.report.schema import find_schema_error

logger = logging.getLogger(__name__)

SCHEMA = 1
FILE_NAME, TEST_FILE_NAME = "results.json", "test_results.json"
# Options that the config hash leaves out: they say where, not what, and seeds of one config are to share it. All of
# LOG.* is left out too.
NOT_HASHED = ("OUT_DIR", "CFG_DEST", "RNG_SEED", "TRAIN.DATASET", "TEST.DATASET", "DATA.CACHE_DIR")
# What changes no result, or is not meant to: it is no other recipe, though its hash is another one.
SPEED_ONLY = ("TRAIN.WORKERS", "TRAIN.PIN_MEMORY", "TRAIN.PRINT_FREQ", "TRAIN.AUTO_RESUME", "TEST.BATCH_SIZE",
              "TEST.PRINT_FREQ", "DATA.WORKER_KIND", "DATA.DOWNLOAD", "DIST.BACKEND", "DIST.TIMEOUT_S",
              "DIST.STARTUP_TIMEOUT_S", "DIST.BUCKET_MB", "CHECKPOINT.EVERY_STEPS", "CHECKPOINT.MAX_HOURS",
              "CHECKPOINT.KEEP_LAST", "CHECKPOINT.KEEP_EVERY")  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        epochs: finished epochs.
        hours: of training so far, over all starts, evaluation included.
        images_per_s: of the training steps; None: none were timed.
        peak_memory_mib: the most that was in use; None: not known.
        metric: the one that selects the best evaluation, e.g. "top1".
        bests: its value and the epoch, from 1, of the best evaluation of each kind of weights; epoch None: the resumed
            checkpoint did not record it.
    """

    epochs: int
    hours: float
    images_per_s: float | None
    peak_memory_mib: float | None
    metric: str
    bests: dict[str, tuple[float, int | None]]


# --------------------------------------------------------------------------------------- the config


def _is_hashed(key: str) -> bool:
    return key not in NOT_HASHED and not key.startswith("LOG.")


def hash_config(cfg: Config) -> str:
    """Return the SHA-256 of every option but those of `NOT_HASHED` and LOG.*: the same for all seeds of a config."""
    # In the tree's own order: that of the patterns in FINETUNE.LR_MULT has a meaning.
    values = [(key, value) for key, value in iter_options(cfg) if _is_hashed(key)]
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()


def name_config(cfg: Config) -> str | None:
    """Return the folder and the name of the YAML file, e.g. 'imagenet/resnet50'; None without one."""
    # What follows from another value, and names that in its origin, comes after it.
    files = (re.fullmatch(r"(.+):\d+", origin) for origin in cfg.origins.values())
    path = next((Path(match[1]) for match in files if match), None)
    return path and "/".join([*path.absolute().parts[-2:-1], path.stem])


def list_overrides(cfg: Config) -> dict[str, Any]:
    """Return what the command line changed, but for `NOT_HASHED`, LOG.* and `SPEED_ONLY`: key -> value."""
    return {
        key: value
        for key, value in iter_options(cfg)
        if _is_hashed(key) and key not in SPEED_ONLY and cfg.origins.get(key) == "command line"
    }


def describe_evaluation(cfg: Config) -> dict[str, Any]:
    """Return what evaluation does with an image, in pixels."""
    return {
        "resize": cfg.TEST.IM_SIZE,
        "crop": cfg.TEST.CROP_SIZE or cfg.TRAIN.IM_SIZE,
        "interpolation": cfg.TEST.INTERPOLATION,
        **({"flip": True} if cfg.TEST.FLIP else {}),  # averaged with its mirror image
    }


# ---------------------------------------------------------------------------------------- writing


def write_results(out_dir: str | os.PathLike, facts: dict, progress: Progress, evaluations: dict[str, dict]) -> bool:
    """Write OUT_DIR/results.json after the evaluation of an epoch; return whether the disk took it.

    Args:
        out_dir: the folder of the run.
        facts: what stays the same over the run (`run_results.collect_metadata`).
        progress: how far it has come.
        evaluations: what `evaluate` returned for each kind of weights, "raw" and maybe "ema".
    """
    path = Path(out_dir) / FILE_NAME
    before = _read_loosely(path).get("accuracy", {})
    accuracy = {}
    for kind, result in evaluations.items():
        last = {"epoch": progress.epochs, **_measures(result)}
        accuracy[kind] = {"last": last, "best": _best(last, progress, kind, before.get(kind, {}))}
    training = {
        **facts["training"],
        "epochs_done": progress.epochs,
        "hours": round(progress.hours, 6),
        "images_per_s": progress.images_per_s,
    }
    record = {
        "schema": SCHEMA,
        "kind": "training",
        "finished": progress.epochs >= training["epochs_planned"],
        **facts,
        "training": training,
        "evaluation": {**facts["evaluation"], "count": evaluations["raw"]["count"]},
        "accuracy": accuracy,
        "peak_memory": {**facts["peak_memory"], "mib": progress.peak_memory_mib},
    }
    return write_json(path, record)


def write_test_results(out_dir: str | os.PathLike, facts: dict, weights: str, evaluations: dict[str, dict]) -> bool:
    """Write OUT_DIR/test_results.json after `test_net.py`; the results of the training stay as they are."""
    record = {
        "schema": SCHEMA,
        "kind": "evaluation",
        **facts,
        "weights": weights,
        "evaluation": {**facts["evaluation"], "count": next(iter(evaluations.values()))["count"]},
        "accuracy": {kind: _measures(result) for kind, result in evaluations.items()},
    }
    return write_json(Path(out_dir) / TEST_FILE_NAME, record)


def _measures(result: dict) -> dict:
    return {name: value for name, value in result.items() if name != "count"}


def _best(last: dict, progress: Progress, kind: str, before: dict) -> dict:
    """Return the best evaluation: the last one, or that of an earlier epoch in the file, or its first metric alone."""
    value, epoch = progress.bests.get(kind, (None, last["epoch"]))
    if epoch == last["epoch"]:
        return last
    known = before.get("best", {})
    # A run that went back and took another path may have had another evaluation of that epoch.
    if known.get("epoch") == epoch and known.get(progress.metric) == value:
        return known
    return {**dict.fromkeys(last), "epoch": epoch, progress.metric: value}


def write_json(path: Path, record: dict) -> bool:
    """Write a file that is whole under its name or not there; return whether the disk took it, and warn if not."""
    text = json.dumps(_finite(record), indent=2, default=str, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        logger.warning("%s CANNOT BE WRITTEN: %s", path, error)
        return False
    return True


def write_whole(path: Path, text: str) -> None:
    """Write a text that is whole under its name, or not there.

    Raises:
        OSError: the disk refuses it.
    """
    with replacing(path, "w", encoding="utf-8", newline="") as file:
        file.write(text)


def _finite(value: Any) -> Any:
    """Return the value with null for each number that is infinite or not one: JSON has no word for it."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def set_results_aside(out_dir: str | os.PathLike) -> None:
    """Rename what an older run left, so that nobody takes it for that of the run that starts."""
    path = Path(out_dir) / FILE_NAME
    with contextlib.suppress(OSError):
        os.replace(path, path.with_name("results.older.json"))


# ---------------------------------------------------------------------------------------- reading


def _read_loosely(path: Path) -> dict:
    """Return what is in a file of ours; nothing if it is not one."""
    with contextlib.suppress(ConfigError):
        return read_results(path)
    return {}


def read_results(path: str | os.PathLike) -> dict:
    """Return the results of a training run.

    Raises:
        ConfigError: there is no such file, or it is something else; says what.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        json.dumps(record, ensure_ascii=False, allow_nan=False).encode()  # no NaN, and no text that cannot be written
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not whole JSON: {' '.join(str(error).split())}") from error
    if not isinstance(record, dict) or "schema" not in record:
        raise ConfigError(f"{path}: is not the results of a run: it has no `schema`")
    if record["schema"] != SCHEMA:
        raise ConfigError(f"{path}: has schema {record['schema']!r}; this version reads {SCHEMA}")
    if record.get("kind") != "training":
        raise ConfigError(f"{path}: is of an evaluation alone; name the results.json of a training run")
    if problem := find_schema_error(record):
        raise ConfigError(f"{path}: {problem}")
    return record
