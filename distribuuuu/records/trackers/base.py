"""The base class of trackers, which reads what a run writes and remembers what it has sent.

The rows are those of metrics.jsonl; the images are PNG files in OUT_DIR/trackers/images. OUT_DIR/trackers/NAME.json
holds the identifier of the run in the tracker, and the last row of each kind that was sent.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from distribuuuu.config.run_files import METRICS, RESULTS, TEST_RESULTS, TRACKERS_FOLDER
from distribuuuu.files.atomic_file import make_folder, replacing
from distribuuuu.files.untrusted import MAX_JSON, open_regular, parse_json, printable, read_regular
from distribuuuu.records.metric_writers import parse_record
from distribuuuu.records.tensorboard import curves_of

# Project of the runs if the environment names none, and the folder of the images.
PROJECT, IMAGES = "distribuuuu", "images"
# Rows that are sent at once, bytes of a file that is sent, characters of an error.
MAX_ROWS, _MAX_FILE, _MAX_ERROR = 200, 1 << 26, 200
_SECRET = re.compile("KEY|TOKEN|PASS|SECRET|CREDENTIAL")


class RunInfo(NamedTuple):
    """A run: its folder, its options by name, and the steps of an epoch; 0: those of its longest epoch so far."""

    out_dir: Path
    options: dict[str, Any]
    num_steps: int = 0


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
        self.sent = {"row": 0, "image": 0, "file": 0}  # numbers of this process
        self._is_connected = False
        self._offset, self._file_id = 0, (0, 0)
        self._state: dict[str, Any] = {"run": "", "num_steps": 0, "rows": {}, "files": {}}
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):  # there is none, or it is damaged
            stored = parse_json(read_regular(run.out_dir / TRACKERS_FOLDER / f"{self.name}.json", MAX_JSON))
            self._state = {key: type(value)(stored[key]) for key, value in self._state.items()}
        self._state["num_steps"] = run.num_steps or self._state["num_steps"]

    @abstractmethod
    def connect(self, run_id: str) -> str:
        """Continue the run of an identifier, or begin one if it is empty; return the identifier."""

    @abstractmethod
    def send_rows(self, rows: list[MetricRow]) -> None:
        """Send rows in the order of the steps."""

    @abstractmethod
    def send_image(self, path: Path, tag: str, step: int) -> None:
        """Send an image, a PNG file."""

    @abstractmethod
    def send_file(self, path: Path) -> None:
        """Send the config or the results, which replace those of the same name."""

    @abstractmethod
    def finish(self) -> None:
        """Flush and close the connection; `connect` may continue the run later."""

    def send_missing(self, with_files: bool = True) -> None:
        """Send the rows, the images and, at the end, the files that the tracker lacks; may raise any exception."""
        if not self._is_connected:
            self.note_run(self.connect(self._state["run"]))
            self._is_connected = True
        self._send_rows()
        for path in sorted((self.run.out_dir / TRACKERS_FOLDER / IMAGES).glob("[0-9]*_*.png")):
            if path.name not in self._state["files"] and _is_own_file(path):
                step, _, tag = path.stem.partition("_")
                self.send_image(path, unquote(tag), int(step))
                self._note_file("image", path)
        if with_files:
            for name in (str(self.run.options["CFG_DEST"]), RESULTS, TEST_RESULTS):
                if _is_own_file(path := self.run.out_dir / name):
                    digest = hashlib.sha256(read_regular(path, _MAX_FILE)).hexdigest()
                    if self._state["files"].get(name) != digest:
                        self.send_file(path)
                        self._note_file("file", path, digest)
            self.finish()
            self._is_connected = False

    def note_run(self, run_id: str) -> None:
        """Store the identifier of the run in the tracker."""
        if run_id != self._state["run"]:
            self._state["run"] = run_id
            self._save()

    def _note_file(self, kind: str, path: Path, digest: str = "") -> None:
        self.sent[kind] += 1
        self._state["files"][path.name] = digest
        self._save()

    def _save(self) -> None:
        with replacing(make_folder(self.run.out_dir, TRACKERS_FOLDER) / f"{self.name}.json", "w") as file:
            json.dump(self._state, file)

    def _send_rows(self) -> None:
        """Send the rows that were not sent, up to `MAX_ROWS` at once, which then count as sent.

        Rows up to the last one of their kind are not repeated, even if a rollback or a resume has replaced them.
        """
        if not os.path.lexists(path := self.run.out_dir / METRICS):  # before the first row
            return
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if self._file_id != (status.st_dev, status.st_ino) or status.st_size < self._offset:
                self._file_id, self._offset = (status.st_dev, status.st_ino), 0  # a rollback replaces the file
            file.seek(self._offset)
            # The last line may be half written.
            lines = itertools.takewhile(lambda line: line.endswith(b"\n"), iter(lambda: file.readline(MAX_JSON), b""))
            while chunk := list(itertools.islice(lines, MAX_ROWS)):
                rows, last = [], dict(self._state["rows"])
                for record in filter(None, map(parse_record, chunk)):
                    position = [record["epoch"], record["step"]]
                    if position > last.get(record["kind"], [0, 0]):
                        last[record["kind"]] = position
                        rows.append(self._make_row(record))
                if rows:
                    self.send_rows(rows)
                self.sent["row"] += len(rows)
                self._state["rows"] = last
                self._offset += sum(map(len, chunk))
                self._save()

    def _make_row(self, record: dict[str, Any]) -> MetricRow:
        if self.run.num_steps == 0:
            self._state["num_steps"] = max(self._state["num_steps"], record["step"])
        values = {tag: value for tag, value in curves_of(record).items() if type(value) in (int, float)}
        time_s = record["time"] if type(record.get("time")) in (int, float) else 0.0
        return MetricRow((record["epoch"] - 1) * self._state["num_steps"] + record["step"], time_s, values)


def _is_own_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def describe_error(error: Exception) -> str:
    """Return an error in one line, without passwords in URLs and secrets of the environment."""
    text = printable(" ".join(f"{type(error).__name__}: {error}".split()))
    text = re.sub(r"://[^/\s]*@", "://***@", text)
    for name, value in os.environ.items():
        if _SECRET.search(name.upper()) and len(value) > 3:
            text = text.replace(value, "***")
    return text[:_MAX_ERROR]
