"""TensorBoard events, with LOG.TENSORBOARD, and the names of curves. A full disk does not stop the run."""

import logging
import os
import time
from pathlib import Path
from typing import Any

from distribuuuu.config.registry import TRACKERS
from distribuuuu.config.run_files import TENSORBOARD
from distribuuuu.files.atomic_file import make_folder

logger = logging.getLogger(__name__)

# Seconds between two attempts to write events.
RETRY_S = 60.0
# Entries without a curve.
_NO_CURVES = ("kind", "epoch", "step", "stage", "resumed", "rollback", "time", "count", "eta_s")


@TRACKERS.register("tensorboard")
class EventFile:
    """TensorBoard events. Those that cannot be written are lost with a warning; later ones go to a new file."""

    package = ""

    def __init__(self, out_dir: str | os.PathLike):
        self._out_dir, self._retry_at = Path(out_dir), 0.0
        self._writer: Any = None

    def rewind(self, step: int) -> None:
        """Begin a new file; TensorBoard hides events of earlier files after the step."""
        self.end()
        self._writer, self._retry_at = None, 0.0
        self._call(None, purge_step=step + 1)

    def row(self, record: dict[str, Any], step: int) -> None:
        for tag, value in curves_of(record).items():
            self._call("add_scalar", tag, value, step)

    def image(self, tag: str, pixels: Any, step: int) -> None:
        """Add an image, a tensor (3, H, W), uint8 or float from 0 to 1."""
        self._call("add_image", tag, pixels, step)

    def end(self) -> None:
        if self._writer:
            self._call("close")

    def _call(self, method: str | None, *arguments: Any, purge_step: int | None = None) -> None:
        if self._writer is None and time.monotonic() < self._retry_at:
            return
        try:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(make_folder(self._out_dir, TENSORBOARD), purge_step=purge_step)
            if method:
                getattr(self._writer, method)(*arguments)
        except OSError as error:
            logger.warning("cannot write TensorBoard events; those of %.0f s are lost: %s", RETRY_S, error)
            self._writer, self._retry_at = None, time.monotonic() + RETRY_S


def curves_of(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by the name of their curve, e.g. "train/loss"."""
    return {f"{record['kind']}/{name}": value for name, value in record.items() if name not in _NO_CURVES}
