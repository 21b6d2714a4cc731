"""Trackers: each row arrives once at its step, through kills, resumes and rollbacks; a fault is one warning."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from support.runs import ROOT, TRAIN_NET, assert_same_run, run_python, run_tool, small_options, timeless, train_and_stop

from distribuuuu.config import ConfigError
from distribuuuu.config.registry import TRACKERS
from distribuuuu.distributed import comm as dist
from distribuuuu.engine.build import build_trackers
from distribuuuu.engine.preflight import find_run_problems
from distribuuuu.records.metric_writers import RecordFile, TrackedRun, drop_records_after
from distribuuuu.records.trackers import base, spool
from distribuuuu.records.trackers.base import Tracker
from distribuuuu.records.trackers.spool import Spool
from distribuuuu.trainer import train_model

FAKE = ("LOG.TRACKERS", "fake")
# Steps and curves of the rows of a run of `small_cfg`, in order.
WHOLE = [(1, "train"), (2, "train"), (3, "train"), (4, "train"), (4, "eval"),
         (5, "train"), (6, "train"), (7, "train"), (8, "train"), (8, "eval")]  # fmt: skip


class Fake(Tracker):
    """A server in this process; `fault` is called with the name of each method."""

    name = "fake"
    received: list[tuple] = []

    @staticmethod
    def fault(method: str) -> None:
        """Do nothing."""

    def connect(self, run_id):
        self.fault("connect")
        self.received.append(("connect", run_id))
        return run_id or f"run-{len(self.received)}"

    def send_rows(self, rows):
        self.fault("rows")
        self.received.extend(("row", row) for row in rows)

    def send_image(self, path, tag, step):
        self.fault("image")
        self.received.append(("image", tag, step, path.read_bytes()[:4]))

    def send_file(self, path):
        self.fault("file")
        self.received.append(("file", path.name, path.read_text()))

    def finish(self):
        self.fault("finish")


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """Register the tracker for the length of a test; `Fake.received` begins empty."""
    TRACKERS.get("mlflow")  # imports the modules of the package, which register their entries once
    monkeypatch.setattr(TRACKERS, "_table", {**TRACKERS._table, "fake": Fake})
    monkeypatch.setattr(Fake, "received", [])
    monkeypatch.setattr(base, "RETRY_S", 0.05)
    return Fake


def rows_of(kind: str = "row") -> list:
    return [entry[1] for entry in Fake.received if entry[0] == kind]


def sent() -> list[tuple[int, str]]:
    return [(row.step, next(iter(row.values)).split("/")[0]) for row in rows_of()]


def warnings_in(out_dir: Path) -> list[str]:
    return [line for line in (out_dir / "train.log").read_text().splitlines() if "WARNING" in line]


def test_a_tracker_receives_rows_images_and_files(small_cfg, tmp_path, finished_run):
    train_model(small_cfg(*FAKE))
    assert_same_run(tmp_path / "out", finished_run)
    assert timeless(tmp_path / "out") == timeless(finished_run)
    assert sent() == WHOLE and warnings_in(tmp_path / "out") == []
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row.time_s for row in rows_of()] == [record["time"] for record in records]
    assert rows_of()[4].values["eval/top1"] == records[4]["top1"] and "eval/epoch" not in rows_of()[4].values
    assert ("image", "train/augmented", 0, b"\x89PNG") in Fake.received
    assert rows_of("file") == ["config.yaml", "results.json"]


def test_the_registry_has_the_trackers_without_importing_their_packages():
    code = "import sys; from distribuuuu.config.registry import TRACKERS; print(*TRACKERS.names())\n"
    code += "[TRACKERS.get(name) for name in TRACKERS.names()]; print({*sys.modules} & {'torch', 'mlflow', 'wandb'})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["mlflow tensorboard trackio wandb", "set()"]


@pytest.mark.parametrize("name, message", [("mlfow", "did you mean mlflow?"), ("tensorboard", None)])
def test_a_name_is_checked(small_cfg, name, message):
    if message is None:
        assert small_cfg("LOG.TRACKERS", name).LOG.TRACKERS == (name,)
    else:
        with pytest.raises(ConfigError, match=re.escape(message)):
            small_cfg("LOG.TRACKERS", name)
        done = run_python("-m", "distribuuuu", "train", "LOG.TRACKERS", name)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_package_that_is_missing_is_reported_early(small_cfg, monkeypatch):
    monkeypatch.setattr(Fake, "package", "no_such_package")
    problems = find_run_problems(small_cfg(*FAKE), train=True)
    assert [str(problem) for problem in problems if "TRACKERS" in str(problem)] == [
        "LOG.TRACKERS (command line): got fake, which is not installed; "
        "fix: pip install 'distribuuuu[no_such_package]'"]  # fmt: skip


# ------------------------------------------------------------------------------------ steps


@pytest.mark.parametrize("place", [(0, 2), (0, 4), (1, 2)])
def test_a_resumed_run_continues_the_same_run_at_the_right_step(small_cfg, monkeypatch, place):
    words = (*FAKE, "CHECKPOINT.EVERY_STEPS", 2)
    train_and_stop(small_cfg(*words), place, monkeypatch)
    train_model(small_cfg(*words))
    assert sorted(sent()) == sorted(WHOLE), "each row once"
    first, *others = rows_of("connect")
    assert first == "" and {*others} == {"run-1"}


def test_another_run_in_the_folder_is_another_run_of_the_tracker(small_cfg):
    for _ in range(2):
        train_model(small_cfg(*FAKE, "TRAIN.AUTO_RESUME", False))
    assert sent() == [*WHOLE, *WHOLE] and rows_of("connect") == ["", ""]


def test_only_the_main_process_has_trackers(small_cfg, monkeypatch):
    cfg = small_cfg(*FAKE, "LOG.TENSORBOARD", True)
    assert [type(one).__name__ for one in build_trackers(cfg, {}, 4, lambda: None)] == ["EventFile", "Fake"]
    monkeypatch.setattr(dist, "is_main", lambda: False)
    assert build_trackers(cfg, {}, 4, lambda: None) == []


def make_spool(folder: Path, num_steps: int = 4) -> Spool:
    return Spool(TrackedRun(folder, {"CFG_DEST": "config.yaml"}, num_steps), "fake")


def write(folder: Path, *positions: tuple[int, int], kind: str = "train") -> None:
    file = RecordFile(folder / "metrics.jsonl")
    for epoch, step in positions:
        file.append({"kind": kind, "epoch": epoch, "step": step, "loss": 1.0, "time": 5})


def take(one: Spool) -> list[int]:
    steps = [row.step for row in one.next_rows()]
    one.note_rows()
    return steps


def test_rows_that_a_rollback_replaces_are_not_sent_twice(tmp_path):
    one = make_spool(tmp_path)
    assert take(one) == []
    write(tmp_path, (1, 2), (1, 4), (2, 2))
    assert take(one) == [2, 4, 6] and take(one) == []
    drop_records_after(tmp_path / "metrics.jsonl", 0, 3)
    write(tmp_path, (1, 4))
    write(tmp_path, (1, 4), kind="eval")
    write(tmp_path, (2, 2), (2, 4))
    assert take(one) == [4, 8], "the evaluation, and the steps beyond those that were sent"
    assert take(make_spool(tmp_path)) == []


def test_rows_are_read_in_whole_lines_and_limited_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(spool, "MAX_ROWS", 2)
    write(tmp_path, (1, 1), (1, 2), (1, 3))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "epoch": 2')
    one = make_spool(tmp_path, num_steps=0)
    assert [take(one), take(one), take(one)] == [[1, 2], [3], []]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(', "step": 1, "loss": "x", "top1": true, "a": NaN}\nnot JSON\n')
    (row,) = one.next_rows()
    assert row.step == 4 and list(row.values) == ["train/a"], "3 steps per epoch; only numbers are curves"


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"{}", b'{"run": 1, "num_steps": 4, "rows": {}, "files": {}}',
    b'{"run": "", "num_steps": 4, "rows": {"train": "x"}, "files": {}}',
    b'{"run": "", "num_steps": "4", "rows": {}, "files": {}}'], ids=str)  # fmt: skip
def test_a_damaged_state_counts_as_none(tmp_path, content):
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "fake.json").write_bytes(content)
    write(tmp_path, (1, 1))
    one = make_spool(tmp_path, num_steps=0)
    assert one.run_id == "" and take(one) == [1]


def test_files_are_sent_again_if_they_change_and_links_never(tmp_path):
    (tmp_path / "results.json").write_text("1")
    (tmp_path / "secret").write_text("2")
    (tmp_path / "config.yaml").symlink_to(tmp_path / "secret")
    one = make_spool(tmp_path)
    for text in ("1", "2"):
        (tmp_path / "results.json").write_text(text)
        (path, digest), *others = one.next_files()
        one.note_file(path, digest)
        assert path.name == "results.json" and others == [] and one.next_files() == []


# ------------------------------------------------------------------------------------ faults


def always(method: str) -> None:
    raise ConnectionError("no route\nto host")


def failing_at(*methods: str):
    def fault(method: str) -> None:
        if method in methods:
            always(method)

    return fault


def once():
    left = ["rows", "connect"]

    def fault(method: str) -> None:
        if method in left:
            left.remove(method)
            always(method)

    return fault


RETURN = threading.Event()  # ends the calls that hang
FAULTS = {
    "dead": always, "rows": failing_at("rows"), "images and files": failing_at("image", "file"), "back": once(),
    "slow": lambda method: time.sleep(0.4), "hangs": lambda method: RETURN.wait(), "end": failing_at("finish"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_warning_and_track_sends_what_is_missing(small_cfg, tmp_path, monkeypatch, finished_run, fault):
    monkeypatch.setattr(base, "FLUSH_S", 0.3)
    monkeypatch.setattr(Fake, "fault", staticmethod(FAULTS[fault]))
    train_model(small_cfg(*FAKE))
    out = tmp_path / "out"
    assert_same_run(out, finished_run)
    assert timeless(out) == timeless(finished_run)
    (warning,) = warnings_in(out)
    assert "LOG.TRACKERS: fake: " in warning and warning.endswith(f"fix: after the run, distribuuuu track {out}")
    lines = [len((folder / "train.log").read_text().splitlines()) for folder in (out, finished_run)]
    assert lines[0] == lines[1] + 1
    monkeypatch.setattr(Fake, "fault", staticmethod(lambda method: None))
    RETURN.set()
    for thread in threading.enumerate():
        if thread.name == "tracker fake":
            thread.join()
    RETURN.clear()
    Tracker.send_missing(Fake(TrackedRun(out, {"CFG_DEST": "config.yaml"}, 0)))
    assert sent() == WHOLE and {*rows_of("file")} == {"config.yaml", "results.json"} and len(rows_of("image")) == 1


def test_a_full_disk_is_one_warning(small_cfg, tmp_path, monkeypatch, finished_run):
    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Spool, "_save", full)
    train_model(small_cfg(*FAKE))
    assert_same_run(tmp_path / "out", finished_run)
    (warning,) = warnings_in(tmp_path / "out")
    assert "fake: OSError: [Errno 28] No space left on device" in warning
    assert sent() == WHOLE[: len(sent())], "nothing twice"


def test_an_image_that_cannot_be_written_is_one_warning(tmp_path, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(base.logger, "warning", lambda text, *words: lines.append(text % words))
    (tmp_path / "trackers").write_text("a file")
    tracker = Fake(TrackedRun(tmp_path, {"CFG_DEST": "c"}, 4))
    for pixels in (torch.rand(3, 4, 5), torch.zeros(3, 4, 5, dtype=torch.uint8)):
        tracker.image("a/b", pixels, 1)
    assert len(lines) == 1 and "fake: an image is lost: [Errno 17]" in lines[0]


@pytest.mark.parametrize("pixels", [torch.zeros(5, 4, 4, dtype=torch.uint8), torch.zeros(3, 4, 4, dtype=torch.int16)])
def test_an_image_that_pillow_refuses_does_not_end_the_run(tmp_path, monkeypatch, pixels):
    lines: list[str] = []
    monkeypatch.setattr(base.logger, "warning", lambda text, *words: lines.append(text % words))
    Fake(TrackedRun(tmp_path, {"CFG_DEST": "c"}, 4)).image("a", pixels, 1)
    assert len(lines) == 1 and "fake: an image is lost: Cannot handle this data type" in lines[0]


def test_images_with_long_tags_have_short_names_of_their_own(tmp_path):
    one = make_spool(tmp_path)
    for tag in ("\u00fc" * 60 + "a", "\u00fc" * 60 + "b", "short/tag"):
        one.save_image(tag, torch.zeros(3, 4, 4, dtype=torch.uint8).numpy(), 1)
    images = one.next_images()
    assert len(images) == 3 and all(len(path.name) < 255 for path, _, _ in images)
    assert sorted(tag[:10] for _, tag, _ in images) == ["short/tag", "\u00fc" * 10, "\u00fc" * 10]


def test_the_plug_in_of_the_page(small_cfg, tmp_path):
    page = (ROOT / "docs" / "trackers.md").read_text()
    (tmp_path / "csv_tracker.py").write_text(page.split("```python\n")[1].split("```")[0])
    train_model(small_cfg("PLUGINS", tmp_path / "csv_tracker.py", "LOG.TRACKERS", "csv"))
    lines = (tmp_path / "out" / "rows.csv").read_text().splitlines()
    assert [int(line.split(",")[0]) for line in lines if "/loss," in line] == [step for step, _ in WHOLE]


# A plug-in whose server is a file; the parent kills the process at random moments.
PLUGIN = """
import os
from distribuuuu.config.registry import TRACKERS
from distribuuuu.records.trackers.base import Tracker

@TRACKERS.register("file")
class File(Tracker):
    name = "file"
    def connect(self, run_id): return run_id or "r"
    def send_rows(self, rows):
        with open(os.environ["SERVER"], "a") as file:
            file.writelines(f"{row.step} {row.time_s} {next(iter(row.values))}\\n" for row in rows)
    def send_image(self, path, tag, step): pass
    def send_file(self, path): pass
    def finish(self): pass
"""


@pytest.mark.slow
def test_sigkill_at_any_time_loses_no_row(image_folder, tmp_path, monkeypatch):
    (tmp_path / "plugin.py").write_text(PLUGIN)
    words = ("PLUGINS", tmp_path / "plugin.py", "CHECKPOINT.EVERY_STEPS", 1, "OPTIM.MAX_EPOCH", 12)
    plain = small_options(image_folder, tmp_path / "plain", *words)
    assert run_tool(TRAIN_NET, *plain).returncode == 0
    monkeypatch.setenv("SERVER", str(tmp_path / "server"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as `run_tool`
    args = small_options(image_folder, tmp_path / "out", *words, "LOG.TRACKERS", "file")
    metrics = tmp_path / "out" / "metrics.jsonl"
    for num_rows in (3, 13, 29, 44):
        process = subprocess.Popen([sys.executable, TRAIN_NET, *args], cwd=ROOT, stderr=subprocess.DEVNULL)
        while process.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < num_rows):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = run_tool(TRAIN_NET, *args, SERVER=str(tmp_path / "server"))
    assert done.returncode == 0 and "WARNING" not in done.stderr
    assert_same_run(tmp_path / "out", tmp_path / "plain")
    lines = [tuple(line.split()) for line in (tmp_path / "server").read_text().splitlines()]
    steps = [(int(step), tag.split("/")[0]) for step, _, tag in lines]
    assert {*steps} == {
        (step, kind) for step in range(1, 49) for kind in ("train", "eval") if kind[0] == "t" or step % 4 == 0
    }
    # Each of the four kills may fall between the answer of the server and the note, which repeats that request.
    assert len(lines) - len({*steps}) <= 4 * 3, "other rows of a resumed step are not sent again"
