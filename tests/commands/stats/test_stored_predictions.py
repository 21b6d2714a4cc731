"""predictions.npz made by others: nothing is allocated for what a file claims, and every damage has one message."""

import contextlib
import io
import json
import random
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


@contextlib.contextmanager
def little_memory():
    """Check that a block allocates less than 4 MiB."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=True)
    return file.getvalue()


def header(shape: tuple, descr: str = "<f4") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def refused(path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_predictions(path, "run it")
    message = str(caught.value)
    assert message.startswith(f"RUN: {path} is damaged") and message.endswith("; fix: run it")
    assert "pickle" not in message and "\n" not in message and len(message) < 400
    return message


def test_other_arrays_are_neither_read_nor_allowed_to_be_objects(path):
    write_npz(path, prediction_arrays())
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("unused.npy", header((2**31,), "|u1") + bytes(2**26))
        archive.writestr("pickled.npy", npy(np.array([{}], dtype=object)))
    with little_memory():
        content = read_predictions(path, "run it")
    assert len(content) == NUM and content.path[3] == "val/3.jpg"


def test_a_shape_that_does_not_follow_from_the_others_allocates_nothing(path):
    """Also if the entry is a bomb: its compressed zeros are as long as the header says."""
    for name in ["label", "loss", "logits", "path", "classes", "meta"]:
        content = prediction_arrays()
        descr = content.pop(name).dtype.str
        for shape in ((2**40,), (NUM, 2**40), (2**62, 4), (-1,), (NUM, -3), (2**20 + 1,)):
            write_npz(path, content)
            with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(f"{name}.npy", header(shape, descr) + bytes(2**24))
            with little_memory():
                assert f"`{name}`" in refused(path), shape


def test_a_bomb_that_keeps_to_its_header_allocates_nothing(path):
    for name, array in [
        ("loss", np.zeros(2**23, np.float32)), ("classes", np.full(2**21, "a")),
                                                 ("path", np.full(NUM, "", "U65537")),
    ]:  # fmt: skip
        write_npz(path, prediction_arrays(**{name: array}))
        with little_memory():
            refused(path)


def test_types_and_values(path):
    wrong = {
        "`label` is of Python objects": {"label": np.array([{}] * NUM, dtype=object)},
        "`path` is of Python objects": {"path": np.array([{}] * NUM, dtype=object)},
        "`label` is >i4": {"label": np.zeros(NUM, ">i4")},
        "`label` is uint64": {"label": np.zeros(NUM, np.uint64)},
        "`label` is uint8 (40, 3), expected (40,)": {"label": np.zeros((NUM, 3), np.uint8)},
        "`label` has values from 3 to 3, expected 0 to 2": {"label": np.full(NUM, 3, np.int32)},
        "`loss` is": {"loss": np.zeros(NUM, np.longdouble)},
        "`loss` is [('a', '<f4')]": {"loss": np.zeros(NUM, [("a", "f4")])},
        "got -1 images": {"loss": np.zeros((), np.float32)},
        "`logits` is float32 (40, 2)": {"logits": np.zeros((NUM, 2), np.float32)},
        "no classes": {"classes": np.zeros(0, "U1"), "logits": np.zeros((NUM, 0), np.float32)},
        "`classes`": {"classes": None},
        "`path` is <U1 (39,)": {"path": np.array(["a"] * (NUM - 1))},
        "`path` holds characters that do not exist": {"path": np.full(NUM, 0x110000, np.uint32).view("U1")},
        "`meta` is missing, or no single text": {"meta": np.array(["{}"])},
        "nested": {"meta": np.array("[" * 5000)},
        "`meta`: `schema` is missing": {"meta": np.array("{}")},
    }  # fmt: skip
    entries = {"schema 2, expected 1": {"schema": 2}, "`meta`: `folder`: got 3": {"folder": 3},
               "`meta`: `epoch`: got true": {"epoch": True}, "`meta`: `epoch`: got 1099": {"epoch": 2**40},
               "`meta`: `multilabel`: got": {"multilabel": "no"},
               "`meta`: `data`: got [1, 1": {"data": [1] * 999}}  # fmt: skip
    wrong |= {text: {"meta": np.array(json.dumps({**META, **entry}))} for text, entry in entries.items()}
    for message, changes in wrong.items():
        with zipfile.ZipFile(path, "w") as archive:
            for name, array in prediction_arrays(**changes).items():
                if array is not None:
                    archive.writestr(f"{name}.npy", npy(array))
        assert message in refused(path)


def test_columns_in_the_order_of_fortran_are_read(path):
    logits = np.asfortranarray(np.random.default_rng(0).normal(size=(NUM, 3)).astype(np.float32))
    np.savez(path, **prediction_arrays(logits=logits))
    content = read_predictions(path, "run it")
    np.testing.assert_array_equal(content.scores, logits)
    assert content.scores.flags.c_contiguous


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_entries_that_numpy_does_not_write(path):
    for kind in ["twice", "lzma", "text", "header", "long", "version"]:
        content = prediction_arrays()
        loss = npy(content.pop("loss"))
        write_npz(path, content)
        entries = {
            "twice": [(loss, 0), (loss, 0)], "lzma": [(loss, zipfile.ZIP_LZMA)], "text": [(b"loss", 0)],
            "header": [(b"\x93NUMPY\1\0\xff\xff" + b"(" * 65535, 0)], "long": [(loss + b"more", 0)],
            "version": [(loss[:6] + b"\3\0" + loss[8:], 0)],
        }  # fmt: skip
        with zipfile.ZipFile(path, "a") as archive:
            for data, method in entries[kind]:
                archive.writestr("loss.npy", data, method)
        assert "`loss" in refused(path)


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
    with pytest.raises(ConfigError, match="not a regular file"):
        read_predictions(path, "run it")


def test_damaged_bytes_never_raise_another_error(path):
    """Fixed seed: flipped bits, other bytes, cut and repeated parts, at 400 places."""
    chance = random.Random(0)
    write_npz(path, prediction_arrays())
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
