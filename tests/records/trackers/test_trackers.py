"""Trackers (MLflow's sqlite store, W&B offline): rows arrive once, through kills; the training knows of no fault."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from support.commands import run_command
from support.processes import list_trackers, wait_for
from support.runs import ROOT, assert_same_run, timeless, train_and_stop
from support.tables import each_row, slow

from distribuuuu.records.metric_writers import RecordFile, drop_records_after
from distribuuuu.records.trackers import base
from distribuuuu.records.trackers.base import MetricRow, RunInfo, Tracker, TrackerProcesses, describe_error
from distribuuuu.trainer import train_model

# Steps and curves of the rows of a run of `small_cfg`, in order.
WHOLE = [(1, "train"), (2, "train"), (3, "train"), (4, "train"), (4, "eval"),
         (5, "train"), (6, "train"), (7, "train"), (8, "train"), (8, "eval")]  # fmt: skip
# A plug-in whose server is a file. FAULT names the methods that fail, or how the connection does.
PLUGIN = """
import os, time
from distribuuuu.config.registry import TRACKERS
from distribuuuu.records.trackers.base import Tracker

@TRACKERS.register("file")
class File(Tracker):
    name = "file"
    def write(self, *words):
        if words[0] in os.environ.get("FAULT", "").split():
            raise ConnectionError("no route\\nto host")
        with open(os.environ["SERVER"], "a") as file:
            file.write(" ".join(map(str, words)) + "\\n")
    def connect(self, run_id):
        if "hangs" in os.environ.get("FAULT", ""):
            time.sleep(1000)
        self.write("connect", run_id)
        return run_id or f"run-{os.getpid()}"
    def send_rows(self, rows):
        for row in rows:
            self.write("row", row.step, next(iter(row.values)).split("/")[0], row.time_s)
    def send_file(self, path): self.write("file", path.name)
    def finish(self): self.write("finish")

@TRACKERS.register("down")
class Down(File):
    name = "down"
    def connect(self, run_id): raise ConnectionError("no\\nroute")
"""


class Server:
    """The file that the tracker of `PLUGIN` writes."""

    def __init__(self, path: Path, plugin: Path):
        self.path, self.words = path, ("PLUGINS", plugin, "LOG.TRACKERS", "file")

    def read(self, kind: str) -> list[list[str]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [line.split(" ")[1:] for line in lines if line.startswith(kind)]

    def rows(self) -> list[tuple[int, str]]:
        return [(int(step), name) for step, name, _ in self.read("row")]

    def wait_for_ends(self, number: int) -> None:
        """Wait until processes have sent everything so many times."""
        wait_for(lambda: len(self.read("finish")) >= number)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plugin") / "plugin.py"
    path.write_text(PLUGIN)
    return path


@pytest.fixture
def server(tmp_path, monkeypatch, plugin) -> Server:
    monkeypatch.setenv("SERVER", str(tmp_path / "server"))
    return Server(tmp_path / "server", plugin)


def test_a_tracker_receives_rows_and_files(small_cfg, tmp_path, finished_run, server):
    train_model(small_cfg(*server.words))
    assert_same_run(tmp_path / "out", finished_run)
    assert timeless(tmp_path / "out") == timeless(finished_run)
    server.wait_for_ends(1)
    assert server.rows() == WHOLE and "WARNING" not in (tmp_path / "out" / "train.log").read_text()
    assert server.read("file") == [["config.yaml"], ["results.json"]]


class Store(Tracker):
    """A tracker in this process that keeps what it is sent."""

    name = "store"

    def __init__(self, folder: Path):
        super().__init__(RunInfo(folder, {"CFG_DEST": "config.yaml"}))
        self.steps, self.values, self.items = [], [], []

    def connect(self, run_id):
        return run_id or "id"

    def send_rows(self, rows):
        self.steps += [row.step for row in rows]
        self.values += [row.values for row in rows]

    def send_file(self, path):
        self.items.append(path.name)

    def finish(self):
        """Do nothing."""

    def take(self) -> list[int]:
        """Send what is missing; return the steps of the new rows."""
        before = len(self.steps)
        self.send_missing()
        return self.steps[before:]


def write(folder: Path, *positions: tuple[int, int], kind: str = "train") -> None:
    file = RecordFile(folder / "metrics.jsonl")
    for epoch, step in positions:
        file.append({"kind": kind, "epoch": epoch, "step": step, "loss": 1.0, "time": 5})


def test_rows_that_a_resume_replaces_are_not_sent_twice(tmp_path):
    one = Store(tmp_path)
    assert one.take() == []
    write(tmp_path, (1, 2), (1, 4), (2, 2))
    assert one.take() == [2, 4, 6] and one.take() == []
    drop_records_after(tmp_path / "metrics.jsonl", 0, 3)
    write(tmp_path, (1, 4))
    write(tmp_path, (1, 4), kind="eval")
    write(tmp_path, (2, 2), (2, 4))
    assert one.take() == [4, 8], "the evaluation, and the steps beyond those that were sent"
    assert Store(tmp_path).take() == []


def test_rows_are_read_in_whole_lines_and_limited_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "MAX_BYTES", 150)
    write(tmp_path, (1, 1), (1, 2), (1, 3))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "epoch": 2')
    one = Store(tmp_path)
    assert [one.take(), one.take()] == [[1, 2, 3], []]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(', "step": 1, "loss": "x", "top1": true, "a": NaN}\nnot JSON\n')
    assert one.take() == [4] and list(one.values[-1]) == ["train/a"], "3 steps per epoch; only numbers are curves"


def test_links_are_never_sent_and_pipes_and_devices_never_read(tmp_path):
    (tmp_path / "config.yaml").symlink_to("/etc/hostname")
    (tmp_path / "results.json").write_text("1")
    one = Store(tmp_path)
    one.send_missing()
    assert one.items == ["results.json"]
    (tmp_path / "trackers/store.json").unlink()
    (tmp_path / "trackers/store.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="not a regular file"):
        Store(tmp_path).send_missing()


@pytest.mark.parametrize("fault", [*map(slow, ("connect", "file", "finish", "hangs", "row")), "killed"])
def test_the_training_knows_of_no_fault(small_cfg, tmp_path, monkeypatch, finished_run, server, fault, capfd):
    """The command track sends what is missing."""
    out = tmp_path / "out"
    monkeypatch.setenv("FAULT", fault)
    began = time.monotonic()
    train_model(small_cfg(*server.words))
    assert time.monotonic() - began < 60, "the end of the training waits for nothing"
    assert_same_run(out, finished_run)
    assert timeless(out) == timeless(finished_run)
    if fault in ("hangs", "killed"):
        for pid in list_trackers(out):
            assert os.getsid(pid) == pid, "Ctrl-C reaches the training alone"
            os.kill(pid, signal.SIGKILL)
            # A process that is ending has no command line any more but holds its lock for a moment longer.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    wait_for(lambda: not list_trackers(out))
    if fault not in ("hangs", "killed"):
        (warning,) = [line for line in capfd.readouterr().err.splitlines() if "WARNING: LOG.TRACKERS" in line]
        assert "file: ConnectionError: no route to host" in warning and f"distribuuuu track {out}" in warning
    monkeypatch.delenv("FAULT")
    assert run_command("track", out, *server.words) == 0
    assert sorted(server.rows()) == sorted(WHOLE)
    assert {name for (name,) in server.read("file")} == {"config.yaml", "results.json"}


def test_no_secret_of_the_address_or_the_environment_is_shown(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    error = ConnectionError("http://me:pa@ss@host:5000/api refused 0123456789abcdef\nsee https://docs")
    text = describe_error(error)
    assert "pa@ss" not in text and "me:" not in text and "0123456789abcdef" not in text
    assert "host:5000/api refused" in text and "https://docs" in text and "\n" not in text


def test_the_end_reaches_a_process_although_a_worker_holds_its_pipe_and_another_process_has_ended(tmp_path):
    processes = TrackerProcesses(tmp_path, [], [])
    processes._processes = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
                            for words in (["true"], ["head", "-n", "1"])]  # fmt: skip
    ended, waiting = processes._processes
    ended.wait()
    held = os.dup(waiting.stdin.fileno())
    processes.end()
    assert waiting.wait(60) == 0 and waiting.stdin.closed
    os.close(held)


ROWS = [MetricRow(7, 1.5, {"train/top1%": 2.0}), MetricRow(8, 2.5, {"train/top1%": 3.0})]


def test_what_mlflow_is_sent(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", mlflow := mock.MagicMock())
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    monkeypatch.setattr(base.logging, "disable", mock.Mock())
    monkeypatch.setitem(base._MAX_ITEMS, "metrics", 1)
    mlflow.entities.Metric = mlflow.entities.Param = lambda *values: values
    client = mlflow.MlflowClient.return_value
    client.create_run.return_value.info.run_id, client.get_run.return_value.data.params = "id", {"B": "1"}
    one = base.MLflow(RunInfo(tmp_path, {"A": 600 * "x", "B": 1}))
    assert one.connect("") == one.connect("id") == "id"
    one.send_rows(ROWS)
    one.send_file(tmp_path / "config.yaml")
    one.finish()
    params, metrics = [("A", 500 * "x")], [("train/top1_", 2.0, 1500, 7), ("train/top1_", 3.0, 2500, 8)]
    sent = [mock.call("id", params=params), mock.call("id", params=params)]
    assert client.log_batch.mock_calls == [*sent, *(mock.call("id", metrics=[metric]) for metric in metrics)]
    mlflow.set_experiment.assert_called_once_with("mine")
    assert json.loads((tmp_path / "trackers/mlflow.json").read_text())["run"] == "id"
    client.update_run.assert_called_once_with("id", status="RUNNING")
    client.log_artifact.assert_called_once_with("id", f"{tmp_path}/config.yaml")
    client.set_terminated.assert_called_once_with("id")


def test_what_wandb_is_sent(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb := mock.MagicMock())
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    one, run = base.Wandb(RunInfo(tmp_path, {})), wandb.init.return_value
    run.id = "id"
    assert one.connect("") == "id" and len(wandb.init.call_args.kwargs["id"]) == 8
    one.connect("id")
    own = {"id": "id", "resume": "allow", "project": "mine", "dir": str(tmp_path / "trackers")}
    assert own.items() <= wandb.init.call_args.kwargs.items()
    one.send_rows(ROWS)
    one.send_file(tmp_path / "config.yaml")
    one.finish()
    rows = [mock.call.log(row.values, step=row.step) for row in ROWS]
    file = mock.call.log_artifact(f"{tmp_path}/config.yaml", "id-config", "result")
    assert run.mock_calls == [*rows, file, mock.call.finish()]


def test_the_plug_in_of_the_page(small_cfg, tmp_path):
    page = (ROOT / "docs" / "trackers.md").read_text()
    (tmp_path / "csv_tracker.py").write_text(page.split("```python\n")[1].split("```")[0])
    train_model(small_cfg("PLUGINS", tmp_path / "csv_tracker.py", "LOG.TRACKERS", "csv"))
    wait_for(lambda: not list_trackers(tmp_path / "out"))
    lines = (tmp_path / "out" / "rows.csv").read_text().splitlines()
    assert [int(line.split(",")[0]) for line in lines if "/loss," in line] == [step for step, _ in WHOLE]


def test_a_run_without_trackers_is_sent_once(copied_run, server, capsys):
    words = (copied_run, *server.words)
    assert run_command("track", *words) == 0 and server.rows() == WHOLE
    assert run_command("track", *words) == 0 and server.rows() == WHOLE and len(server.read("finish")) == 2
    assert capsys.readouterr().out == "".join(f"file: connecting\nfile: rows sent: {number}\n" for number in (10, 0))
    assert run_command("track", *words[:-1], "[down, file]") == 2
    out, err = capsys.readouterr()
    assert out == "down: connecting\nfile: connecting\nfile: rows sent: 0\n" and len(server.read("finish")) == 3
    assert "LOG.TRACKERS: down: ConnectionError: no route; OUT_DIR keeps" in err and "Traceback" not in err
    assert " file:" not in err


@each_row("words, message", [
    (["no_run"], "RUN: no such file or folder: no_run; expected the OUT_DIR of a run"),
    (["{run}/checkpoints"], "RUN: no config.yaml in or above {run}/checkpoints; expected the OUT_DIR of a run"),
    (["{run}"], "LOG.TRACKERS: got []; expected some of "),
    (["{run}", "LOG.TRACKERS", "[wandbb]"], "did you mean wandb?"),
    (["{run}", "--trackers", "store"], "no such flag: --trackers"),
    (["{run}", "LOG.TRACKERS", "wandb", "OPTIM.BASE_LR", "9"], "OPTIM.BASE_LR: is sent as the run had it; fix: remove"),
])  # fmt: skip
def test_mistakes_are_one_line(finished_run, capsys, words, message):
    assert run_command("track", *(word.format(run=finished_run) for word in words)) == 2
    err = capsys.readouterr().err
    assert message.format(run=finished_run) in err and "Traceback" not in err


def check_mlflow(folder: Path, run_id: str) -> None:
    client = pytest.importorskip("mlflow").MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("distribuuuu").experiment_id])
    history = client.get_metric_history(run_id, "train/loss")
    assert [metric.step for metric in history] == [*range(1, 9)] and run.info.status == "FINISHED"
    assert run.data.params["MODEL.ARCH"] == "resnet8" and run.data.metrics["eval/top1"] > 0
    files = {item.path for item in client.list_artifacts(run_id)}
    assert files == {"config.yaml", "results.json"}


def check_wandb(folder: Path, run_id: str) -> None:
    written = list((folder / "out" / "trackers" / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert written and b"train/loss" in b"".join(path.read_bytes() for path in written)


CHECKS = {"mlflow": check_mlflow, "wandb": check_wandb}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_a_resumed_run_is_one_run_of_the_tracker(small_cfg, tmp_path, monkeypatch, finished_run, name, capfd):
    pytest.importorskip(name, reason=f"pip install 'distribuuuu[{name}]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    words = ("LOG.TRACKERS", name, "CHECKPOINT.EVERY_STEPS", 2)
    train_and_stop(small_cfg(*words), (0, 2), monkeypatch)
    train_model(small_cfg(*words))
    out = tmp_path / "out"
    wait_for(lambda: not list_trackers(out))
    assert_same_run(out, finished_run)
    CHECKS[name](tmp_path, json.loads((out / "trackers" / f"{name}.json").read_text())["run"])
    assert "LOG.TRACKERS" not in capfd.readouterr().err
