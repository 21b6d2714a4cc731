"""predictions.npz made by others: nothing is allocated for what a file claims, and every damage has one message."""

import io
import itertools
import json
import tracemalloc
import zipfile

import numpy as np
import pytest
from support.predictions import META, prediction_arrays

from distribuuuu.commands.stats.stored_predictions import read_predictions
from distribuuuu.config import ConfigError
from distribuuuu.records.predictions import write_npz

NUM = 40


@pytest.fixture
def path(tmp_path):
    return tmp_path / "predictions.npz"


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=True)
    return file.getvalue()


def header(shape: tuple, descr: str = "<f4") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def refused(path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_predictions(path, "run it")
    message = str(caught.value)
    assert f"{path}: not a valid predictions.npz" in message and message.endswith("; fix: run it")


def test_shapes_that_an_entry_cannot_hold_allocate_nothing(path):
    shapes = itertools.cycle([(2**40,), (2**62, 4), (-1,), (NUM, -3)])
    for name, shape in zip(["label", "loss", "logits", "path", "classes", "meta"], shapes, strict=False):
        content = prediction_arrays()
        descr = content.pop(name).dtype.str
        write_npz(path, content)
        with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{name}.npy", header(shape, descr) + bytes(2**20))
            archive.writestr("unused.npy", header((2**31,), "|u1") + bytes(2**23))
        tracemalloc.start()
        refused(path)
        assert tracemalloc.get_traced_memory()[1] < 2**22
        tracemalloc.stop()


@pytest.mark.parametrize("changes", [
    {"path": np.array([{}] * NUM, dtype=object)}, {"label": np.zeros(NUM, ">i4")}, {"classes": None},
    {"label": np.full(NUM, 3, np.int32)}, {"loss": np.zeros((), np.float32)}, {"path": np.array(["a"] * (NUM - 1))},
    {"logits": np.zeros((NUM, 2), np.float32)}, {"path": np.full(NUM, 0x110000, np.uint32).view("U1")},
    {"meta": np.array("[" * 5000)}, {"meta": np.array(json.dumps({**META, "folder": 3}))},
])  # fmt: skip
def test_arrays_of_other_types_or_values_are_refused(path, changes):
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in prediction_arrays(**changes).items():
            if array is not None:
                archive.writestr(f"{name}.npy", npy(array))
    refused(path)


def test_a_missing_truncated_or_foreign_file_is_reported(path):
    with pytest.raises(ConfigError, match="RUN: .*predictions.npz does not exist; fix: run it"):
        read_predictions(path, "run it")
    write_npz(path, prediction_arrays())
    whole, single = path.read_bytes(), npy(np.zeros(3))
    for damaged in (b"", b"PK", whole[: len(whole) // 2], whole[:-1], single, b"<html>"):
        path.write_bytes(damaged)
        refused(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_predictions(path, "run it")
