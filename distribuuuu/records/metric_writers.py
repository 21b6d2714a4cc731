"""Writer and reader of metrics.jsonl, and the texts of numbers. A full disk does not stop the run."""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distribuuuu.config.errors import counted
from distribuuuu.files.atomic_file import open_for_writing, replacing
from distribuuuu.files.untrusted import parse_json

logger = logging.getLogger(__name__)

# The least epoch or step that is refused.
_MAX_POSITION = 1 << 31


class RecordFile:
    """A JSON Lines file. Lines that cannot be written are kept in memory and written with the next one."""

    def __init__(self, path: Path):
        self.path = path
        self._unwritten: list[str] = []

    def append(self, record: dict[str, Any]) -> None:
        self._unwritten.append(json.dumps(record) + "\n")
        try:
            self._write("".join(self._unwritten).encode())
        except OSError as error:
            if len(self._unwritten) == 1:
                logger.warning("cannot write %s; its lines are kept and written later: %s", self.path, error)
            return
        self._unwritten.clear()

    def _write(self, data: bytes) -> None:
        """Append all of the data or, on a full disk, nothing."""
        with open_for_writing(self.path, "ab", buffering=0) as file:
            before = file.tell()
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(before)
                raise


def drop_records_after(path: Path, epoch: int, step: int) -> None:
    """Keep the records of metrics.jsonl up to a position (finished epochs, steps since); drop unreadable lines."""
    try:
        content = path.read_bytes() if path.exists() else b""
        records = {line: parse_record(line) for line in content.splitlines()}
        if num_lost := sum(record is None for record in records.values()):
            logger.warning("%s: %s removed: not a valid record", path, counted(num_lost, "line"))
        kept = [line + b"\n" for line in content.splitlines()
                if (record := records[line]) and _find_position(record) <= (epoch, step)]  # fmt: skip
        if b"".join(kept) != content:
            with replacing(path) as file:
                file.writelines(kept)
    except OSError as error:
        logger.warning("cannot write %s; it keeps the records of steps that are repeated: %s", path, error)


def parse_record(line: str | bytes) -> dict[str, Any] | None:
    """Return the record in a line of metrics.jsonl; None: it has no kind or no position (epoch from 1, step)."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    has_position = all(type(record.get(key)) is int and 0 <= record[key] < _MAX_POSITION for key in ("epoch", "step"))
    return record if has_position else None


def _find_position(record: dict[str, Any]) -> tuple[int, float]:
    """Return (finished epochs, steps since) of a record; infinite steps for an evaluation."""
    return record["epoch"] - 1, math.inf if record["kind"].startswith("eval") else record["step"]


def format_duration(seconds: float) -> str:
    """Return the two largest units of a duration in at most 6 characters, e.g. '45s', '3m24s', '5h10m' or '12d03h'."""
    minutes, rest = divmod(round(max(0, min(seconds, 1e12))), 60)  # a number of an untrusted file may be infinite
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days >= 100:
        return f"{days}d"
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def format_decimal(value: float, width: int, decimals: int = 4) -> str:
    """Return a number with `decimals` decimals, or with as many as fit into `width` characters."""
    texts = (f"{value:.{num}f}" for num in range(decimals, -1, -1))
    return next((text for text in texts if len(text) <= width), f"{value:.0e}")


def format_result(result: Mapping[str, float], labels: Mapping[str, str], decimals: int) -> str:
    """Return the metrics of an evaluation by display name, further means, and the loss: 'top1 71.32 loss 0.8123'."""
    metrics = [f"{label} {result[name]:.{decimals}f}" for name, label in labels.items() if name != "loss"]
    others = [name for name in result if name not in ("count", "loss", *labels)]
    return " ".join([*metrics, *(f"{name} {format_decimal(result[name], 6)}" for name in (*others, "loss"))])


def format_lr(lr: float) -> str:
    """Return a learning rate with two digits in at most 6 characters, e.g. '0.023' or '1.2e-4'."""
    return f"{lr:.2g}" if lr == 0 or lr >= 1e-3 else f"{lr:.1e}".replace("e-0", "e-")


def format_speed(images_per_s: float) -> str:
    """Return images per second in at most 5 characters, e.g. '3.4', '12345', '123k' or '12M'."""
    if images_per_s < 9.95:
        return f"{images_per_s:.1f}"
    if images_per_s < 99999.5:
        return f"{images_per_s:.0f}"
    return f"{images_per_s / 1e3:.0f}k" if images_per_s < 9.9995e6 else f"{images_per_s / 1e6:.0f}M"
