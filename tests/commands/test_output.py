"""Output of the optional commands: paths to which nothing is written, URLs that are not read, and tables."""

from pathlib import Path

import pytest
from support.commands import is_deleted, requires

from distribuuuu.commands.main import dispatch
from distribuuuu.commands.output import align_columns, find_unread_url
from distribuuuu.config.run_files import has_mirror, local_folder


@pytest.mark.parametrize(
    "command",
    [("predict", "run", "photos", "--out", "s3://bucket/a.csv"),
     ("report", "run", "--out", "gs://bucket/a.html"), ("compare", "a", "b", "--out", "http://host/a.html"),
     ("split", "photos", "--val", "0.1", "--out", "s3://bucket/a"),
     ("export", "run", "s3://bucket/a", "--to", "timm"), ("split", "photos", "--val", "0.1", "--out", "/"),
     ("pack", "/", "MODEL.DUMMY_INPUT", "True")],
)  # fmt: skip
def test_commands_write_to_no_url_and_not_to_the_root(command, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if is_deleted(command[0]):
        pytest.skip(f"{command[0]} has been deleted")
    assert dispatch("distribuuuu", command) == 2
    assert "expected a local path" in (said := capsys.readouterr().err) or "the root of the file system" in said
    assert not any(tmp_path.iterdir())


def test_a_command_replaces_no_file_of_a_run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, command in (("metrics.jsonl", ("predict", "run", "photos")), ("results.json", ("report", "run"))):
        if is_deleted(command[0]):
            continue
        (tmp_path / name).write_text("mine")
        assert dispatch("distribuuuu", (*command, "--out", name)) == 2
        assert "is a file of a run" in capsys.readouterr().err and (tmp_path / name).read_text() == "mine"


def test_a_url_is_no_input_of_a_command_that_reads_local_files(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_unread_url("exp/lr=0.1:2") is None and find_unread_url(str(tmp_path)) is None
    problem = find_unread_url("s3://user:secret@bucket/run")
    assert problem.startswith("got s3://..., a URL, which this command does not read") and "secret" not in problem
    if has_mirror():
        copy = Path(local_folder("s3://bucket/run"))
        assert "fix: name a local copy" in find_unread_url("s3://bucket/run")
        copy.mkdir(parents=True)
        assert find_unread_url("s3://bucket/run").endswith(f"fix: name its copy, {copy}")


@pytest.mark.parametrize("command", [("table", "s3://bucket/run"), ("track", "s3://bucket/run")])
def test_commands_name_a_url_that_they_do_not_read(command, capsys):
    if is_deleted(command[0]):
        pytest.skip(f"{command[0]} has been deleted")
    assert dispatch("distribuuuu", command) == 2
    assert "got s3://..., a URL, which this command does not read" in (said := capsys.readouterr().err)
    assert said.startswith("1 problem") and "no such file" not in said


@requires("predict")
def test_a_command_creates_no_parent_of_a_missing_folder(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert dispatch("distribuuuu", ("predict", "run", "photos", "--out", "new/../a.csv")) == 2
    assert "no such folder: new/.." in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_columns_have_the_width_of_their_longest_cell():
    lines = [["class", "train", "val"], ["ant", "1,000", "", "no image", "of val"], ["a longer name", "-", "7"]]
    assert align_columns(lines, "<>>") == [
        "class          train  val",
        "ant            1,000       no image  of val",
        "a longer name      -    7",
    ]
    assert align_columns([["ant", ""], ["bee", ""]], "<<") == ["ant", "bee"], "no trailing spaces"
