"""The states of a mirror, restoring a folder, diverged runs, and hostile stores."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from support.tables import each_row

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.run_files import find_path_problem, local_folder, local_run, url_of
from distribuuuu.engine.preflight import resolve_cfg
from distribuuuu.files.locks import lock_file
from distribuuuu.files.untrusted import InvalidFileError, untrusted
from distribuuuu.mirror import states, sync
from distribuuuu.mirror.states import KEPT_STATES, MirrorError, State, StateLog, hash_file, is_mirrored, parse_state
from distribuuuu.mirror.sync import PRIVATE, Mirror

FILES = {"checkpoints/ckpt_ep_001.pth.tar": b"one", "checkpoints/ckpt_ep_002.pth.tar": b"two", "best.pth.tar": b"best",
         "config.yaml": b"", "metrics.jsonl": b"{}\n"}  # fmt: skip
HASH = "0" * 64


def mirror_of(folder: Path, root: Path) -> Mirror:
    return Mirror(folder, f"file://{root}")


def write(folder: Path, files=FILES) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and PRIVATE not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture(autouse=True)
def immediate(monkeypatch):
    monkeypatch.setattr(sync, "EVERY_S", 0.0)


@pytest.fixture
def one(tmp_path) -> Mirror:
    """A mirror of FILES in tmp_path / "one", whose state 2 is at tmp_path / "store"."""
    one = mirror_of(write(tmp_path / "one"), tmp_path / "store")
    one.reconcile()
    assert one.upload_changes() and one.newest.number == 2
    return one


def test_a_run_that_is_resumed_on_an_empty_machine_keeps_the_options_of_its_config(one, tmp_path, monkeypatch):
    config = b"DATA: {MEAN: [0.1, 0.2, 0.3], STD: [1, 1, 1]}\n"
    write(tmp_path / "one", {"config.yaml": config})
    one.upload_changes()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ["OUT_DIR", f"file://{tmp_path}/store", "MODEL.ARCH", "resnet18", "MODEL.NUM_CLASSES", "7"]
    assert resolve_cfg(load_cfg(None, words)).DATA.MEAN == (0.1, 0.2, 0.3)


def test_only_objects_that_no_late_state_names_are_deleted(one, tmp_path, monkeypatch):
    objects = tmp_path / "store/objects"
    new, left = objects / ("1" * 64), objects / ("2" * 64)
    left.write_bytes(b"of an upload that was killed")
    os.utime(left, (0, 0))
    (tmp_path / "one/checkpoints/ckpt_ep_001.pth.tar").unlink()
    dropped, shas = one.newest.files["checkpoints/ckpt_ep_001.pth.tar"].sha256, []
    for number in range(2 * KEPT_STATES):
        write(tmp_path / "one", {"best.pth.tar": b"better %d" % number})
        if number == KEPT_STATES + 1:
            new.write_bytes(b"of an upload that another machine has begun")
        assert one.upload_changes() and (objects / dropped).exists() == (number < KEPT_STATES - 1)
        shas.append(one.newest.files["best.pth.tar"].sha256)
    fixed = {entry.sha256 for name, entry in one.newest.files.items() if name != "best.pth.tar"}
    assert {path.name for path in objects.iterdir()} == {new.name, *fixed, *shas[-KEPT_STATES:]}
    assert len(list((tmp_path / "store/states").iterdir())) == KEPT_STATES
    write(tmp_path / "one")
    with monkeypatch.context() as patch, pytest.raises(IsADirectoryError):  # a deletion whose answer is lost
        patch.setattr(StateLog, "prune", lambda log, _: (objects / shas[-1]).unlink() or open(tmp_path))
        one.upload_changes()
    write(tmp_path / "one", {"best.pth.tar": b"better %d" % number})
    assert one.upload_changes() and (objects / shas[-1]).exists()
    (tmp_path / f"store/states/{one.newest.number - 1:06d}.json").write_bytes(b"{")
    write(tmp_path / "one")
    assert one.upload_changes() and (objects / shas[-1]).exists(), "an old state is damaged: nothing is deleted"


def test_checkpoints_are_uploaded_at_once_and_other_files_after_a_while_and_at_the_end(one, tmp_path, monkeypatch):
    upload, sent = StateLog.upload, list[str]()
    monkeypatch.setattr(sync, "EVERY_S", 1000.0)
    monkeypatch.setattr(StateLog, "upload", lambda *args: sent.append(Path(args[1].name).name) or upload(*args))
    new, best, rows = "checkpoints/ckpt_ep_003.pth.tar", "best.pth.tar", "metrics.jsonl"
    for name, is_last, expected in ((best, False, []), (new, False, ["ckpt_ep_003.pth.tar", best]), (rows, False, []),
                                    (rows, True, [rows]), (rows, True, [])):  # fmt: skip
        write(tmp_path / "one", {name: f"new {name}".encode()})
        number = one.newest.number
        assert one.upload_changes(is_last) == bool(expected) == one.newest.number - number and sent == expected
        sent.clear()
    again = mirror_of(tmp_path / "one", tmp_path / "store")
    again.reconcile()
    write(tmp_path / "one", {best: b"newer"})
    assert again.upload_changes() and sent == [best], "a start uploads what the store lacks"


def test_a_write_that_arrives_late_is_our_own_and_replaces_nothing(one, tmp_path, monkeypatch):
    """Also if the run was killed before it knew, and whatever has changed meanwhile."""
    create = StateLog.create

    def lose_answer(log, state):
        late.append(state)
        raise OSError("no answer")

    earliest = State(1, HASH, {})
    for is_killed in (False, True):
        late: list[State] = []
        write(tmp_path / "one", {"checkpoints/ckpt_ep_003.pth.tar": b"late %d" % is_killed})
        with monkeypatch.context() as patch:
            patch.setattr(StateLog, "create", lose_answer)
            for _ in range(2):
                with pytest.raises(OSError, match="no answer"):
                    one.upload_changes()
        create(one.log, late[0])  # arrives
        if is_killed:
            one = mirror_of(tmp_path / "one", tmp_path / "store")
            one.reconcile()
            assert one.newest == late[0]
        write(tmp_path / "one", {"best.pth.tar": b"after %d" % is_killed})
        assert one.upload_changes() and one.newest.number == late[0].number + 1
        assert create(one.log, late[1]).id == late[0].id  # arrives much later
        assert one.log.find_newest() == one.newest
    assert create(one.log, earliest) == earliest  # its number is free again: the state was deleted
    assert one.log.find_newest() == one.newest
    other = mirror_of(tmp_path / "other", tmp_path / "store")
    other.reconcile()
    assert {**FILES, **read(tmp_path / "other")} == read(tmp_path / "one")


def test_a_store_without_conditional_writes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(StateLog, "create", lambda log, state: state)  # replaces what is there
    with pytest.raises(MirrorError, match="should only create; fix: use a store with conditional writes"):
        mirror_of(tmp_path / "one", tmp_path / "store").reconcile()


def test_objects_without_a_state_are_kept_and_the_start_is_refused(one, tmp_path):
    shutil.rmtree(tmp_path / "store/states")
    before = read(tmp_path / "store")
    lost = ": states/ lacks a state, but objects/ has objects; fix: restore the newest state (if it is in mirror.json: "
    for folder in ("empty", "one"):
        with pytest.raises(MirrorError, match=re.escape(f"file://{tmp_path}/store{lost}")):
            mirror_of(tmp_path / folder, tmp_path / "store").reconcile()
    assert len(before) == 5 and read(tmp_path / "store") == before


@pytest.mark.parametrize("folder", ["one", "empty"])
def test_a_first_upload_that_was_killed_is_continued_here_and_on_another_machine(tmp_path, folder, monkeypatch):
    first = mirror_of(tmp_path / "one", tmp_path / "store")
    first.reconcile()
    write(tmp_path / "one")
    monkeypatch.setattr(first, "_append", lambda files: None)  # killed before its first state with files
    first.upload_changes()
    write(tmp_path / folder, new := {"checkpoints/ckpt_ep_001.pth.tar": b"other"})
    for _ in range(2):
        again = mirror_of(tmp_path / folder, tmp_path / "store")
        again.reconcile()
    again.upload_changes()
    assert {**read(tmp_path / folder), **new} == read(tmp_path / folder)


def test_the_side_with_the_newer_checkpoint_wins_and_an_overtaken_run_stops_uploading(one, tmp_path, monkeypatch):
    other = mirror_of(tmp_path / "b", tmp_path / "store")
    other.reconcile()
    write(tmp_path / "b", {"checkpoints/ckpt_ep_003.pth.tar": b"three"})
    other = mirror_of(tmp_path / "b", tmp_path / "store")
    other.reconcile()  # killed before the upload: the folder wins
    assert len(read(tmp_path / "b")) == 6 and other.upload_changes()
    write(tmp_path / "one", {"best.pth.tar": b"mine"})
    for _ in range(2):
        with pytest.raises(MirrorError, match="another machine has continued this run"):
            one.upload_changes()
    mirror_of(tmp_path / "one", tmp_path / "store").reconcile()
    assert read(tmp_path / "one") == read(tmp_path / "b") and (tmp_path / "one" / PRIVATE / "id").exists()
    write(tmp_path / "one", {"checkpoints/ckpt_ep_004.pth.tar": b"four"})
    one = mirror_of(tmp_path / "one", tmp_path / "store")
    one.reconcile()
    assert one.upload_changes() and len(read(tmp_path / "one")) == 7
    monkeypatch.setattr(sync, "is_end_requested", lambda pause_s=None: pause_s is None)
    write(tmp_path / "b", {"best.pth.tar": b"mine"})
    with pytest.raises(MirrorError, match="another machine has continued this run"):
        sync.work(other)
    assert "set another OUT_DIR; nothing more is uploaded\n" in (tmp_path / "b/train.log").read_text()


def test_a_store_that_is_older_than_the_folder_gets_the_files_of_the_folder(one, tmp_path):
    """A bucket may be restored from a copy."""
    before = read(tmp_path / "store")
    write(tmp_path / "one", {"checkpoints/ckpt_ep_003.pth.tar": b"three"})
    one.upload_changes()
    shutil.rmtree(tmp_path / "store")
    write(tmp_path / "store", before)
    again = mirror_of(tmp_path / "one", tmp_path / "store")
    again.reconcile()
    again.upload_changes()
    mirror_of(tmp_path / "other", tmp_path / "store").reconcile()
    assert read(tmp_path / "other") == read(tmp_path / "one") and len(read(tmp_path / "one")) == 6


def test_a_folder_that_was_restored_in_part_is_not_uploaded(one, tmp_path, monkeypatch):
    """Whether a command has read some files, or a kill has interrupted the restoring."""
    folder = tmp_path / "other"
    mirror_of(folder, tmp_path / "store").fetch(with_checkpoints=False)
    assert {*FILES} - {*read(folder)} == {name for name in FILES if "ckpt" in name}
    mirror_of(folder, tmp_path / "store").reconcile()
    assert read(folder) == FILES
    with monkeypatch.context() as patch:
        patch.setattr(StateLog, "download", lambda *args: open(tmp_path / "killed"))
        (folder / "best.pth.tar").unlink()
        write(folder, {"metrics.jsonl": b"old"})
        (folder / PRIVATE / "id").unlink()
        with pytest.raises(FileNotFoundError):
            mirror_of(folder, tmp_path / "store").fetch()
    (again := mirror_of(folder, tmp_path / "store")).reconcile()
    assert read(folder) == FILES and not again.upload_changes()


def test_a_listing_that_lacks_the_newest_state_is_not_believed(one, tmp_path, monkeypatch):
    monkeypatch.setattr(StateLog, "_list", lambda log, *words: {"000001": None})
    assert one.log.find_newest() == one.newest
    monkeypatch.setattr(StateLog, "read_state", lambda log, number: State(number, HASH, {}))
    assert one.log.find_newest().number == 11, "a server that has a state of every number is not asked for ever"


def test_damaged_objects_are_skipped_and_the_previous_checkpoint_remains(one, tmp_path, capsys):
    newest = tmp_path / "store/objects" / one.newest.files["checkpoints/ckpt_ep_002.pth.tar"].sha256
    for data in (b"owt", b"longer", None):
        newest.write_bytes(data) if data else newest.unlink()
        folder = tmp_path / f"restored {data!r}"
        (mirror := mirror_of(folder, tmp_path / "store")).reconcile()
        assert {*FILES} - {*read(folder)} == {"checkpoints/ckpt_ep_002.pth.tar"}
        assert "is damaged" in capsys.readouterr().err and "is damaged" in (folder / "train.log").read_text()
        write(folder)  # trained again
        mirror.upload_changes()
        assert newest.read_bytes() == b"two"
    shutil.rmtree(newest.parent)
    with pytest.raises(MirrorError, match="all checkpoints are damaged"):
        mirror_of(tmp_path / "none", tmp_path / "store").reconcile()


@each_row(
    "name",
    ["../x", "/etc/x", "checkpoints/../../x", "checkpoints/..", ".lock", ".mirror/state.json", "x.py", "a\\b",
     "checkpoints//x", "checkpoints/.x", "checkpoints/a/b/c/d/e", "checkpoints/x.tmp", "", "checkpoints/" + 300 * "x"],
)  # fmt: skip
def test_only_files_of_a_run_are_mirrored(name):
    assert not is_mirrored(name)
    assert is_mirrored("probe.pth.tar") and is_mirrored("finetune.json"), "written by `finetune`"


@each_row(
    "change",
    [{"format": 3}, {"id": "x"}, {"files": []}, {"files": {"best.pth.tar": {"sha256": HASH}}},
     {"files": {"../x": {"sha256": HASH, "size": 1}}},
     *({"files": {"best.pth.tar": {"sha256": sha, "size": size}}}
       for sha, size in ((HASH, -1), (HASH, 1 << 60), (HASH, "1"), ("../x", 1))),
     {"files": {f"checkpoints/{number}": {"sha256": HASH, "size": 1} for number in range(10_001)}}],
)  # fmt: skip
def test_an_invalid_state_is_refused(change):
    with pytest.raises(InvalidFileError), untrusted("x", "state"):
        parse_state(1, json.dumps({"format": 2, "id": HASH, "files": {}, **change}).encode())


@pytest.mark.parametrize("limit", ["MAX_FILES", "MAX_STATE"])
def test_a_state_that_no_start_could_read_is_not_written(one, tmp_path, monkeypatch, limit):
    write(tmp_path / "one", {"metrics.jsonl": b"new"})
    with monkeypatch.context() as patch, pytest.raises(MirrorError, match="OUT_DIR has more than .* fix: delete"):
        patch.setattr(states, limit, 3)
        one.upload_changes()
    (again := mirror_of(tmp_path / "again", tmp_path / "store")).reconcile()
    assert again.newest == one.newest and one.upload_changes()


@each_row("data, said", [(b"\xff{", ""), (b" " * (5 << 20), "Expecting value: line 1 column 4194305 ")])
def test_a_damaged_state_is_named_with_its_url(data, said, tmp_path):
    write(tmp_path / "store", {"states/000004.json": data})
    found = f"file://{tmp_path}/store/states/000004.json: not a valid state of a run: {said}.*; fix: delete"
    with pytest.raises(MirrorError, match=found):
        mirror_of(tmp_path / "one", tmp_path / "store").reconcile()


def test_the_local_folder_is_a_function_of_the_url_and_back():
    for url in ("s3://bucket/run", "gs://bucket/a b/c", "file:///mnt/runs/a", "az://container/run"):
        assert url_of(local_folder(url)) == url and find_path_problem(local_folder(url)) is None
    assert local_folder("exp/run") == local_run("exp/run") == "exp/run"
    assert url_of(Path(local_folder("s3://bucket/run")).parents[1] / "host/run") == "s3://host/run"
    assert url_of(Path(local_folder("s3://bucket/run")).parents[2] / "http/host/run") is None


@each_row("word", [
    "s3://user:secret@bucket/run", "hf://buckets/me/b/run", "typo://bucket/run", "s3:///run", "abfs://b/run",
    "S3://bucket/run", "s3://bucket/a?token=secret", "file://localhost/q", "gs://b/../c", "gcs://b/c", "s3://",
])  # fmt: skip
def test_a_url_of_a_wrong_form_is_refused(word):
    found = "with credentials" if "@" in word else f"got {word.partition('?')[0]}; expected a local path, or s3"
    with pytest.raises(ConfigError, match=found) as error:
        load_cfg(None, ["OUT_DIR", word])
    assert "secret" not in str(error.value) and local_folder(word) == local_run(word) == word


def test_a_command_gets_a_run_and_names_one_that_is_not_there(one, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{tmp_path}/store"
    assert local_run(url) == local_folder(url) and (Path(local_folder(url)) / "best.pth.tar").is_file()
    (process := sync._start(local_folder(url))).terminate()  # it ignores the signals to a run
    process.stdin.close()  # the run was killed
    assert process.wait(60) == 1
    with pytest.raises(ConfigError, match=f"RUN: {url}/no: there is no run; expected the URL of an OUT_DIR; fix: "):
        local_run(f"{url}/no")


def test_a_folder_in_use_is_read_as_it_is_and_gets_no_second_training(one, tmp_path, monkeypatch):
    monkeypatch.setattr(sync, "LOCK_S", 0.1)
    folder, waits = write(tmp_path / "other", {f"{PRIVATE}/lock": b""}), list[float]()
    monkeypatch.setattr(sync, "lock_file", lambda file, wait_s: waits.append(wait_s) or lock_file(file, wait_s))
    words = f"file://{tmp_path}/store", str(folder)
    with open(folder / PRIVATE / "lock", "ab") as lock:
        assert lock_file(lock.fileno(), 0.0)
        assert [*sync.main(*words, "run")] == ["restored"] and not read(folder)
        with pytest.raises(MirrorError, match="is in use by another training of this machine; fix: wait for its end"):
            next(sync.main(*words, ""))
    assert [*sync.main(*words, "run")] == ["restored"] and "best.pth.tar" in read(folder)
    assert waits == [0.0, 0.1, 0.0], "only a training waits, for the one before it"


def test_a_failing_store_is_a_warning(tmp_path, monkeypatch, capsys):
    mirror, waits = mirror_of(tmp_path, tmp_path / "store"), list[float]()
    monkeypatch.setattr(sync, "is_end_requested", lambda s: waits.append(s) or len(waits) > 2)
    monkeypatch.setattr(sync.time, "sleep", waits.append)
    monkeypatch.setattr(mirror, "upload_changes", lambda is_last: len(waits) not in (2, 3) or open(tmp_path / "down"))
    assert sync.work(mirror) == "0 files, 0.0 MB"
    assert waits == [0.0, sync.SCAN_S, sync.PAUSE_S, sync.END_PAUSE_S]
    said = capsys.readouterr()
    for text in (said.err, (tmp_path / "train.log").read_text()):
        assert text.count("WARNING: OUT_DIR: mirror") == text.count("/down'; the run is not affected, and it is ") == 2


def test_a_file_that_is_replaced_or_deleted_during_its_upload_is_whole(one, tmp_path, monkeypatch):
    upload = StateLog.upload

    def replace(log, file, entry):
        os.replace(write(tmp_path / "new", {"x": b"newer"}) / "x", tmp_path / "one/best.pth.tar")
        upload(log, file, entry)

    monkeypatch.setattr(StateLog, "upload", replace)
    write(tmp_path / "one", {"best.pth.tar": b"better"})
    names = one.list_files()
    monkeypatch.setattr(one, "list_files", lambda: ["gone.yaml", *names])
    one.upload_changes()
    mirror_of(tmp_path / "other", tmp_path / "store").reconcile()
    assert read(tmp_path / "other")["best.pth.tar"] == b"better"
    entry = hash_file(file := open(tmp_path / "one/metrics.jsonl", "rb"))
    (tmp_path / "one/metrics.jsonl").write_bytes(b"{}\n{}\n")
    upload(one.log, open(tmp_path / "one/metrics.jsonl", "rb"), entry)  # its beginning
    (tmp_path / "one/metrics.jsonl").write_bytes(b"[]\n")
    with pytest.raises(OSError, match=r"metrics.jsonl has changed during its upload"):
        upload(one.log, file, entry)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_store_that_hangs_does_not_keep_a_run_from_ending(tmp_path, monkeypatch, capsys, is_stopped):
    """The child process is killed, whatever its request does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sync, "STOP_S" if is_stopped else "END_S", 0.5)
    folder = local_folder(f"file://{tmp_path}/store")
    write(Path(folder), {".lock": b""})
    (run := sync.MirrorClient(folder)).start()
    os.mkfifo(tmp_path / "store/states/000002.json")  # whoever reads it waits for ever
    write(Path(folder))
    with pytest.raises(KeyboardInterrupt if is_stopped else MirrorError) as caught, run:
        if is_stopped:
            raise KeyboardInterrupt
    assert "does not answer in time; all files are in" in f"{caught.value}{capsys.readouterr().err}"
    assert run._process.wait(30) < 0


def test_problems_of_the_child_process_are_errors_of_the_run_or_of_the_argument(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{tmp_path}/store"
    (run := sync.MirrorClient(local_folder(url))).start()
    with pytest.raises(MirrorError, match="NOT complete: .* has ended; fix: start again; all files are in"), run:
        run._process.kill()
    write(tmp_path / "store", {"states/000002.json": b"{"})
    with pytest.raises(ConfigError, match=f"RUN: {url}/states/000002.json: not a valid state"):
        local_run(url)
    write(Path(local_folder(f"{url}/full")), {PRIVATE: b""})
    with pytest.raises(ConfigError, match="OUT_DIR: File exists"):
        sync.restore(local_folder(f"{url}/full"))
