"""Names of the files of a run, and paths to which nothing is written."""

from distribuuuu.config import run_files
from distribuuuu.config.run_files import RUN_FILES, find_name_problem, find_path_problem
from distribuuuu.trainer import evaluate_weights as evaluate_model
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


def test_a_name_that_is_no_plain_file_name_or_one_of_the_run_is_refused():
    for name in ("", " ", "..", "a/b", "a\nb", "a\u202eb", "~x", ".x", *RUN_FILES, "best_ema.pth.tar", "x.tmp"):
        assert "expected" in (find_name_problem(name) or ""), name
    for name in ("config.yaml", "cfg.txt", "my run.yaml", "\u65e5\u672c.yaml", "bestof.yaml", "console"):
        assert find_name_problem(name) is None, name


def test_a_url_and_the_root_in_any_spelling_are_no_folder_for_a_run(tmp_path, monkeypatch):
    for scheme in ("s3", "gs", "hf", "http", "https", "file", "S3", "abfs", "host"):
        for path in (f"{scheme}://bucket/run", f"{scheme}:/bucket"):
            assert "expected a local path" in find_path_problem(path)
    for path in ("file:store/a", "s3:bucket/a", "host:runs/a", "me@host:runs", "my.host:a"):
        assert "a URL or a host; expected a local path; fix: use a local folder" in find_path_problem(path)
        assert find_path_problem(f"./{path}") is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "host:runs").mkdir()
    assert find_path_problem("host:runs") is None, "it exists already"
    (tmp_path / "link").symlink_to("/")
    for path in ("/", "//", "/.", "/tmp/..", str(tmp_path / "link")):
        assert "root of the file system" in find_path_problem(path)
    for path in ("exp", ".", "/tmp", "C:/runs", "exp/lr=0.1:2", "a:b"):
        assert find_path_problem(path) is None
