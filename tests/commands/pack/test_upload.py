"""Packing to a URL: what is read back is the local pack, and nothing that is incomplete can be read."""

import shutil
from pathlib import Path
from unittest import mock

import fsspec
import pytest
from support.images import draw_folder
from support.packs import pack as make_pack

from distribuuuu.commands.pack.pack import parse_args
from distribuuuu.config import ConfigError
from distribuuuu.data.packed import transport
from distribuuuu.data.packed.dataset import Packed


@pytest.fixture
def folder(tmp_path) -> Path:
    draw_folder(tmp_path / "images", "train", {"ant": 9, "bee": 9})
    draw_folder(tmp_path / "images", "val", {"ant": 3, "bee": 3})
    return tmp_path / "images"


@pytest.fixture
def memory(monkeypatch):
    """Return the file system of memory://, which is empty and counts as one that can be written to."""
    monkeypatch.setitem(transport.PACKAGES, "memory", "fsspec")
    files = fsspec.filesystem("memory")
    files.store.clear()
    return files


def pack(out, folder: Path, *words) -> None:
    words = [*words, "TRAIN.DATASET", folder, "DATA.CACHE_DIR", f"{folder}-cache"]
    make_pack(out, "--shard-mb", 0.005, *words, split="both")


def assert_same_images(url, local, cache) -> None:
    for split in ("train", "val"):
        one, other = Packed(url, split, None, str(cache), 1.0, 1.0), Packed(local, split)
        assert len(one) == len(other) > 0 and one.classes == other.classes
        assert all(bytes(one.read(index)) == bytes(other.read(index)) for index in range(len(one)))


def test_a_pack_at_a_url_is_the_local_one_and_its_index_goes_last(folder, memory, tmp_path, monkeypatch, capsys):
    url, put, written = "memory://bucket/set", type(memory).put_file, []

    def put_file(self, local, remote, **kwargs):
        if len(written) == 2:
            written.append("")
            raise OSError("the connection is lost")
        written.append(remote.rpartition("/")[2])
        put(self, local, remote, **kwargs)

    monkeypatch.setattr(type(memory), "put_file", put_file)
    pack(tmp_path / "local", folder)
    with pytest.raises(ConfigError, match="the connection is lost; fix: run the same command again"):
        pack(url, folder)
    with pytest.raises(ConfigError, match="no such object"):
        Packed(url, "train", None, str(tmp_path / "cache"), 1.0, 1.0)
    pack(url, folder)
    shards = sorted(path.name for path in (tmp_path / "local" / "train").glob("shard*"))
    assert written[:3] == [*shards[:2], ""] and written[3 : len(shards) + 4] == [*shards, "index.bin"]
    assert_same_images(url, tmp_path / "local", tmp_path / "cache")
    assert not list(Path(f"{folder}-cache/packing").rglob("*.bin"))  # moved, not copied
    pack(url, folder)
    assert "is packed already: nothing to do" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="shorter side none, now 20.*; use another URL, or add --overwrite"):
        pack(url, folder, "--shorter-side", "20")
    shutil.rmtree(folder / "train" / "bee")
    shutil.rmtree(folder / "val" / "bee")
    pack(url, folder, "--overwrite")
    pack(tmp_path / "other", folder)
    assert_same_images(url, tmp_path / "other", tmp_path / "cache")


def test_urls_that_cannot_be_written_to_are_reported_at_once(folder, monkeypatch):
    with pytest.raises(ConfigError, match=r"OUT: got https://host/set/train; expected .*\(s3://, gs://, hf://\)"):
        pack("https://host/set", folder)
    with pytest.raises(ConfigError, match="--verify s3://a/b: expected a folder"):
        parse_args(["s3://a/b", "--verify"])
    monkeypatch.setattr(fsspec, "url_to_fs", lambda *args, **kwargs: exec("raise ImportError"))
    transport._open_filesystem.cache_clear()
    with pytest.raises(ConfigError, match=r"s3:// needs s3fs, .* fix: pip install 'distribuuuu\[s3\]'"):
        pack("s3://bucket/set", folder)


def test_credentials_that_have_expired_are_reported_at_once(memory, monkeypatch):
    for number, error in enumerate([PermissionError("ExpiredToken"), type("NoCredentialsError", (Exception,), {})()]):
        monkeypatch.setattr(type(memory), "info", mock.Mock(side_effect=error))
        with pytest.raises(ConfigError, match="access denied.*renew them"):
            Packed(f"memory://a/{number}", "train")
