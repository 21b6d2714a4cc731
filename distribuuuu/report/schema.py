"""What results.json holds, and whether a file does: names, and the types of what they stand for."""

import reprlib
from typing import Any

_NUMBER, _MAYBE_NUMBER, _MAYBE_TEXT = (int, float), (int, float, type(None)), (str, type(None))
_MAYBE_INT = (int, type(None))  # null: the best epoch of a resumed run whose checkpoint did not record it
_EVALUATION = {"epoch": int, "loss": _MAYBE_NUMBER}
SCHEMA = {
    "schema": int,
    "kind": str,
    "finished": bool,
    "config": _MAYBE_TEXT,
    "overrides": dict,
    "config_hash": str,
    "seed": int,
    "model": {"arch": str, "params_m": _NUMBER},
    "data": {"name": str, "folder": _MAYBE_TEXT, "num_classes": int, "num_train": int, "num_val": int},
    "evaluation": {"resize": int, "crop": int, "interpolation": str, "count": int},
    "accuracy": {"raw": {"last": _EVALUATION, "best": {**_EVALUATION, "epoch": _MAYBE_INT}}},
    "training": {
        "px": int,
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


def find_schema_error(record: dict) -> str | None:
    """Return what the results of a training run lack, or hold of another type than they should."""
    return _find_misfit(record, _shape_of(record))


def list_metrics(record: dict) -> dict[str, str]:
    """Return the metrics of a file and their display names; older files do not list theirs."""
    evaluation = record["evaluation"]
    older = {"map": "map"} if "multilabel" in evaluation else {"top1": "top1", "topk": f"top{evaluation.get('k')}"}
    return evaluation.get("metrics", older)


def _shape_of(record: dict) -> dict:
    """Return what a file has to hold: the metrics that it lists, of one or two kinds of weights."""
    evaluation, accuracy = record.get("evaluation"), record.get("accuracy")
    kinds = ("raw", "ema") if isinstance(accuracy, dict) and "ema" in accuracy else ("raw",)
    metrics, seen = {}, dict(SCHEMA["evaluation"])
    if isinstance(evaluation, dict):
        if "metrics" in evaluation:
            listed = evaluation["metrics"]
            seen["metrics"] = dict.fromkeys(listed, str) if isinstance(listed, dict) else dict
        is_listed = isinstance(evaluation.get("metrics", {}), dict)
        metrics = dict.fromkeys(list_metrics(record), _MAYBE_NUMBER) if is_listed else {}
        if "topk" in metrics:
            seen["k"] = int
    measured = {**_EVALUATION, **metrics}
    accuracy = dict.fromkeys(kinds, {"last": measured, "best": {**measured, "epoch": _MAYBE_INT}})
    return {**SCHEMA, "evaluation": seen, "accuracy": accuracy}


def _find_misfit(value: Any, shape: Any, where: str = "") -> str | None:
    """Return what is missing in the value, or is of another type than the shape says."""
    if not isinstance(shape, dict):
        fits = isinstance(value, shape) and (not isinstance(value, bool) or shape is bool)
        is_huge = isinstance(value, int) and abs(value) >= 1 << 64
        return None if fits and not is_huge else f"`{where}` is {reprlib.repr(value)}"
    if not isinstance(value, dict):
        return f"`{where}` is {reprlib.repr(value)}"
    for key, inner in shape.items():
        name = f"{where}.{key}" if where else key
        problem = _find_misfit(value[key], inner, name) if key in value else f"lacks `{name}`"
        if problem:
            return problem
    return None
