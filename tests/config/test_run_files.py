"""Names of the files of a run, and paths to which nothing is written."""

import subprocess
import sys

import pytest
from support.commands import is_deleted

from distribuuuu.commands.main import dispatch
from distribuuuu.config import run_files
from distribuuuu.config.run_files import RUN_FILES, find_name_problem, find_parent_problem, find_path_problem
from distribuuuu.trainer import test_model as evaluate_model
from distribuuuu.trainer import train_model


def test_every_file_that_a_run_writes_is_in_the_list(small_cfg, tmp_path):
    cfg = small_cfg("LOG.TENSORBOARD", True, "EMA.HALF_LIFE", 100, "TRAIN.AUTO_RESUME", False)
    train_model(cfg)
    train_model(cfg)
    evaluate_model(cfg)
    found = {path.name for path in (tmp_path / "out").iterdir()} - {cfg.CFG_DEST}
    assert [name for name in found if not run_files.is_run_file(name)] == [] and "checkpoints.1" in found
    assert set(RUN_FILES) - found == {run_files.LOCK, run_files.STACKS, run_files.TRACKERS_FOLDER}, (
        "written for the length of a run, on a hang, and with LOG.TRACKERS"
    )


@pytest.mark.parametrize(
    "name", [*RUN_FILES, "best.pth.tar", "best_ema.pth.tar", "best.yaml", "checkpoints.12", "a.pth.tar.broken", "x.tmp"]
)
def test_no_spelling_of_a_file_of_the_run_is_a_name_of_the_config(name):
    for spelling in (name, name.upper(), name.title(), f"{name} ", f"{name}.", name.replace("s", "\u017f")):
        assert find_name_problem(spelling), spelling


def test_a_name_that_some_file_system_treats_in_its_own_way_is_refused():
    for name in ("", " ", ".", "..", "a/b", "a\\b", "/a", "a\nb", "a\0b", "a\u202eb", "con", "NUL.yaml", "lpt1.txt",
                 "C:x", "~x", ".x", "a" * 201):  # fmt: skip
        assert "expected" in (find_name_problem(name) or ""), name
    for name in ("config.yaml", "cfg.txt", "my run.yaml", "\u65e5\u672c.yaml", "bestof.yaml", "console"):
        assert find_name_problem(name) is None, name


def test_a_url_and_the_root_in_any_spelling_are_no_folder_for_a_run(tmp_path):
    for scheme in ("s3", "gs", "hf", "http", "https", "file", "S3", "abfs", "host"):
        for path in (f"{scheme}://bucket/run", f"{scheme}:/bucket"):
            assert "expected a local path" in find_path_problem(path)
    (tmp_path / "link").symlink_to("/")
    for path in ("/", "//", "/.", "/tmp/..", str(tmp_path / "link")):
        assert "root of the file system" in find_path_problem(path)
    for path in ("exp", ".", "/tmp", "C:/runs", "exp/lr=0.1:2", "a:b"):
        assert find_path_problem(path) is None
    assert "fix: /" in find_path_problem("~/exp")


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


def test_a_parent_of_a_missing_folder_is_no_path_and_no_command_creates_the_folder(capsys, monkeypatch, tmp_path):
    (tmp_path / "here" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for path in ("new/..", "run/new//../exp", "BEST.YAML~//..", str(tmp_path / "new" / ".." / "exp"), "../new/../exp"):
        assert "which does not exist" in find_parent_problem(path), path
    for path in ("../exp", "../../exp", "run/../exp", "..", ".", "exp", "/..", "run/../new/exp", str(tmp_path / "..")):
        assert find_parent_problem(path) is None, path
    for command in (("train", "OUT_DIR", "new/..", "TRAIN.DATASET", "none"),
                    ("predict", "run", "photos", "--out", "new/../a.csv")):  # fmt: skip
        if is_deleted(command[0]):
            continue
        assert dispatch("distribuuuu", command) == 2
        assert "`..` follows new, which does not exist" in capsys.readouterr().err
        assert [path.name for path in (tmp_path / "here").iterdir()] == ["run"]


def test_a_wrong_path_is_reported_without_torch(tmp_path):
    code = (
        "import sys; from distribuuuu.commands.main import dispatch; "
        "words = ['OUT_DIR', 'hf://b/x', 'CFG_DEST', 'Best.pth.tar', 'MODEL.DUMMY_INPUT', 'True']; "
        "status = dispatch('d', ['train', *words]); "
        "print(status, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "2 False\n" and done.stderr.startswith("2 problems") and not any(tmp_path.iterdir())
