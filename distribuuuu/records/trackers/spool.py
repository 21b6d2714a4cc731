"""The spool of a tracker: what it has received of a run, and what is missing.

The rows are those of metrics.jsonl. The images are PNG files in OUT_DIR/trackers/images. A small file of each tracker,
OUT_DIR/trackers/NAME.json, holds the identifier of its run and the last row of each kind that it has received.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from distribuuuu.config.run_files import METRICS, RESULTS, TEST_RESULTS, TRACKERS_FOLDER
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.untrusted import MAX_JSON, open_regular, parse_json, read_regular
from distribuuuu.records.metric_writers import TrackedRun, curves_of, parse_record

# Rows that are sent at once.
MAX_ROWS = 200
# Bytes of a file that is sent, and of the quoted tag in the name of an image.
_MAX_FILE, _MAX_TAG = 1 << 26, 180


class MetricRow(NamedTuple):
    """A row of metrics.jsonl: the step of the run from its start, the time in seconds since 1970, and the numbers."""

    step: int
    time_s: float
    values: dict[str, float]


class Spool:
    """Record of what a tracker has received, in OUT_DIR/trackers/NAME.json.

    Args:
        run: the run.
        name: the name of the tracker.
    """

    def __init__(self, run: TrackedRun, name: str):
        self._run, self._folder = run, run.out_dir / TRACKERS_FOLDER
        self._path, self._metrics = self._folder / f"{name}.json", run.out_dir / METRICS
        self._state = self._read()
        self._state["num_steps"] = run.num_steps or self._state["num_steps"] or self._find_longest_epoch()
        self._offset, self._file_id, self._read_rows = 0, (0, 0), dict[str, list[int]]()

    def _read(self) -> dict[str, Any]:
        """Return the content of the file; an empty one if it is missing or damaged."""
        empty: dict[str, Any] = {"run": "", "num_steps": 0, "rows": {}, "files": {}}
        try:
            state = parse_json(read_regular(self._path, MAX_JSON))
        except (OSError, ValueError):
            return empty
        if not isinstance(state, dict) or any(type(state.get(key)) is not type(empty[key]) for key in empty):
            return empty
        positions = state["rows"].values()
        is_valid = all(isinstance(one, list) and [type(part) for part in one] == [int, int] for one in positions)
        return state if is_valid else empty

    def _find_longest_epoch(self) -> int:
        """Return the steps of an epoch by the rows: each epoch but the last one of a run is whole."""
        records = map(parse_record, self._metrics.read_bytes().splitlines() if self._metrics.exists() else ())
        return max((record["step"] for record in records if record), default=1)

    def _save(self) -> None:
        if loss := self._run.find_loss():
            raise OSError(loss)
        self._folder.mkdir(exist_ok=True)
        with replacing(self._path, "w", encoding="utf-8") as file:
            json.dump(self._state, file)

    @property
    def run_id(self) -> str:
        """The identifier of the run in the tracker; empty: it has none yet."""
        return self._state["run"]

    def begin(self, run_id: str) -> None:
        """Note the identifier of the run in the tracker."""
        if run_id != self.run_id:
            self._state["run"] = run_id
            self._save()

    def next_rows(self) -> list[MetricRow]:
        """Return the next rows that the tracker lacks, up to `MAX_ROWS`; `note_rows` notes that it has them.

        Rows up to the last one of their kind that was sent are not repeated, even if a rollback or a resume has
        replaced them.
        """
        rows: list[MetricRow] = []
        self._read_rows = dict(self._state["rows"])
        if not self._metrics.exists():  # before the first row
            return rows
        with open_regular(self._metrics) as file:
            status = os.fstat(file.fileno())
            if self._file_id != (status.st_dev, status.st_ino) or status.st_size < self._offset:
                self._file_id, self._offset = (status.st_dev, status.st_ino), 0  # a rollback replaces the file
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n") or len(rows) == MAX_ROWS:
                    break
                self._offset += len(line)
                record = parse_record(line)
                if record and self._is_new(record["kind"], [record["epoch"], record["step"]]):
                    rows.append(self._row(record))
        return rows

    def _is_new(self, kind: str, position: list[int]) -> bool:
        if position <= self._read_rows.get(kind, [0, 0]):
            return False
        self._read_rows[kind] = position
        return True

    def _row(self, record: dict[str, Any]) -> MetricRow:
        curves = {tag: value for tag, value in curves_of(record).items() if type(value) in (int, float)}
        time_s = record["time"] if type(record.get("time")) in (int, float) else 0.0
        return MetricRow((record["epoch"] - 1) * self._state["num_steps"] + record["step"], time_s, curves)

    def note_rows(self) -> None:
        """Note that the tracker has the rows of `next_rows`."""
        self._state["rows"] = self._read_rows
        self._save()

    def forget_read(self) -> None:
        """Read the rows from the start again, since some may not have been sent."""
        self._offset = 0

    def save_image(self, tag: str, pixels: Any, step: int) -> None:
        """Write an image, uint8 (3, H, W), to the folder of images, unless it is there."""
        from PIL import Image

        path = self._folder / "images" / f"{step:09d}_{_file_name(tag)}.png"
        if path.exists():
            return
        if loss := self._run.find_loss():
            raise OSError(loss)
        self._folder.mkdir(exist_ok=True)
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as file:
            Image.fromarray(pixels.transpose(1, 2, 0)).save(file, "PNG", compress_level=1)

    def next_images(self) -> list[tuple[Path, str, int]]:
        """Return (path, tag, step) of each image that the tracker lacks."""
        paths = sorted((self._folder / "images").glob("*_*.png"))
        new = [path for path in paths if path.name not in self._state["files"] and not path.is_symlink()]
        return [(path, unquote(path.stem[10:]), int(path.name[:9])) for path in new if path.name[:9].isdecimal()]

    def next_files(self) -> list[tuple[Path, str]]:
        """Return (path, hash) of the config and the results that the tracker lacks or has in another version."""
        names = (str(self._run.options["CFG_DEST"]), RESULTS, TEST_RESULTS)
        paths = [path for name in names if (path := self._run.out_dir / name).is_file() and not path.is_symlink()]
        hashes = [(path, hashlib.sha256(read_regular(path, _MAX_FILE)).hexdigest()) for path in paths]
        return [(path, digest) for path, digest in hashes if self._state["files"].get(path.name) != digest]

    def note_file(self, path: Path, digest: str = "") -> None:
        """Note that the tracker has an image or a file."""
        self._state["files"][path.name] = digest
        self._save()


def _file_name(tag: str) -> str:
    """Return a tag, quoted; a long one is cut between its characters and ends with a hash."""
    quoted = quote(tag, safe="")
    if len(quoted) <= _MAX_TAG:
        return quoted
    cut = re.sub("%.?$", "", quoted[: _MAX_TAG - 9])
    return f"{quote(unquote(cut, errors='ignore'), safe='')}_{hashlib.sha256(tag.encode()).hexdigest()[:8]}"
