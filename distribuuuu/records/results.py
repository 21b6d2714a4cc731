"""results.json of a run: schema, atomic writing, loading.

Epochs count from 1 and accuracies are percentages; null means unknown. `SCHEMA` lists the keys and their types:

- `config`: the config file, e.g. `fashion_mnist/resnet14`; `overrides`: its options changed on the command line;
  `config_hash`: equal for all seeds of one config, see `hash_config`.
- `accuracy`: loss and metrics of the `raw` weights and, if there is one, of their moving average, `ema`; each of the
  last and of the best epoch. The best one is selected on the same images, so it is optimistic.
- `evaluation.metrics`: metrics and display names; the first selects the best epoch. `evaluation.k`: k of `topk`.
- `training.hours`: over all starts, including evaluation; `training.images_per_s`: training steps of all starts.
- `weights_sha256`: of the weights of the last planned epoch by kind, independent of the file format (`hash_tensors`);
  `environment`: with `hardware` and `versions`, what their last bits depend on. Files of older versions have neither.
- `plugins`: the SHA-256 of the file of each plug-in, if there are any.
- `peak_memory.mib`: maximum over all starts of the memory allocated by a process on its GPU (`of`: "cuda"), else of the
  host memory of the main process ("host").

test_results.json of test_net.py has the same keys except `training` and `seed`, and `weights`, the evaluated file.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distribuuuu.config import Config, ConfigError, run_files
from distribuuuu.config.config_node import iter_options
from distribuuuu.config.declaration import AUTO
from distribuuuu.config.derived import eval_crop_size, eval_resize, show_size
from distribuuuu.config.errors import counted
from distribuuuu.config.json_file import load_json
from distribuuuu.config.options import option_of
from distribuuuu.config.plugins import hash_plugins
from distribuuuu.config.registry import dataset_name
from distribuuuu.files.atomic_file import replacing
from distribuuuu.records.log_table import format_result

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
FILE_NAME, TEST_FILE_NAME = run_files.RESULTS, run_files.TEST_RESULTS
_NUMBER, _MAYBE_NUMBER, _MAYBE_TEXT = (int, float), (int, float, type(None)), (str, type(None))
_MAYBE_INT = (int, type(None))  # null: the best epoch of a resumed run whose checkpoint did not record it
_SIZE = (int, list)  # a side, or [height, width]
_EVALUATION = {"epoch": int, "loss": _MAYBE_NUMBER}
SCHEMA: dict[str, Any] = {
    "schema": int,
    "kind": str,
    "finished": bool,
    "config": _MAYBE_TEXT,
    "overrides": dict,
    "config_hash": str,
    "seed": int,
    "model": {"arch": str, "params_m": _NUMBER},
    "data": {"name": str, "folder": _MAYBE_TEXT, "num_classes": int, "num_train": int, "num_val": int},
    "evaluation": {"resize": _SIZE, "crop": _SIZE, "interpolation": str, "count": int},
    "accuracy": {"raw": {"last": _EVALUATION, "best": {**_EVALUATION, "epoch": _MAYBE_INT}}},
    "training": {
        "px": _SIZE,
        "epochs_done": int,
        "epochs_planned": int,
        "global_batch": int,
        "processes": int,
        "hours": _NUMBER,
        "images_per_s": _MAYBE_NUMBER,
    },
    "peak_memory": {"mib": _MAYBE_NUMBER, "of": str},
    "hardware": str,
    "versions": dict,
    "commit": _MAYBE_TEXT,
}


# --------------------------------------------------------------------------------------- config


def hash_config(cfg: Config) -> str:
    """Return the SHA-256 of `hashed` options that are not at their `hash_default`: equal for all seeds of a config.

    A `neutral` option of the command line is not meant to change results: the value that it replaces is hashed.
    """
    # Not sorted: the order of the patterns in FINETUNE.LR_MULT matters.
    options = [(key, value) for key, value in iter_options(cfg) if option_of(key).hashed]
    options = [(key, cfg.replaced.get(key, value) if option_of(key).neutral else value) for key, value in options]
    values = [(key, AUTO if is_found(cfg, key) else value) for key, value in options]
    values = [(key, value) for key, value in values if value != option_of(key).hash_default]
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()


def is_found(cfg: Config, key: str) -> bool:
    """Tell whether the value of an option was `auto` and has been found on this machine."""
    return cfg.origins.get(key, "").startswith(f"{AUTO}, ")


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
    given = [(key, value) for key, value in iter_options(cfg) if cfg.origins.get(key) == "command line"]
    return {key: value for key, value in given if option_of(key).hashed and not option_of(key).neutral}


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


# ---------------------------------------------------------------------------------------- writing


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
        "model": {"arch": cfg.MODEL.ARCH, "params_m": sum(one.numel() for one in model.parameters()) / 1e6},
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
        **({"plugins": hash_plugins(cfg.PLUGINS)} if cfg.PLUGINS else {}),
    }


class RunResults:
    """OUT_DIR/results.json of a training run, rewritten after every evaluation. Every process must create one.

    Args:
        run: the run, see engine/run.py.
        hash_weights: returns a digest of the weights of a kind, by the content of a checkpoint and the kind.
    """

    def __init__(self, run: Any, hash_weights: Callable[[dict[str, Any], str], str]):
        cfg, plan, self._hash_weights = run.cfg, run.train_loader.plan, hash_weights
        self.path = Path(cfg.OUT_DIR) / FILE_NAME
        metadata = collect_metadata(cfg, run.task, run.state.model)
        images = {"num_train": len(run.train_loader.images), "num_val": len(run.val_loader.images)}
        # What LOSS.CLASS_WEIGHTS auto has found.
        weights = getattr(getattr(run.task, "criterion", None), "weights", None)
        is_auto = weights is not None and isinstance(cfg.LOSS.CLASS_WEIGHTS, str)
        self.metadata = {
            **metadata,
            "data": {**metadata["data"], **images},
            "training": {
                "px": cfg.TRAIN.IM_SIZE,
                "epochs_planned": cfg.OPTIM.MAX_EPOCH,
                "global_batch": plan.global_batch,
                "processes": plan.world_size,
                **({"class_weights": weights.tolist()} if is_auto else {}),
            },
        }
        self._memory_of = "cuda" if run.task.device.type == "cuda" else "host"
        from distribuuuu.distributed import comm as dist

        if dist.is_main() and (run.state.epoch, run.state.step) == (0, 0):
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
    """Log evaluations and write them to OUT_DIR/test_results.json. Every process must call it.

    Args:
        cfg: the config.
        task: the task that computed the metrics.
        model: the evaluated model.
        weights: the file of its weights.
        evaluations: the result of `evaluate` for each kind of weights, e.g. {"raw": ...}.
    """
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
    path = Path(cfg.OUT_DIR) / TEST_FILE_NAME
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


# ---------------------------------------------------------------------------------------- reading


def read_results(path: str | os.PathLike, kind: str = "training") -> dict:
    """Return the results of a training run, or of an evaluation (`kind` "evaluation"); all values have their types.

    Raises:
        ConfigError: the file does not exist, cannot be read, or does not match the schema.
    """
    record = load_json(path)
    if not isinstance(record, dict) or "schema" not in record:
        raise ConfigError(f"{path}: not a results.json: it has no `schema`")
    if record["schema"] != SCHEMA_VERSION:
        raise ConfigError(f"{path}: `schema`: got {reprlib.repr(record['schema'])}; expected {SCHEMA_VERSION}")
    if record.get("kind") != kind:
        fix = "pass the results.json of a training run" if kind == "training" else "evaluate the run again"
        raise ConfigError(f"{path}: `kind`: got {reprlib.repr(record.get('kind'))}; expected {kind!r}; fix: {fix}")
    if problem := _find_schema_error(record, _build_schema(record)):
        raise ConfigError(f"{path}: {problem}")
    return record


def list_metrics(record: dict) -> dict[str, str]:
    """Map the metrics of a record to their display names; derived from other keys in files of older versions."""
    evaluation = record["evaluation"]
    older = {"map": "map"} if "multilabel" in evaluation else {"top1": "top1", "topk": f"top{evaluation.get('k')}"}
    return evaluation.get("metrics", older)


def _build_schema(record: dict) -> dict[str, Any]:
    """Return the schema with the metrics and the kinds of weights of a record."""
    evaluation, accuracy = record.get("evaluation"), record.get("accuracy")
    kinds = tuple(accuracy) if isinstance(accuracy, dict) else ("raw",)
    expected = dict(SCHEMA["evaluation"])
    metrics: dict[str, Any] = {}
    if isinstance(evaluation, dict):
        listed = list_metrics(record)
        if isinstance(listed, dict):
            metrics = dict.fromkeys(listed, _MAYBE_NUMBER)
        if "metrics" in evaluation:
            expected["metrics"] = dict.fromkeys(metrics, str) if isinstance(listed, dict) else dict
        if "topk" in metrics:
            expected["k"] = int
    result = {**_EVALUATION, **metrics}
    if record["kind"] == "evaluation":
        del result["epoch"]
        data = {key: SCHEMA["data"][key] for key in ("name", "folder", "num_classes")}
        same = {
            key: value for key, value in SCHEMA.items() if key not in ("finished", "seed", "training", "peak_memory")
        }
        return {**same, "weights": str, "data": data, "evaluation": expected, "accuracy": dict.fromkeys(kinds, result)}
    results = dict.fromkeys(("raw", *kinds), {"last": result, "best": {**result, "epoch": _MAYBE_INT}})
    newer = dict.fromkeys(record.keys() & {"weights_sha256", "environment"}, dict)
    return {**SCHEMA, **newer, "evaluation": expected, "accuracy": results}


def _find_schema_error(value: Any, schema: Any, name: str = "") -> str | None:
    """Return the first missing key or value of a wrong type.

    Args:
        value: the JSON value.
        schema: a type, a tuple of types, or a dictionary of schemas by key.
        name: dotted key of the value.
    """
    if not isinstance(schema, dict):
        matches = isinstance(value, schema) and (not isinstance(value, bool) or schema is bool)
        is_huge = isinstance(value, _NUMBER) and abs(value) >= 1 << 64
        if matches and not is_huge:
            return None
        names = " or ".join(one.__name__ for one in (schema if isinstance(schema, tuple) else (schema,)))
        return f"`{name}`: got {reprlib.repr(value)}; expected {names}{' below 2**64' if is_huge else ''}"
    if not isinstance(value, dict):
        return f"`{name}`: got {reprlib.repr(value)}; expected dict"
    for key, inner in schema.items():
        inner_name = f"{name}.{key}" if name else key
        if key not in value:
            return f"`{inner_name}` is missing"
        if problem := _find_schema_error(value[key], inner, inner_name):
            return problem
    return None
