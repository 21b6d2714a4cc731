"""Files are written through no link, and what they are given as text starts no line of its own in a log."""

import os

import pytest

from distribuuuu.config import ConfigError
from distribuuuu.config.run_files import RUN_FILES
from distribuuuu.data.packed.cache import DiskCache
from distribuuuu.files.atomic_file import make_folder, open_for_writing, replacing
from distribuuuu.launch.signals import write_stacks
from distribuuuu.records.run_log import append_to_log, logger, logging_to
from distribuuuu.trainer import evaluate_weights, train_model


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


@pytest.mark.parametrize("name", ["usage", "usage.lock"])
def test_the_cache_of_packs_writes_through_no_link(tmp_path, name):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / name).symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match="DATA.CACHE_DIR"):
        DiskCache(tmp_path / "cache", 100)
    assert (tmp_path / "victim").read_text() == "mine"


def open_and_close(path) -> None:
    open_for_writing(path, "a").close()


WRITERS = {
    "append": open_and_close,
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


def test_an_evaluation_of_a_downloaded_run_follows_no_link(finished_run, small_cfg, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "test.log").symlink_to(tmp_path / "authorized_keys")
    with pytest.raises(ConfigError, match="test.log is a link"):
        evaluate_weights(small_cfg("MODEL.WEIGHTS", next(finished_run.glob("best*.pth.tar"))))
    assert not (tmp_path / "authorized_keys").exists()


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
