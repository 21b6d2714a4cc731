"""What results.json holds, and whether a file does: names, and the types of what they stand for."""

import reprlib
from typing import Any

_NUMBER, _MAYBE_NUMBER, _MAYBE_TEXT = (int, float), (int, float, type(None)), (str, type(None))
_MAYBE_INT = (int, type(None))  # null: the best epoch of a resumed run whose checkpoint did not record it
_EVALUATION = {"epoch": int, "top1": _MAYBE_NUMBER, "topk": _MAYBE_NUMBER, "loss": _MAYBE_NUMBER}
_MULTILABEL = {"epoch": int, "map": _MAYBE_NUMBER, "loss": _MAYBE_NUMBER}
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
    "evaluation": {"resize": int, "crop": int, "interpolation": str, "k": int, "count": int},
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


def _shape_of(record: dict) -> dict:
    """Return what a file is to hold: accuracies of one or two kinds of weights, with one label an image or several."""
    seen, accuracy = record.get("evaluation"), record.get("accuracy")
    kinds = ("raw", "ema") if isinstance(accuracy, dict) and "ema" in accuracy else ("raw",)
    evaluation, measured = SCHEMA["evaluation"], _EVALUATION
    if isinstance(seen, dict) and "multilabel" in seen:
        evaluation = {"multilabel" if key == "k" else key: kind for key, kind in evaluation.items()}
        evaluation, measured = {**evaluation, "multilabel": bool}, _MULTILABEL
    accuracy = dict.fromkeys(kinds, {"last": measured, "best": {**measured, "epoch": _MAYBE_INT}})
    return {**SCHEMA, "evaluation": evaluation, "accuracy": accuracy}


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
