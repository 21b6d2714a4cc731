"""What a run writes besides checkpoints: metrics.jsonl and TensorBoard events. A full disk does not stop the run."""

import json
import logging
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class RecordFile:
    """Lines of JSON. Those that the disk refuses are kept and written with the next one.

    Args:
        path: the file; made anew, with its folder, if it vanishes.
    """

    def __init__(self, path: Path):
        self.path = path
        self._unwritten: list[str] = []

    def append(self, record: dict[str, Any]) -> None:
        """Add a record as a line."""
        self._unwritten.append(json.dumps(record) + "\n")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write("".join(self._unwritten).encode())
        except OSError as error:
            if len(self._unwritten) == 1:
                logger.warning("%s CANNOT BE WRITTEN, its lines are kept until it can: %s", self.path, error)
            return
        self._unwritten.clear()

    def _write(self, data: bytes) -> None:
        """Append all of the data or, on a full disk, nothing."""
        with open(self.path, "ab", buffering=0) as file:
            before = file.tell()
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(before)
                raise


class EventFile:
    """TensorBoard events; given up with a warning when they cannot be written.

    Args:
        folder: where the events go.
        purge_step: events from this step on, of an earlier start, are not shown.
    """

    def __init__(self, folder: Path, purge_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder, purge_step=purge_step)

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Add a point to a curve."""
        self._try("add_scalar", tag, value, step)

    def image(self, tag: str, pixels: Any, step: int) -> None:
        """Add an image, uint8 (3, H, W)."""
        self._try("add_image", tag, pixels, step)

    def close(self) -> None:
        """Write what is left."""
        self._try("close")

    def _try(self, method: str, *arguments: Any) -> None:
        if self._writer is None:
            return
        try:
            getattr(self._writer, method)(*arguments)
        except OSError as error:
            logger.warning("TensorBoard events CANNOT BE WRITTEN, the run goes on without: %s", error)
            self._writer = None


def drop_records_after(path: Path, epoch: int, step: int) -> None:
    """Keep the records of metrics.jsonl up to a position (finished epochs, steps since); drop a half-written line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
            position = (record["epoch"] - 1, record["step"], record["kind"] == "eval")
        except (ValueError, KeyError, TypeError):
            continue
        if position[0] < epoch or (position[0] == epoch and position[1] <= step and not position[2]):
            kept.append(line + "\n")
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        logger.warning("%s CANNOT BE WRITTEN, it keeps the records of steps that are done again: %s", path, error)
