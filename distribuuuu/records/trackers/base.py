"""Experiment trackers: the processes that a training starts for them, and the class of what runs in such a process.

A tracker reads what the run writes: the rows of metrics.jsonl, the config and the results. OUT_DIR/trackers/NAME.json
holds the identifier of the run in the tracker, and what was sent. MLflow and Weights & Biases are below, see
docs/trackers.md.
"""

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distribuuuu.config.registry import TRACKERS
from distribuuuu.config.run_files import METRICS, RESULTS, TEST_RESULTS, TRACKERS_FOLDER
from distribuuuu.files.atomic_file import make_folder, replacing
from distribuuuu.files.untrusted import MAX_JSON, open_regular, parse_json, printable, read_regular
from distribuuuu.launch.detect import NPROC_MARK
from distribuuuu.records.metric_writers import parse_record
from distribuuuu.records.tensorboard import curves_of

# Bytes of rows that are sent at once, and characters of an error.
MAX_BYTES, _MAX_ERROR = 1 << 20, 200
# Project of the runs if the environment names none.
PROJECT = "distribuuuu"
# Limits of MLflow's REST API: items of a request, and characters of a parameter and of a name.
_MAX_ITEMS, _MAX_VALUE, _MAX_KEY = {"metrics": 1000, "params": 100}, 500, 250
_SECRET = re.compile("KEY|TOKEN|PASS|SECRET|CREDENTIAL")


class TrackerProcesses:
    """Processes that follow a run; each sends to one tracker, and ends by itself after `end` or the end of this one."""

    def __init__(self, out_dir: str | os.PathLike, names: Sequence[str], plugins: Sequence[str]):
        # The end of the training must not end them by a signal, see `launch.detect.was_launched`.
        env = {key: value for key, value in os.environ.items() if key not in (NPROC_MARK, "TORCHELASTIC_RUN_ID")}
        command = [sys.executable, "-m", "distribuuuu", "track", str(out_dir), "--follow"]
        commands = [[*command, "LOG.TRACKERS", json.dumps([name]), "PLUGINS", json.dumps([*plugins])] for name in names]
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
        self._processes = [subprocess.Popen(one, env=env, start_new_session=True, **streams) for one in commands]

    def row(self, *_: Any) -> None:
        """Do nothing: the processes read metrics.jsonl, and do not send repeated rows; TensorBoard keeps the images."""

    rewind = image = row

    def end(self) -> None:
        """Let the processes send what is missing and exit; they are not waited for."""
        for process in self._processes:
            assert process.stdin, "it is a pipe"
            with contextlib.suppress(OSError):  # it has ended
                process.stdin.write(b"\n")  # a loader worker that was forked may still hold the pipe open
                process.stdin.close()


class RunInfo(NamedTuple):
    """A run: its folder, and its options by name."""

    out_dir: Path
    options: dict[str, Any]


class MetricRow(NamedTuple):
    """A row of metrics.jsonl: the step of the run from its start, the time in seconds since 1970, and the numbers."""

    step: int
    time_s: float
    values: dict[str, float]


class Tracker(ABC):
    """A tracker: a subclass sends to one service; each of its methods may block or raise any exception.

    It runs in a process of its own, `distribuuuu track RUN --follow`, and so never disturbs the training.
    """

    # The name in TRACKERS, and the Python package that it needs.
    name, package = "", ""

    def __init__(self, run: RunInfo):
        self.run = run
        self._is_connected, self.num_sent = False, 0  # rows
        # Of metrics.jsonl: its file, how much of it was read, and its last step so far, that of an epoch's end.
        self._file_id, self._offset, self._num_steps = 0, 0, 0
        self._state: dict[str, Any] = {"run": "", "rows": {}}
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):  # there is none, or it is damaged
            stored = parse_json(read_regular(run.out_dir / TRACKERS_FOLDER / f"{self.name}.json", MAX_JSON))
            self._state = {key: type(value)(stored[key]) for key, value in self._state.items()}

    @abstractmethod
    def connect(self, run_id: str) -> str:
        """Continue the run of an identifier, or begin one if it is empty; return the identifier."""

    @abstractmethod
    def send_rows(self, rows: list[MetricRow]) -> None:
        """Send rows in the order of the steps."""

    @abstractmethod
    def send_file(self, path: Path) -> None:
        """Send the config or the results, which replace those of the same name."""

    @abstractmethod
    def finish(self) -> None:
        """Flush and close the connection; `connect` may continue the run later."""

    def send_missing(self, with_files: bool = True) -> None:
        """Send the rows that the tracker lacks and, at the end, the files; may raise any exception."""
        if not self._is_connected:
            self.note(run=self.connect(self._state["run"]))
            self._is_connected = True
        if os.path.lexists(path := self.run.out_dir / METRICS):  # else it is before the first row
            self._send_rows(path)
        if with_files:
            for path in map(self.run.out_dir.joinpath, (str(self.run.options["CFG_DEST"]), RESULTS, TEST_RESULTS)):
                if path.is_file() and not path.is_symlink():
                    self.send_file(path)
            self.finish()

    def note(self, **changes: Any) -> None:
        """Store the identifier of the run in the tracker, `run`, or what was sent."""
        self._state |= changes
        with replacing(make_folder(self.run.out_dir, TRACKERS_FOLDER) / f"{self.name}.json", "w") as file:
            json.dump(self._state, file)

    def _send_rows(self, path: Path) -> None:
        """Send the rows that were not sent, up to `MAX_BYTES` at once, which then count as sent.

        Rows up to the last one of their kind are not repeated, even if a resume has replaced them.
        """
        with open_regular(path) as file:
            if self._file_id != (inode := os.fstat(file.fileno()).st_ino):  # a resume replaces the file
                self._file_id, self._offset = inode, 0
            file.seek(self._offset)
            # The last line may be half written.
            while end := (data := file.read(MAX_BYTES)).rfind(b"\n") + 1:
                rows, last = [], dict(self._state["rows"])
                for record in filter(None, map(parse_record, data[:end].splitlines())):
                    self._num_steps = max(self._num_steps, record["step"])
                    position = [record["epoch"], record["step"]]
                    if position > last.get(record["kind"], [0, 0]):
                        last[record["kind"]] = position
                        curves = {tag: value for tag, value in curves_of(record).items() if type(value) in (int, float)}
                        time_s = record["time"] if type(record.get("time")) in (int, float) else 0.0
                        step = (record["epoch"] - 1) * self._num_steps + record["step"]
                        rows.append(MetricRow(step, time_s, curves))
                if rows:
                    self.send_rows(rows)
                    self.note(rows=last)
                    self.num_sent += len(rows)
                self._offset += end
                file.seek(self._offset)


def describe_error(error: Exception) -> str:
    """Return an error in one line, without passwords in URLs and secrets of the environment."""
    text = printable(" ".join(f"{type(error).__name__}: {error}".split()))
    text = re.sub(r"://[^/\s]*@", "://***@", text)
    for name, value in os.environ.items():
        if _SECRET.search(name.upper()) and len(value) > 3:
            text = text.replace(value, "***")
    return text[:_MAX_ERROR]


@TRACKERS.register("mlflow")
class MLflow(Tracker):
    """A run of MLflow. A row of metrics.jsonl that is sent twice is stored once, since its time is the same."""

    name = package = "mlflow"

    def connect(self, run_id: str) -> str:
        """Open the run; the options become its parameters, as far as it lacks them: they cannot be changed."""
        import mlflow

        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # its 7 take minutes, and the process repeats
        logging.disable(logging.WARNING)  # of its database and its requests
        self._client, self._metric = mlflow.MlflowClient(), mlflow.entities.Metric
        if run_id:
            self._client.update_run(run_id, status="RUNNING")
        else:
            experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)).experiment_id
            run_id = self._client.create_run(experiment, run_name=self.run.out_dir.name).info.run_id
            self.note(run=run_id)  # at once: a failure of the next request must not begin another run
        self._run_id, known = run_id, self._client.get_run(run_id).data.params
        options = {_key(key): str(value)[:_MAX_VALUE] for key, value in self.run.options.items()}
        self._send("params", [mlflow.entities.Param(*pair) for pair in options.items() if pair[0] not in known])
        return run_id

    def send_rows(self, rows: list[MetricRow]) -> None:
        self._send("metrics", [self._metric(_key(tag), value, int(1000 * row.time_s), row.step)
                               for row in rows for tag, value in row.values.items()])  # fmt: skip

    def _send(self, kind: str, items: list) -> None:
        for first in range(0, len(items), size := _MAX_ITEMS[kind]):
            self._client.log_batch(self._run_id, **{kind: items[first : first + size]})

    def send_file(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)


@TRACKERS.register("wandb")
class Wandb(Tracker):
    """A run of W&B. With WANDB_MODE=offline its files are in OUT_DIR/trackers/wandb, for `wandb sync`."""

    name = package = "wandb"

    def connect(self, run_id: str) -> str:
        """Open the run of an identifier, which the service lets the client choose."""
        import wandb

        own = {"PROJECT": PROJECT, "NAME": self.run.out_dir.name,
               "DIR": str(make_folder(self.run.out_dir, TRACKERS_FOLDER))}  # fmt: skip
        options: dict[str, Any] = {name.lower(): os.environ.get(f"WANDB_{name}", value) for name, value in own.items()}
        quiet = {"silent": True, "console": "off", "x_disable_stats": True, "x_disable_meta": True, "disable_git": True}
        self._run: Any = wandb.init(id=run_id or uuid.uuid4().hex[:8], config=self.run.options, resume="allow",
                                    allow_val_change=True, settings=wandb.Settings(**quiet), **options)  # fmt: skip
        return self._run.id

    def send_rows(self, rows: list[MetricRow]) -> None:
        """Hand the rows to the process of W&B."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def send_file(self, path: Path) -> None:
        self._run.log_artifact(str(path), f"{self._run.id}-{path.stem}", "result")

    def finish(self) -> None:
        """Wait until everything has been written or uploaded."""
        self._run.finish()


def _key(name: str) -> str:
    """Return a name that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:_MAX_KEY]
