"""Files of results and predictions made by hand, and the HTML of pages about them."""

import copy
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu.records.predictions import write_npz

META = {"schema": 1, "weights": "raw", "epoch": 2, "folder": "/data", "data": "imagefolder", "multilabel": False}


def prediction_arrays(num: int = 40, entries: dict[str, Any] | None = None, **changes: Any) -> dict[str, np.ndarray]:
    """Return the arrays of predictions.npz of N images of 3 classes; `entries` of `meta` and arrays may be replaced."""
    label = np.arange(num, dtype=np.int32) % 3
    return {
        "meta": np.array(json.dumps({**META, **(entries or {})})), "classes": np.array(["a", "b", "c"]),
        "path": np.array([f"val/{index}.jpg" for index in range(num)]), "label": label,
        "loss": np.ones(num, np.float32), "logits": np.eye(3, dtype=np.float32)[label], **changes,
    }  # fmt: skip


def change(record: dict, **changes: Any) -> dict:
    """Return a copy of a record with changes: `training__hours=2` is record["training"]["hours"] = 2."""
    record = copy.deepcopy(record)
    for name, value in changes.items():
        place, (*folders, key) = record, name.split("__")
        for folder in folders:
            place = place[folder]
        place[key] = value
    return record


def change_predictions(run: Path, meta: dict[str, Any], **changes: np.ndarray) -> None:
    """Write predictions.npz of a run again, with other arrays or entries of `meta`."""
    with np.load(run / "predictions.npz") as file:
        arrays = {**file, "meta": np.array(json.dumps({**json.loads(str(file["meta"])), **meta})), **changes}
    write_npz(run / "predictions.npz", arrays)


class Page(HTMLParser):
    """The texts, elements and attributes of a page; raises for elements that are not closed in order, and for links."""

    VOID = ("meta", "link", "img", "input")

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        assert not self.open
        for name, value in self.attributes:
            assert name not in ("src", "href", "srcset", "action") or value.startswith(("data:", "#"))
            assert not name.startswith("on")

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        self.open += [tag] if tag not in self.VOID else []

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)
