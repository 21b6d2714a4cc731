"""results.json of a run: writing it; docs/MODEL_ZOO.md describes its content, read_results.py reads it.

Epochs count from 1, accuracies are percentages, and null means unknown. `accuracy` has the last and the best epoch of
each kind of weights; the best one is selected on the same images, so it is optimistic. `peak_memory.mib` is the maximum
over all starts of the memory allocated by a process on its GPU (`of`: "cuda"), else of the host memory of the main
process ("host"). test_results.json has the same keys except `training` and `seed`, and `weights`, the evaluated file.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Sized
from importlib import import_module
from pathlib import Path
from typing import Any

from distribuuuu.config import Config, run_files
from distribuuuu.config.config_node import get_value, iter_options
from distribuuuu.config.derived import eval_crop_size, eval_resize, show_size
from distribuuuu.config.errors import counted
from distribuuuu.config.options import DECLARED, OPEN_SECTIONS, option_of
from distribuuuu.config.reader import split_key
from distribuuuu.config.registry import dataset_name
from distribuuuu.files.atomic_file import replacing
from distribuuuu.records.metric_writers import format_result

logger = logging.getLogger(__name__)

# Version of results.json and test_results.json.
SCHEMA_VERSION = 1


def hash_config(cfg: Config) -> str:
    """Return the SHA-256 of `hashed` options that are not at their `hash_default`: equal for all seeds of a config.

    A `neutral` option of the command line is not meant to change results: the value that it replaces is hashed.
    """
    # Not sorted: the order of the patterns in FINETUNE.LR_MULT matters.
    values: list[tuple[str, Any]] = []
    for key, option in DECLARED.items():
        if option.is_open:
            values += iter_options(get_value(cfg, key), f"{key}.")
        elif option.hashed:
            value = option.default if option.removed else get_value(cfg, key)
            value = cfg.replaced.get(key, value) if option.neutral else value
            values += [(key, value)] if value != option.hash_default else []
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()


def config_name(cfg: Config) -> str | None:
    """Return the folder and the name of the YAML file, e.g. 'imagenet/resnet50'; None without a file.

    Of a file with bases, it is its own name; several files of --cfg are joined with '+'.
    """
    # The origin of a value of a base ends with the file of --cfg.
    files = (re.fullmatch(r"(.+):\d+", origin.rpartition(", base of ")[2]) for origin in cfg.origins.values())
    paths = dict.fromkeys(Path(match[1]) for match in files if match)
    return "+".join("/".join([*path.absolute().parts[-2:-1], path.stem]) for path in paths) or None


def list_overrides(cfg: Config) -> dict[str, Any]:
    """Map the options of the command line to their values, except `neutral` ones and those that are not `hashed`."""
    given = [key for key, origin in cfg.origins.items() if origin == "command line"]
    kept = [key for key in given if option_of(key).hashed and not option_of(key).neutral]
    places = {key: split_key(key) for key in kept}
    return {key: {} if key in OPEN_SECTIONS else get_value(cfg, section)[name] if section else cfg[name]
            for key, (section, name) in places.items()}  # fmt: skip


def describe_evaluation(cfg: Config) -> dict[str, Any]:
    """Return the preprocessing of evaluation images; sizes in pixels."""
    return {
        "resize": eval_resize(cfg),
        "crop": eval_crop_size(cfg),
        "interpolation": cfg.TEST.INTERPOLATION,
        **({"labels": cfg.TEST.LABELS} if cfg.TEST.LABELS else {}),
        **({"crop_mode": cfg.TEST.CROP} if cfg.TEST.CROP != "center" else {}),
        **({"flip": True} if cfg.TEST.FLIP else {}),  # logits averaged with those of the mirrored image
        **({"shift": cfg.TEST.SHIFT} if cfg.TEST.SHIFT else {}),  # and with those of shifted images, in pixels
    }


def collect_metadata(cfg: Config, task: Any, model: Any) -> dict[str, Any]:
    """Return the entries of results.json that are known before training. Every process must call it."""
    is_synthetic = dataset_name(cfg) in ("dummy", "shapes")
    topk = task.eval_metrics.get("topk")
    from distribuuuu.distributed import comm as dist  # imports torch, which commands that read results do not need
    from distribuuuu.records.environment import describe_environment, describe_hardware, find_commit, list_versions

    return {
        "config": config_name(cfg),
        "overrides": list_overrides(cfg),
        "config_hash": hash_config(cfg),
        "model": {
            "arch": cfg.MODEL.ARCH,
            "params_m": sum(one.numel() for one in model.parameters()) / 1e6,
            **({"license": cfg.MODEL.LICENSE} if cfg.MODEL.LICENSE else {}),  # of the weights that it started with
        },
        "data": {
            "name": dataset_name(cfg),
            "folder": None if is_synthetic else Path(cfg.TRAIN.DATASET).absolute().name,
            "num_classes": cfg.MODEL.NUM_CLASSES,
        },
        "evaluation": {
            **describe_evaluation(cfg),
            "metrics": {name: metric.label(name) for name, metric in task.eval_metrics.items()},
            **({"k": topk.topk} if topk else {}),
            **({"multilabel": True} if task.multilabel else {}),
        },
        "hardware": describe_hardware(task.device),
        "environment": describe_environment(task.device),
        "versions": list_versions(),
        "commit": find_commit() if dist.is_main() else None,
        **({"plugins": import_module("distribuuuu.config.plugins").hash_plugins(cfg.PLUGINS)} if cfg.PLUGINS else {}),
    }


class RunResults:
    """OUT_DIR/results.json of a run, rewritten after every evaluation. Every process must create one.

    `hash_weights` returns a digest of the weights of a kind, by the content of a checkpoint and the kind.
    """

    def __init__(self, training: Any, val_images: Sized, hash_weights: Callable[[dict[str, Any], str], str]):
        # `training` is not kept: the run holds these results, and its loader workers end when it is deleted.
        cfg, plan, self._hash_weights = training.cfg, training.train_loader.plan, hash_weights
        self.path = Path(cfg.OUT_DIR) / run_files.RESULTS
        metadata = collect_metadata(cfg, training.task, training.state.model)
        images = {"num_train": len(training.train_loader.images), "num_val": len(val_images)}
        # What LOSS.CLASS_WEIGHTS auto has found.
        weights = getattr(getattr(training.task, "criterion", None), "weights", None)
        is_auto = isinstance(cfg.LOSS.CLASS_WEIGHTS, str)
        self.metadata = {
            **metadata,
            "data": {**metadata["data"], **images},
            "training": {
                "px": cfg.TRAIN.IM_SIZE,
                "epochs_planned": cfg.OPTIM.MAX_EPOCH,
                "global_batch": plan.global_batch,
                "processes": plan.world_size,
                **({"class_weights": weights.tolist()} if weights is not None and is_auto else {}),
                **{"mode": note for _, note in cfg.notes if ": auto, " in note},  # noqa: B035  # engine/fast_mode.py
            },
        }
        self._memory_of = "cuda" if training.task.device.type == "cuda" else "host"
        from distribuuuu.distributed import comm as dist

        if dist.is_main() and (training.state.epoch, training.state.step) == (0, 0):
            # Not to be mistaken for the results of the run that starts.
            with contextlib.suppress(OSError):
                os.replace(self.path, self.path.with_name("results.older.json"))

    def write(self, content: dict[str, Any]) -> None:
        """Write the results in a checkpoint's content, which follows an evaluation; raises OSError if that fails."""
        evaluations, epochs, timing = content["evaluations"], content["epoch"] + 1, content["timing"]
        accuracy = {}
        for kind, result in evaluations.items():
            last = {"epoch": epochs, **_drop_count(result)}
            # Of the best epoch of an older checkpoint, only the selecting metric is known.
            accuracy[kind] = {"last": last, "best": {**dict.fromkeys(last), **content["bests"][kind]}}
        facts, is_finished = self.metadata, content["finished"]
        training = {
            **facts["training"],
            "epochs_done": epochs,
            "hours": round(content["seconds"] / 3600, 6),
            "images_per_s": timing["images"] / timing["seconds"] if timing["seconds"] else None,
            **({"ended_early": True} if is_finished and epochs < facts["training"]["epochs_planned"] else {}),
        }
        record = {
            "schema": SCHEMA_VERSION,
            "kind": "training",
            "finished": is_finished,
            **facts,
            "seed": content["seed"],
            "training": training,
            "evaluation": {**facts["evaluation"], "count": evaluations["raw"]["count"]},
            "accuracy": accuracy,
            "peak_memory": {"of": self._memory_of, "mib": content["peak_memory_mib"]},
        }
        if is_finished:
            record["weights_sha256"] = {kind: self._hash_weights(content, kind) for kind in evaluations}
        _write_json(self.path, record)


def write_test_results(cfg: Config, task: Any, model: Any, weights: str, evaluations: dict[str, dict]) -> None:
    """Log evaluations, by kind of weights, and write them to OUT_DIR/test_results.json. Every process must call it."""
    metadata = collect_metadata(cfg, task, model)
    size = metadata["evaluation"]
    sides = [show_size(size[name]) for name in ("resize", "crop")]
    logger.info("weights: %s; images: resized to %s px, cropped to %s px", weights, *sides)
    for kind, result in evaluations.items():
        images = counted(result["count"], "image") + ("" if kind == "raw" else f", {kind} weights")
        logger.info("validation of %s: %s", images, format_result(result, size["metrics"], 3))
    from distribuuuu.distributed import comm as dist

    if not dist.is_main():
        return
    record = {
        "schema": SCHEMA_VERSION,
        "kind": "evaluation",
        **metadata,
        "weights": weights,
        "evaluation": {**size, "count": next(iter(evaluations.values()))["count"]},
        "accuracy": {kind: _drop_count(result) for kind, result in evaluations.items()},
    }
    path = Path(cfg.OUT_DIR) / run_files.TEST_RESULTS
    try:
        _write_json(path, record)
    except OSError as error:
        logger.warning("Cannot write %s: %s", path, error)


def _drop_count(result: dict) -> dict:
    return {name: value for name, value in result.items() if name != "count"}


def _write_json(path: Path, record: dict) -> None:
    text = json.dumps(replace_nonfinite(record), indent=2, default=str, allow_nan=False) + "\n"
    with replacing(path, "w", encoding="utf-8", newline="") as file:
        file.write(text)


def replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON cannot represent, by None."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
