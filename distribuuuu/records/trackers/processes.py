"""Trackers of a training: start a process for each, and write the images that they send."""

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from distribuuuu.config.run_files import TRACKERS_FOLDER
from distribuuuu.files.atomic_file import make_folder, replacing
from distribuuuu.launch.detect import NPROC_MARK
from distribuuuu.records.trackers.base import IMAGES

logger = logging.getLogger(__name__)


class TrackerProcesses:
    """Processes that follow a run; each sends to one tracker, and ends by itself after `end` or the end of this one."""

    def __init__(self, out_dir: str | os.PathLike, names: Sequence[str], plugins: Sequence[str], num_steps: int):
        self._out_dir, self._has_warned = Path(out_dir), False
        # The end of the training must not end them by a signal, see `launch.detect.was_launched`.
        env = {key: value for key, value in os.environ.items() if key not in (NPROC_MARK, "TORCHELASTIC_RUN_ID")}
        command = [sys.executable, "-m", "distribuuuu", "track", str(out_dir), "--follow", "--num-steps", num_steps]
        self._processes = [
            subprocess.Popen(
                [*map(str, command), "LOG.TRACKERS", json.dumps([name]), "PLUGINS", json.dumps([*plugins])],
                env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
            )
            for name in names
        ]  # fmt: skip

    def rewind(self, step: int) -> None:
        """Do nothing: rows that are repeated after a resume or a rollback are not sent again."""

    def row(self, record: dict[str, Any], step: int) -> None:
        """Do nothing: the processes read metrics.jsonl."""

    def image(self, tag: str, pixels: Any, step: int) -> None:
        """Write an image, a tensor (3, H, W), uint8 or float from 0 to 1; one that cannot be written is lost."""
        from PIL import Image

        name = quote(tag, safe="")
        try:
            array = (pixels * 255).clamp(0, 255).byte() if pixels.is_floating_point() else pixels
            path = make_folder(self._out_dir, TRACKERS_FOLDER, IMAGES) / f"{step:09d}_{name}.png"
            if not path.exists():  # else it is from before a resume
                with replacing(path) as file:
                    Image.fromarray(array.cpu().numpy().transpose(1, 2, 0)).save(file, "PNG", compress_level=1)
        except Exception as error:  # of the disk or of Pillow: a tracker never ends a run
            if not self._has_warned:
                logger.warning("LOG.TRACKERS: an image cannot be written: %s", error)
            self._has_warned = True

    def end(self) -> None:
        """Let the processes send what is missing and exit; they are not waited for."""
        for process in self._processes:
            assert process.stdin, "it is a pipe"
            with contextlib.suppress(OSError):  # it has ended
                process.stdin.write(b"\n")  # a loader worker that was forked may still hold the pipe open
                process.stdin.close()
