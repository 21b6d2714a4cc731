"""The index of a mirror, restoring a folder, diverged runs, and hostile stores."""

import json
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.tables import each_row

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.run_files import find_path_problem, local_folder, local_run, url_of
from distribuuuu.mirror import store as store_module
from distribuuuu.mirror.__main__ import _Child
from distribuuuu.mirror.store import MirrorError, Store, hash_file, is_mirrored, parse_index
from distribuuuu.mirror.sync import PRIVATE, Mirror

FILES = {"checkpoints/ckpt_ep_001.pth.tar": b"one", "checkpoints/ckpt_ep_002.pth.tar": b"two", "best.pth.tar": b"best",
         "config.yaml": b"OUT_DIR: x", "metrics.jsonl": b"{}\n"}  # fmt: skip
HASH = "0" * 64


def mirror_of(folder: Path, root: Path, warnings: list | None = None) -> Mirror:
    (folder / PRIVATE).mkdir(parents=True, exist_ok=True)
    return Mirror(folder, Store(f"file://{root}", folder / PRIVATE), [].append if warnings is None else warnings.append)


def write(folder: Path, files=FILES) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and PRIVATE not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_an_empty_folder_is_restored_and_unchanged_files_are_not_uploaded_again(tmp_path):
    one = mirror_of(write(tmp_path / "one"), tmp_path / "store")
    assert one.upload_changes(with_logs=True) and not one.upload_changes(with_logs=True)
    other = mirror_of(tmp_path / "other", tmp_path / "store")
    other.reconcile()
    assert read(tmp_path / "other") == FILES
    assert not other.upload_changes(with_logs=True)
    (tmp_path / "one/checkpoints/ckpt_ep_001.pth.tar").unlink()
    write(tmp_path / "one", {"best.pth.tar": b"better", "metrics.jsonl": b"{}\n{"})
    assert one.upload_changes(with_logs=True)
    names = {entry.sha256 for entry in one.index.files.values()}
    assert {path.name for path in (tmp_path / "store/objects").iterdir()} == names and len(names) == 4
    assert one.index.files["metrics.jsonl"].size == 3  # whole lines


def test_a_damaged_index_is_named_with_its_url(tmp_path):
    write(tmp_path / "store", {"mirror.json": b"\xff{"})
    with pytest.raises(MirrorError, match=f"file://{tmp_path}/store: mirror.json is not an index .*; fix: "):
        mirror_of(tmp_path / "one", tmp_path / "store").reconcile()


def test_objects_without_an_index_are_kept_and_the_start_is_refused(tmp_path):
    mirror_of(write(tmp_path / "one"), tmp_path / "store").upload_changes()
    (tmp_path / "store/mirror.json").unlink()
    before, said = read(tmp_path / "store"), r"mirror.json is missing, but objects/ has 5 objects; fix: restore"
    with pytest.raises(MirrorError, match=f"file://{tmp_path}/store: {said}"):
        mirror_of(tmp_path / "empty", tmp_path / "store").reconcile()
    (tmp_path / "one/checkpoints/ckpt_ep_002.pth.tar").unlink()
    with pytest.raises(MirrorError, match=said):  # the folder lacks the newest checkpoint
        mirror_of(tmp_path / "one", tmp_path / "store").reconcile()
    assert read(tmp_path / "store") == before and len(before) == 5


@pytest.mark.parametrize("folder", ["one", "empty"])
def test_a_first_upload_that_was_killed_is_continued_here_and_on_another_machine(tmp_path, folder, monkeypatch):
    first = mirror_of(tmp_path / "one", tmp_path / "store")
    first.reconcile()
    write(tmp_path / "one")
    monkeypatch.setattr(first, "_write_index", lambda files: None)  # killed before its first index with files
    first.upload_changes()
    assert len(list((tmp_path / "store/objects").iterdir())) == 5
    write(tmp_path / folder, new := {"checkpoints/ckpt_ep_001.pth.tar": b"other"})
    for _ in range(2):
        again = mirror_of(tmp_path / folder, tmp_path / "store")
        again.reconcile()
    again.upload_changes(with_logs=True)
    assert {**read(tmp_path / folder), **new} == read(tmp_path / folder)
    named = {entry.sha256 for entry in again.index.files.values()}
    assert {path.name for path in (tmp_path / "store/objects").iterdir()} == named


def test_the_newer_side_wins_and_two_changed_sides_are_refused(tmp_path):
    one, other = mirror_of(write(tmp_path / "one"), tmp_path / "store"), mirror_of(tmp_path / "b", tmp_path / "store")
    one.upload_changes()
    other.reconcile()
    write(tmp_path / "b", {"checkpoints/ckpt_ep_003.pth.tar": b"three"})
    mirror_of(tmp_path / "b", tmp_path / "store").reconcile()  # killed before the upload: the folder wins
    assert len(read(tmp_path / "b")) == 6
    other = mirror_of(tmp_path / "b", tmp_path / "store")
    other.reconcile()
    assert other.upload_changes()
    with pytest.raises(MirrorError, match="another machine has continued this run"):
        write(tmp_path / "one", {"best.pth.tar": b"mine"})
        one.upload_changes()
    mirror_of(tmp_path / "one", tmp_path / "store").reconcile()  # no new checkpoint: the mirror wins
    assert read(tmp_path / "one")["best.pth.tar"] == b"best" and len(read(tmp_path / "one")) == 6
    write(tmp_path / "b", {"checkpoints/ckpt_ep_004.pth.tar": b"four"})
    other.upload_changes()
    write(tmp_path / "one", {"checkpoints/ckpt_ep_004.pth.tar": b"mine"})
    with pytest.raises(MirrorError, match=r"continued by another machine, .*; fix: delete"):
        mirror_of(tmp_path / "one", tmp_path / "store").reconcile()


def test_a_failing_store_is_a_warning_every_30_seconds(tmp_path, monkeypatch, capsys):
    child, clock = _Child(tmp_path), [0.0]
    child.end = SimpleNamespace(is_set=lambda: clock[0] > 45, wait=lambda s: clock.__setitem__(0, clock[0] + s))
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(child.mirror, "upload_changes", lambda with_logs: with_logs or open(tmp_path / "down"))
    child.work()
    said = capsys.readouterr()
    for text in (said.err, (tmp_path / "train.log").read_text()):
        assert text.count("WARNING: OUT_DIR: mirror") == text.count("/down'; the run is not affected, and it is ") == 2
    assert '"done": true' in said.out


def test_damaged_objects_are_skipped_and_the_previous_checkpoint_remains(tmp_path):
    mirror_of(write(tmp_path / "one"), tmp_path / "store").upload_changes()
    newest = tmp_path / "store/objects" / hash_file(tmp_path / "one/checkpoints/ckpt_ep_002.pth.tar").sha256
    for data in (b"owt", b"longer", None):
        newest.write_bytes(data) if data else newest.unlink()
        warnings, folder = [], tmp_path / f"restored {data!r}"
        mirror_of(folder, tmp_path / "store", warnings).reconcile()
        assert {*FILES} - {*read(folder)} == {"checkpoints/ckpt_ep_002.pth.tar"} and "is damaged" in warnings[0]
    previous = tmp_path / "store/objects" / hash_file(tmp_path / "one/checkpoints/ckpt_ep_001.pth.tar").sha256
    previous.unlink()
    with pytest.raises(MirrorError, match="all checkpoints are damaged"):
        mirror_of(tmp_path / "none", tmp_path / "store").reconcile()


@each_row(
    "name",
    ["../x", "/etc/x", "checkpoints/../../x", "checkpoints/..", ".lock", ".mirror/state.json", "x.py", "a\\b",
     "checkpoints//x", "checkpoints/.x", "checkpoints/a/b/c/d/e", "checkpoints/x.tmp", "", "checkpoints/" + 300 * "x"],
)  # fmt: skip
def test_only_files_of_a_run_are_mirrored(name):
    assert not is_mirrored(name)
    content = {"format": 1, "id": HASH, "generation": 1, "files": {name: {"sha256": HASH, "size": 1}}}
    with pytest.raises(MirrorError):
        parse_index(json.dumps(content).encode())


@pytest.mark.parametrize(
    "change",
    [{"format": 2}, {"id": "x"}, {"files": []}, {"files": {"best.pth.tar": {"sha256": HASH}}},
     *({"files": {"best.pth.tar": {"sha256": sha, "size": size}}}
       for sha, size in ((HASH, -1), (HASH, 1 << 60), (HASH, "1"), ("../x", 1))),
     {"files": {f"checkpoints/{number}": {"sha256": HASH, "size": 1} for number in range(10_001)}}],
)  # fmt: skip
def test_an_invalid_index_is_refused(change):
    content = {"format": 1, "id": HASH, "generation": 1, "files": {}, **change}
    with pytest.raises(MirrorError):
        parse_index(json.dumps(content).encode())


def test_the_local_folder_is_a_function_of_the_url_and_back():
    for url in ("s3://bucket/run", "gs://bucket/a b/c", "file:///mnt/runs/a", "hf://buckets/me/bucket/run",
                "abfs://container@account.dfs.core.windows.net/run"):  # fmt: skip
        assert url_of(local_folder(url)) == url and find_path_problem(local_folder(url)) is None
    for url in ("hf://buckets/me/bucket", "http://host/run", "s3://key@host/run", "sftp://user:secret@host/run",
                "s3://b/../run", "s3://", "exp/run", "file://exp/run", "typo://bucket/run"):  # fmt: skip
        assert local_folder(url) == url and local_run(url) == url
    assert url_of(Path(local_folder("s3://bucket/run")).parents[1] / "host/run") == "s3://host/run"
    assert url_of(Path(local_folder("s3://bucket/run")).parents[2] / "http/host/run") is None


@each_row("word, found", [
    ("s3://user:secret@bucket/run", "with credentials"), ("hf://me/run", "hf://buckets/OWNER/"),
    ("typo://bucket/run", "expected a local path"), ("s3:///run", "expected s3://BUCKET/FOLDER"),
    ("ftp://host/run", "expected a local path"), ("S3://bucket/run", "expected s3://BUCKET"),
    ("s3://bucket/a?token=secret", "got s3://bucket/a; expected"), ("file://localhost/q", "expected file:///FOLDER"),
    ("gs://b/../c", "got gs://b/../c; expected"), ("s3:bucket/a", "expected s3://"),
])  # fmt: skip
def test_a_url_of_a_wrong_form_is_refused(word, found):
    with pytest.raises(ConfigError, match=found) as error:
        load_cfg(None, ["OUT_DIR", word])
    assert "secret" not in str(error.value) and local_folder(word) == word


@pytest.mark.parametrize("is_restoring", [False, True])
def test_an_index_that_is_older_than_the_folder_is_refused_and_deletes_nothing(tmp_path, is_restoring):
    """A bucket may be restored from a copy."""
    one = mirror_of(write(tmp_path / "one"), tmp_path / "store")
    one.upload_changes(with_logs=True)
    before = read(tmp_path / "store")
    write(tmp_path / "one", {"checkpoints/ckpt_ep_003.pth.tar": b"three"})
    (tmp_path / "one/checkpoints/ckpt_ep_001.pth.tar").unlink()
    one.upload_changes(with_logs=True)
    shutil.rmtree(tmp_path / "store")
    write(tmp_path / "store", before)
    files = read(tmp_path / "one")
    again = mirror_of(tmp_path / "one", tmp_path / "store")
    again.save_state(is_restoring=is_restoring)
    with pytest.raises(MirrorError, match="mirror.json is older than .*ckpt_ep_003"):
        again.reconcile()
    assert (read(tmp_path / "one"), read(tmp_path / "store")) == (files, before)


def test_no_checkpoint_is_deleted_before_the_newer_ones_are_verified(tmp_path):
    one, other = mirror_of(write(tmp_path / "one"), tmp_path / "store"), mirror_of(tmp_path / "b", tmp_path / "store")
    one.upload_changes()
    other.reconcile()
    for number in (1, 2):
        (tmp_path / f"b/checkpoints/ckpt_ep_00{number}.pth.tar").unlink()
    write(tmp_path / "b", {"checkpoints/ckpt_ep_003.pth.tar": b"three"})
    other.upload_changes()
    stored = tmp_path / "store/objects" / other.index.files["checkpoints/ckpt_ep_003.pth.tar"].sha256
    stored.write_bytes(b"damag")
    with pytest.raises(MirrorError, match="all checkpoints are damaged"):
        mirror_of(tmp_path / "one", tmp_path / "store").reconcile()
    assert FILES.keys() <= read(tmp_path / "one").keys()
    stored.write_bytes(b"three")
    mirror_of(tmp_path / "one", tmp_path / "store").reconcile()
    assert [name for name in read(tmp_path / "one") if "ckpt" in name] == ["checkpoints/ckpt_ep_003.pth.tar"]


def test_a_request_without_an_answer_fails_and_is_tried_again(tmp_path, monkeypatch):
    """Also for an upload whose first part always arrives: repeated parts are no progress."""
    progress, call, answered = [], store_module.call_filesystem, threading.Event()

    def hang(url, method, *args, **options):
        if method == "put_file" and not answered.is_set():
            if "callback" in options:
                options["callback"].relative_update(3)
            answered.wait(60)
            raise OSError("too late")
        return call(url, method, *args, **options)

    monkeypatch.setattr(store_module, "call_filesystem", hang)
    mirror = mirror_of(write(tmp_path / "one"), tmp_path / "store")
    mirror.store._on_progress = progress.append
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "REQUEST_S", 0.1)
        for _ in range(2):
            with pytest.raises(OSError, match="no answer for 0 s: put_file"):
                mirror.upload_changes()
    assert progress == [3]
    answered.set()
    assert mirror.upload_changes()


def test_copies_that_a_killed_upload_has_left_are_removed(tmp_path):
    mirror = mirror_of(write(tmp_path / "one"), tmp_path / "store")
    (tmp_path / "one" / PRIVATE / "left.copy").write_bytes(b"large")
    assert mirror.upload_changes() and not list((tmp_path / "one" / PRIVATE).glob("*.copy"))


def test_files_that_the_run_replaces_while_they_are_read_are_read_again(tmp_path, monkeypatch):
    writer = mirror_of(write(tmp_path / "one"), tmp_path / "store")
    writer.upload_changes(with_logs=True)
    reader = _Child(tmp_path / "other")
    reader.mirror = mirror_of(tmp_path / "other", tmp_path / "store")
    old = reader.mirror.read_index()
    write(tmp_path / "one", {"best.pth.tar": b"better"})
    writer.upload_changes(with_logs=True)
    found = [old, reader.mirror.read_index()]
    monkeypatch.setattr(reader.mirror, "read_index", lambda: found.pop(0) if len(found) > 1 else found[0])
    reader.fetch("")
    assert read(tmp_path / "other")["best.pth.tar"] == b"better"
