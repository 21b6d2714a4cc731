"""predictions.npz made by others: nothing is allocated for what a file claims, and every damage has one message."""

import io
import json
import random
import tracemalloc
import zipfile

import numpy as np
import pytest

from distribuuuu.config import ConfigError
from distribuuuu.records.predictions import write_npz
from distribuuuu.records.stored_predictions import read_predictions

META = {"schema": 1, "weights": "raw", "epoch": 2, "folder": "/data", "data": "imagefolder", "multilabel": False}
NUM = 40


def arrays(**changes) -> dict[str, np.ndarray]:
    """Return the arrays of a file of 40 images of 3 classes."""
    label = np.arange(NUM, dtype=np.int32) % 3
    return {
        "meta": np.array(json.dumps(META)),
        "classes": np.array(["a", "b", "c"]),
        "path": np.array([f"val/{index}.jpg" for index in range(NUM)]),
        "label": label,
        "loss": np.ones(NUM, np.float32),
        "logits": np.eye(3, dtype=np.float32)[label],
        **changes,
    }


def npy(array: np.ndarray) -> bytes:
    """Return an array as a .npy file."""
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=True)
    return file.getvalue()


def header(shape: tuple, descr: str = "<f4") -> bytes:
    """Return the header of a .npy file, without data."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def refused(path) -> str:
    """Return the message of the reader."""
    with pytest.raises(ConfigError) as caught:
        read_predictions(path, "run it")
    message = str(caught.value)
    assert message.startswith(f"RUN: {path} is damaged") and message.endswith("; fix: run it")
    assert "pickle" not in message and "\n" not in message and len(message) < 400
    return message


def test_other_arrays_are_neither_read_nor_allowed_to_be_objects(tmp_path):
    path = tmp_path / "predictions.npz"
    write_npz(path, arrays())
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("unused.npy", header((2**31,), "|u1") + bytes(2**26))
        archive.writestr("pickled.npy", npy(np.array([{}], dtype=object)))
    tracemalloc.start()
    content = read_predictions(path, "run it")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(content) == NUM and content.path[3] == "val/3.jpg" and peak < 2**22


@pytest.mark.parametrize("name", ["label", "loss", "logits", "path", "classes", "meta"])
@pytest.mark.parametrize("shape", [(2**40,), (NUM, 2**40), (2**62, 4), (-1,), (NUM, -3), (2**20 + 1,)])
def test_a_shape_that_does_not_follow_from_the_others_allocates_nothing(tmp_path, name, shape):
    """Also if the entry is a bomb: its compressed zeros are as long as the header says."""
    path = tmp_path / "predictions.npz"
    content = arrays()
    descr = content.pop(name).dtype.str
    write_npz(path, content)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}.npy", header(shape, descr) + bytes(2**24))
    tracemalloc.start()
    assert f"`{name}`" in refused(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


@pytest.mark.parametrize("name, array", [("loss", np.zeros(2**23, np.float32)), ("classes", np.full(2**21, "a")),
                                         ("path", np.full(NUM, "", "U65537"))])  # fmt: skip
def test_a_bomb_that_keeps_to_its_header_allocates_nothing(tmp_path, name, array):
    path = tmp_path / "predictions.npz"
    write_npz(path, arrays(**{name: array}))
    tracemalloc.start()
    refused(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": np.array([{}] * NUM, dtype=object)}, "`label` is of Python objects"),
        ({"label": np.zeros(NUM, ">i4")}, "`label` is >i4"),
        ({"label": np.zeros(NUM, np.uint64)}, "`label` is uint64"),
        ({"loss": np.zeros(NUM, np.longdouble)}, "`loss` is"),
        ({"loss": np.zeros(NUM, [("a", "f4")])}, "`loss` is"),
        ({"label": np.full(NUM, 3, np.int32)}, "`label` has values from 3 to 3, expected 0 to 2"),
        ({"classes": np.zeros(0, "U1"), "logits": np.zeros((NUM, 0), np.float32)}, "no classes"),
        ({"path": np.full(NUM, 0x110000, np.uint32).view("U1")}, "`path` holds characters that do not exist"),
        ({"meta": np.array(["{}"])}, "`meta` is missing, or no single text"),
        ({"meta": np.array("[" * 5000)}, "nested"),
        ({"meta": np.array(json.dumps({**META, "folder": 3}))}, "`meta`: `folder`: got 3"),
        ({"meta": np.array(json.dumps({**META, "epoch": True}))}, "`meta`: `epoch`: got true"),
        ({"meta": np.array(json.dumps({**META, "epoch": 2**40}))}, "`meta`: `epoch`: got"),
        ({"meta": np.array(json.dumps({**META, "multilabel": "no"}))}, "`meta`: `multilabel`: got"),
        ({"meta": np.array(json.dumps({**META, "data": [1] * 999}))}, "`meta`: `data`: got [1, 1"),
    ],
)
def test_types_and_values(tmp_path, changes, message):
    with zipfile.ZipFile(tmp_path / "predictions.npz", "w") as archive:
        for name, array in arrays(**changes).items():
            archive.writestr(f"{name}.npy", npy(array))
    assert message in refused(tmp_path / "predictions.npz")


def test_columns_in_the_order_of_fortran_are_read(tmp_path):
    logits = np.asfortranarray(np.random.default_rng(0).normal(size=(NUM, 3)).astype(np.float32))
    np.savez(tmp_path / "predictions.npz", **arrays(logits=logits))
    content = read_predictions(tmp_path / "predictions.npz", "run it")
    np.testing.assert_array_equal(content.scores, logits)
    assert content.scores.flags.c_contiguous


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("kind", ["twice", "lzma", "text", "header", "long", "version"])
def test_entries_that_numpy_does_not_write(tmp_path, kind):
    path, content = tmp_path / "predictions.npz", arrays()
    loss = npy(content.pop("loss"))
    write_npz(path, content)
    entries = {
        "twice": [(loss, 0), (loss, 0)],
        "lzma": [(loss, zipfile.ZIP_LZMA)],
        "text": [(b"loss", 0)],
        "header": [(b"\x93NUMPY\1\0\xff\xff" + b"(" * 65535, 0)],
        "long": [(loss + b"more", 0)],
        "version": [(loss[:6] + b"\3\0" + loss[8:], 0)],
    }
    with zipfile.ZipFile(path, "a") as archive:
        for data, method in entries[kind]:
            archive.writestr("loss.npy", data, method)
    assert "`loss" in refused(path)


def test_damaged_bytes_never_raise_another_error(tmp_path):
    """Fixed seed: flipped bits, other bytes, cut and repeated parts, at 400 places."""
    path, chance = tmp_path / "predictions.npz", random.Random(0)
    write_npz(path, arrays())
    whole, verdicts = path.read_bytes(), {"read": 0, "refused": 0}
    for _ in range(400):
        data, at = bytearray(whole), chance.randrange(len(whole))
        size = chance.choice((1, 1, 2, 4, 40))
        change = chance.randrange(4)
        if change == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif change == 1:
            data[at : at + size] = chance.randbytes(size)
        elif change == 2:
            del data[at : at + size]
        else:
            data[at:at] = data[at : at + size]
        path.write_bytes(data)
        try:
            content = read_predictions(path, "run it")
            content.confidence.max()
            assert [str(name) for name in content.path.tolist()] and len(content) == NUM
            verdicts["read"] += 1
        except ConfigError:
            verdicts["refused"] += 1
    assert min(verdicts.values()) > 20, verdicts
