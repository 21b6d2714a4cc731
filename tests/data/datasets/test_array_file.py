"""Untrusted files of arrays: an invalid header or value under a right checksum is one error that names the file."""

import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from distribuuuu.config import ConfigError
from distribuuuu.data.datasets import array_file
from distribuuuu.data.datasets.array_file import ArrayFileError, read_arrays, write_arrays
from distribuuuu.data.packed.dataset import Packed
from distribuuuu.data.packed.format import read_index

# They need the command pack, which may have been deleted.
fuzz_readback = pytest.importorskip("fuzz_readback")
packer = pytest.importorskip("distribuuuu.commands.pack.packer")
KIND, VERSION = "packed images", 1


def craft(path: Path, text: bytes, size: int | None = None) -> None:
    """Write a file of arrays with that header under its right checksum; a larger file has a hole."""
    path.write_bytes(b"DUARRAYS" + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(4, "little") + text)
    if size is not None:
        os.truncate(path, size)


def header_with(arrays: object) -> bytes:
    return json.dumps({"kind": KIND, "version": VERSION, "size": 4096, "meta": {}, "arrays": arrays}).encode()


HEADERS = {
    "not UTF-8": b"\xff\xfe{}", "not JSON": b"{", "deep": b"[" * 100_000, "no dict": b"[]", "empty": b"",
    "digits": b'{"version": ' + b"9" * 5000 + b"}",
    **{str(place): header_with({"a": place}) for place in (
        [], ["O", [1], 0], ["<i4", [1.0], 0], ["<i4", [2**63], 0], ["<i4", [1], -4], ["<i4", [1], 4093],
        ["<i4", [4096] * 8, 0],
    )},
}  # fmt: skip


def test_an_invalid_header_is_one_error(tmp_path):
    path = tmp_path / "index.bin"
    for name, header in HEADERS.items():
        craft(path, header, 4096 if len(header) < 4000 else None)
        with pytest.raises(ArrayFileError, match="invalid header|corrupt"):
            read_arrays(path, KIND, VERSION)
        with pytest.raises(ConfigError, match=f"^{path}: not a valid pack: [^\n]*; pack the data again$"):
            read_index(tmp_path)
        assert str(path) in packer.find_conflict(tmp_path, {}), name
    write_arrays(path, KIND, 2, {}, {})
    with pytest.raises(ConfigError, match="version 2, .* version 1; it has several labels .*; fix: train from"):
        read_index(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="index.bin cannot be read: not a regular file"):
        read_index(tmp_path)


def test_a_header_of_any_length_is_not_read_into_memory(tmp_path, monkeypatch):
    path = tmp_path / "index.bin"
    path.write_bytes(b"DUARRAYS" + (1 << 39).to_bytes(8, "little") + bytes(4))
    os.truncate(path, 1 << 40)  # a hole: it needs no disk
    with pytest.raises(ArrayFileError, match="truncated or corrupt"):
        read_arrays(path, KIND, VERSION)
    monkeypatch.setattr(array_file, "MAX_HEADER", 10)
    write_arrays(tmp_path / "good.bin", KIND, VERSION, {}, {"a": np.arange(3)})
    with pytest.raises(ArrayFileError, match="truncated or corrupt"):
        read_arrays(tmp_path / "good.bin", KIND, VERSION)


@pytest.fixture
def packed(tmp_path):
    """Return the folder, the meta and the columns of a pack of four raw images, and a function that rewrites it."""
    fuzz_readback.pack(tmp_path / "train", "raw")
    path = tmp_path / "train" / "index.bin"
    meta, columns = read_arrays(path, KIND, VERSION)
    columns = {name: column.copy() for name, column in columns.items()}
    Packed(tmp_path, "train")

    def refusal(**changes) -> str:
        write_arrays(path, KIND, VERSION, {**meta, **changes.pop("meta", {})}, {**columns, **changes})
        with pytest.raises(ConfigError) as error:
            Packed(tmp_path, "train")
        assert str(path) in str(error.value) and "\n" not in str(error.value)
        return str(error.value)

    return meta, columns, refusal


def test_a_value_of_the_meta_that_is_used_anywhere_is_checked(packed):
    shard = {"name": "shard-00000.bin", "size": 160, "images": 4}
    for part, values in {
        "mean": [[0.5, 0.5], [0.5, 0.5, float("nan")]], "std": [[0, 1, 1]], "crc32": ["1"], "options": [[]],
        "classes": [[], ["a", "a"], [1, 2]], "source": [None, {"targets": {"kind": "x"}}],
        "shards": [None, [{**shard, "name": "../shard-00000.bin"}], [{**shard, "size": 2**63}]],
    }.items():  # fmt: skip
        for value in values:
            assert "not a valid pack: " in packed[2](meta={part: value}), value


def test_numbers_of_the_rows_that_fit_no_file_are_refused(packed):
    _, columns, refusal = packed

    def changed(name, row, value):
        column = columns[name].copy()
        column[row] = value
        return {name: column}

    wrong = [
        changed("length", 1, -(2**63)), changed("length", 1, 2**63 - 1), changed("offset", 0, 0),
        changed("shard", 0, 1), changed("name_offsets", -1, 9), changed("name_offsets", 2, 0), changed("width", 0, 0),
        {name: columns[name][::-1] for name in ("shard", "offset")},
    ]  # fmt: skip
    for changes in wrong:
        assert "not a valid pack: " in refusal(**changes)
