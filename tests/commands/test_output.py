"""Output of the optional commands: paths to which nothing is written, and tables."""

import re
import subprocess
import sys

import pytest
from support.commands import is_deleted, requires, run_command
from support.runs import ROOT

from distribuuuu.commands.main import dispatch


@pytest.mark.parametrize("command", [
    ("predict", "{run}", "photos", "--out", "s3://bucket/a.csv"),
    ("report", "{run}", "--out", "gs://bucket/a.html"), ("split", "photos", "--val", "0.1", "--out", "s3://bucket/a"),
    ("export", "{run}", "s3://bucket/a", "--to", "timm"), ("split", "photos", "--val", "0.1", "--out", "/"),
    ("pack", "/", "MODEL.DUMMY_INPUT", "True"),
])  # fmt: skip
def test_commands_write_to_no_url_and_not_to_the_root(command, capsys, monkeypatch, tmp_path, finished_run):
    monkeypatch.chdir(tmp_path)
    command = [word.format(run=finished_run) for word in command]
    if is_deleted(command[0]):
        pytest.skip(f"{command[0]} has been deleted")
    assert dispatch("distribuuuu", command) == 2
    assert "expected a local path" in (said := capsys.readouterr().err) or "the root of the file system" in said
    assert not any(tmp_path.iterdir())


def test_a_command_replaces_no_file_of_a_run(capsys, monkeypatch, tmp_path, finished_run):
    monkeypatch.chdir(tmp_path)
    for name, command in (("metrics.jsonl", ("predict", "photos")), ("results.json", ("report",))):
        if is_deleted(command[0]):
            continue
        (tmp_path / name).write_text("mine")
        assert dispatch("distribuuuu", (command[0], str(finished_run), *command[1:], "--out", name)) == 2
        assert "is a file of a run" in capsys.readouterr().err and (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("command, name, fix", [
    ("predict", "model.onnx", "name the run that was exported"), ("report", "sweep.json", "distribuuuu table "),
])  # fmt: skip
def test_a_folder_that_is_no_run_is_named_with_what_to_do(command, name, fix, capsys, tmp_path):
    (tmp_path / name).touch()
    assert run_command(command, tmp_path, *["photos"] * (command == "predict")) == 2
    said = f"RUN: {tmp_path} holds {name}; expected the OUT_DIR of a run, .*; fix: {fix}"
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.slow
@requires("table")
@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_a_full_disk_behind_standard_output_is_one_message():
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "distribuuuu", "table", "benchmarks/results"]
        done = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.count("standard output: cannot be written: No space left") == 1
    assert "Traceback" not in done.stderr
