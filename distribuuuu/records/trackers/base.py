"""Experiment trackers: the processes that a training starts for them, and the class of what runs in such a process.

It reads what the run writes: the rows of metrics.jsonl, the config, the results, and OUT_DIR/trackers/images/*.png.
OUT_DIR/trackers/NAME.json holds the identifier of the run in the tracker, and what was sent.
"""

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from distribuuuu.config.run_files import METRICS, RESULTS, TEST_RESULTS, TRACKERS_FOLDER
from distribuuuu.files.atomic_file import make_folder, replacing
from distribuuuu.files.untrusted import MAX_JSON, open_regular, parse_json, printable, read_regular
from distribuuuu.launch.detect import NPROC_MARK
from distribuuuu.records.metric_writers import parse_record
from distribuuuu.records.tensorboard import curves_of

logger = logging.getLogger(__name__)

# Bytes of rows that are sent at once, and characters of an error.
MAX_BYTES, _MAX_ERROR = 1 << 20, 200
_SECRET = re.compile("KEY|TOKEN|PASS|SECRET|CREDENTIAL")


class TrackerProcesses:
    """Processes that follow a run; each sends to one tracker, and ends by itself after `end` or the end of this one."""

    def __init__(self, out_dir: str | os.PathLike, names: Sequence[str], plugins: Sequence[str]):
        self._out_dir = Path(out_dir)
        # The end of the training must not end them by a signal, see `launch.detect.was_launched`.
        env = {key: value for key, value in os.environ.items() if key not in (NPROC_MARK, "TORCHELASTIC_RUN_ID")}
        command = [sys.executable, "-m", "distribuuuu", "track", str(out_dir), "--follow"]
        commands = [[*command, "LOG.TRACKERS", json.dumps([name]), "PLUGINS", json.dumps([*plugins])] for name in names]
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
        self._processes = [subprocess.Popen(one, env=env, start_new_session=True, **streams) for one in commands]

    def rewind(self, step: int) -> None:
        """Do nothing: rows that are repeated after a resume or a rollback are not sent again."""

    def row(self, record: dict[str, Any], step: int) -> None:
        """Do nothing: the processes read metrics.jsonl."""

    def image(self, tag: str, pixels: Any, step: int) -> None:
        """Write an image, a tensor (3, H, W), uint8 or float from 0 to 1; one that cannot be written is lost."""
        from torchvision.transforms.functional import to_pil_image

        image = to_pil_image(pixels.clamp(0, 1) if pixels.is_floating_point() else pixels)
        try:
            path = make_folder(self._out_dir, TRACKERS_FOLDER, "images") / f"{step:09d}_{quote(tag, safe='')}.png"
            with replacing(path) as file:
                image.save(file, "PNG", compress_level=1)
        except OSError as error:
            logger.warning("LOG.TRACKERS: an image cannot be written: %s", error)

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
        self.sent = {"row": 0, "image": 0, "file": 0}  # numbers of this process
        self._is_connected = False
        # Of metrics.jsonl: its file, how much of it was read, and its last step so far, that of an epoch's end.
        self._file_id, self._offset, self._num_steps = 0, 0, 0
        self._state: dict[str, Any] = {"run": "", "rows": {}, "files": []}
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
    def send_image(self, path: Path, tag: str, step: int) -> None:
        """Send an image, a PNG file."""

    @abstractmethod
    def send_file(self, path: Path) -> None:
        """Send the config or the results, which replace those of the same name."""

    @abstractmethod
    def finish(self) -> None:
        """Flush and close the connection; `connect` may continue the run later."""

    def send_missing(self, with_files: bool = True) -> None:
        """Send the rows and the images that the tracker lacks and, at the end, the files; may raise any exception."""
        if not self._is_connected:
            self.note(run=self.connect(self._state["run"]))
            self._is_connected = True
        if os.path.lexists(path := self.run.out_dir / METRICS):  # else it is before the first row
            self._send_rows(path)
        for path in sorted((self.run.out_dir / TRACKERS_FOLDER / "images").glob("[0-9]*_*.png")):
            if path.name not in self._state["files"] and _is_own_file(path):
                step, _, tag = path.stem.partition("_")
                self.send_image(path, unquote(tag), int(step))
                self.sent["image"] += 1
                self.note(files=[*self._state["files"], path.name])
        if with_files:
            names = (str(self.run.options["CFG_DEST"]), RESULTS, TEST_RESULTS)
            for path in filter(_is_own_file, map(self.run.out_dir.joinpath, names)):
                self.send_file(path)
                self.sent["file"] += 1
            self.finish()
            self._is_connected = False

    def note(self, **changes: Any) -> None:
        """Store the identifier of the run in the tracker, `run`, or what was sent."""
        self._state |= changes
        with replacing(make_folder(self.run.out_dir, TRACKERS_FOLDER) / f"{self.name}.json", "w") as file:
            json.dump(self._state, file)

    def _send_rows(self, path: Path) -> None:
        """Send the rows that were not sent, up to `MAX_BYTES` at once, which then count as sent.

        Rows up to the last one of their kind are not repeated, even if a rollback or a resume has replaced them.
        """
        with open_regular(path) as file:
            if self._file_id != (inode := os.fstat(file.fileno()).st_ino):  # a rollback replaces the file
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
                        rows.append(self._make_row(record))
                if rows:
                    self.send_rows(rows)
                    self.sent["row"] += len(rows)
                    self.note(rows=last)
                self._offset += end
                file.seek(self._offset)

    def _make_row(self, record: dict[str, Any]) -> MetricRow:
        values = {tag: value for tag, value in curves_of(record).items() if type(value) in (int, float)}
        time_s = record["time"] if type(record.get("time")) in (int, float) else 0.0
        return MetricRow((record["epoch"] - 1) * self._num_steps + record["step"], time_s, values)


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
