"""Reading of results.json and test_results.json, which may come from elsewhere."""

import functools
import operator
import os
import reprlib
from typing import Any

from distribuuuu.config import ConfigError
from distribuuuu.config.json_file import load_json
from distribuuuu.config.run_files import RESULTS
from distribuuuu.records.results import SCHEMA_VERSION

_NUMBER, _MAYBE_NUMBER, _MAYBE_TEXT = (int, float), (int, float, type(None)), (str, type(None))
_SIZE = (int, list)  # a side, or [height, width]
# The keys that each file has, and the types of their values.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "config": _MAYBE_TEXT, "overrides": dict, "config_hash": str, "model.arch": str, "model.params_m": _NUMBER,
    "data.name": str, "data.folder": _MAYBE_TEXT, "data.num_classes": int, "evaluation.resize": _SIZE,
    "evaluation.crop": _SIZE, "evaluation.interpolation": str, "evaluation.count": int, "accuracy": dict,
    "hardware": str, "versions": dict, "commit": _MAYBE_TEXT,
}  # fmt: skip
_FIELDS_OF: dict[str, dict[str, type | tuple[type, ...]]] = {
    "training": {
        "finished": bool, "seed": int, "data.num_train": int, "data.num_val": int, "training.px": _SIZE,
        "training.epochs_done": int, "training.epochs_planned": int, "training.global_batch": int,
        "training.processes": int, "training.hours": _NUMBER, "training.images_per_s": _MAYBE_NUMBER,
        "peak_memory.mib": _MAYBE_NUMBER, "peak_memory.of": str, "accuracy.raw": dict,
    },
    "evaluation": {"weights": str},
}  # fmt: skip
_ENDS = {"training": (".last", ".best"), "evaluation": ("",)}


def read_results(path: str | os.PathLike, kind: str = "training") -> dict:
    """Return the results of a training run, or of an evaluation (`kind`); ConfigError: the file does not hold them."""
    record = load_json(path)
    try:
        check_results(record, kind)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise ConfigError(f"{path}: not a valid {RESULTS}: {reason}") from error
    return record


def check_results(record: Any, kind: str = "training") -> None:
    """Raise an error if a value is missing or has another type than the readers expect."""
    if (record["schema"], record["kind"]) != (SCHEMA_VERSION, kind):
        got, expected = f"schema {record['schema']!r} and kind {record['kind']!r}", f"{SCHEMA_VERSION} and {kind!r}"
        raise ValueError(f"got {got:.100}; expected {expected}; fix: pass the file of another run, or run it again")
    types: dict[str, Any] = {**_FIELDS, **_FIELDS_OF[kind]}
    types |= {key: dict for key in ("weights_sha256", "environment") if key in record}
    metrics = record["evaluation"]["metrics"]
    types |= {"evaluation.k": int} if "topk" in metrics else {}
    for place in (f"accuracy.{name}{end}" for name in record["accuracy"] for end in _ENDS[kind]):
        types |= {f"{place}.{metric}": _MAYBE_NUMBER for metric in ("loss", *metrics)}
        if kind == "training":  # of the best one, it is null if an older checkpoint did not record it
            types[f"{place}.epoch"] = (int, type(None)) if place.endswith("best") else int
    for key, allowed in types.items():
        value = functools.reduce(operator.getitem, key.split("."), record)
        if not isinstance(value, allowed):
            raise ValueError(f"`{key}`: got {reprlib.repr(value)}")
    if not all(isinstance(label, str) for label in metrics.values()):
        raise ValueError("`evaluation.metrics`: expected names")
