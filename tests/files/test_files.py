"""Locks, limits of untrusted files, and writing through no link."""

import json
import os
import time

import pytest

from distribuuuu.commands.guard import report
from distribuuuu.config import ConfigError
from distribuuuu.config.json_file import load_json
from distribuuuu.config.run_files import RUN_FILES
from distribuuuu.files.atomic_file import make_folder, open_for_writing, replacing
from distribuuuu.files.locks import take_turn, try_lock
from distribuuuu.files.untrusted import open_regular, printable, read_regular
from distribuuuu.launch.signals import write_stacks
from distribuuuu.records.run_log import append_to_log, logger, logging_to
from distribuuuu.trainer import train_model


def test_a_turn_excludes_others_and_yields_the_time_of_the_file_system(tmp_path):
    with take_turn(tmp_path / "new" / "index.bin") as now_ns:
        assert abs(now_ns - time.time_ns()) < 60e9
        descriptor = os.open(tmp_path / "new" / "index.lock", os.O_RDWR)
        assert try_lock(descriptor) is False
    assert try_lock(descriptor)
    os.close(descriptor)


@pytest.fixture(params=["pipe", "device", "folder"])
def special(request, tmp_path):
    """A path that a plain `open` waits for, never reads to its end, or cannot open."""
    path = tmp_path / "special"
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda path: os.symlink("/dev/zero", path)}[request.param](path)
    return path


def test_only_regular_files_are_opened(special, tmp_path):
    for read in (open_regular, lambda path: read_regular(path, 10)):
        with pytest.raises(OSError, match="not a regular file"):
            read(special)
    (tmp_path / "a").write_bytes(b"12345")
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_regular(tmp_path / "a", 4)
    with pytest.raises(ConfigError, match=f"{special}: cannot be read"):
        load_json(special)


def test_json_is_returned_or_named_as_damaged(tmp_path):
    for content in [b"\xff", b"{", b"NaN", b"[" * 100_000, b"9" * 5000, b'"\\ud800"', b""]:
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"a\.json: invalid JSON"):
            load_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps({"a": [1, None]}))
    assert load_json(tmp_path / "a.json") == {"a": [1, None]}


def test_a_name_with_characters_that_a_terminal_acts_on_is_escaped(capsys):
    for name, shown in [
        ("\x1b[2J\x07", "\\x1b[2J\\x07"), ("gpj.\u202exe", "gpj.\\u202exe"),
        ("\u2066a\u2069\u200f\u061c", "\\u2066a\\u2069\\u200f\\u061c"),
        ("a\r\nb\tc\x85\u2028", "a\\r\\nb\\tc\\x85\\u2028"),
        ("\udcff", "\\udcff"), ("naïve 猫 \U0001f469\u200d\U0001f52c.jpg", "naïve 猫 \U0001f469\u200d\U0001f52c.jpg"),
    ]:  # fmt: skip
        assert printable(name) == shown
        shown.encode()
    report(ConfigError("a\n  - b\x1b[1A.jpg: broken"))
    assert capsys.readouterr().err == "1 problem to solve first:\n  - a\n      - b\\x1b[1A.jpg: broken\n"


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_run_refuses_a_folder_with_a_link_in_the_place_of_its_own_files(small_cfg, tmp_path, name):
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.mkdir() if "." not in name else victim.write_text("mine")
    out.mkdir()
    (out / name).symlink_to(victim)
    with pytest.raises(ConfigError, match=f"OUT_DIR: .*{name} is a link"):
        train_model(small_cfg())
    assert not any(victim.iterdir()) if victim.is_dir() else victim.read_text() == "mine"
    assert [path.name for path in out.iterdir()] == [name]


WRITERS = {
    "append": lambda path: open_for_writing(path, "a").close(),
    "truncate": lambda path: open_for_writing(path, "w").close(),
    "log": lambda path: logging_to(path.parent, path.name).__enter__(),
    "stacks": lambda path: write_stacks(path, "a title"),
    "append to a log": lambda path: append_to_log(path.parent, path.name, "a line"),
}


@pytest.mark.parametrize("target", ["file", "pipe", "missing"])
@pytest.mark.parametrize("writer", WRITERS)
def test_no_writer_follows_a_link_or_waits_for_a_pipe(tmp_path, writer, target):
    victim, path = tmp_path / "victim", tmp_path / "folder" / "name"
    path.parent.mkdir()
    if target == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(victim)
    if target == "file":
        victim.write_text("mine")
    try:
        WRITERS[writer](path)
    except (OSError, ConfigError) as error:
        assert str(path) in str(error)
    else:
        assert writer in ("stacks", "append to a log"), "the run continues without these files"
    assert victim.read_text() == "mine" if target == "file" else not victim.exists()


def test_a_link_is_replaced_and_a_linked_folder_refused(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "name").symlink_to(victim)
    with replacing(tmp_path / "name", "w") as file:
        file.write("new")
    assert victim.read_text() == "mine" and (tmp_path / "name").read_text() == "new"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "images").symlink_to("elsewhere")
    for names in (("images",), ("images", "inner")):
        with pytest.raises(OSError, match="images"):
            make_folder(tmp_path, *names)
    assert not any((tmp_path / "elsewhere").iterdir())


def test_the_names_in_a_log_line_start_no_line_of_their_own(tmp_path):
    name = "cat\nssh-ed25519 AAAA\r\x1b[2Jforged\u2028"
    with logging_to(tmp_path, "train.log"):
        logger.warning("class %s of %d", name, 3)
        logger.warning("%s", ValueError(name))
        logger.warning(f"class {name}")  # noqa: G004
    append_to_log(tmp_path, "train.log", name)
    lines = (tmp_path / "train.log").read_text().split("\n")
    assert not any(line.startswith(("ssh", "forged")) for line in lines) and "\x1b" not in "".join(lines)


def test_temporary_files_of_a_killed_run_are_removed_at_the_next_start(small_cfg, tmp_path):
    out = tmp_path / "out"
    (out / "checkpoints").mkdir(parents=True)
    names = [f"{name}.0123456789abcdef.tmp" for name in (".config.yaml", ".predictions.npz", "checkpoints/.a.pth.tar")]
    kept = [".mine.tmp", "notes.0123456789abcdef.tmp"]
    for name in (*names, *kept):
        (out / name).touch()
    train_model(small_cfg())
    assert not any((out / name).exists() for name in names) and all((out / name).exists() for name in kept)
