"""Trackio: a local store, a server or a Space; see the environment variables in docs/trackers.md."""

import os
import sys
import uuid
from pathlib import Path
from typing import Any

from distribuuuu.config.registry import TRACKERS
from distribuuuu.records.trackers.base import PROJECT, MetricRow, Tracker


@TRACKERS.register("trackio")
class Trackio(Tracker):
    """A run of Trackio, which keeps what a server does not accept in a local store of its own."""

    name = package = "trackio"

    def connect(self, run_id: str) -> str:
        """Open the run; its identifier is its name, which is unique in the project."""
        import trackio

        run_id = run_id or f"{self.run.out_dir.name}-{uuid.uuid4().hex[:6]}"
        options = {key: value for key, value in self.run.options.items() if not key.startswith("_")}
        for name in ("trackio", "trackio.run", "trackio.utils"):  # they print; sys.stdout belongs to all threads
            vars(sys.modules[name])["print"] = lambda *args, **kwargs: None
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run: Any = trackio.init(project, run_id, config=options, resume="allow", **quiet)
        return run_id

    def send_rows(self, rows: list[MetricRow]) -> None:
        """Hand the rows to the thread of Trackio."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def send_image(self, path: Path, tag: str, step: int) -> None:
        """Log an image."""
        import trackio

        self._run.log({f"images/{tag}": trackio.Image(path)}, step=step)

    def send_file(self, path: Path) -> None:
        """Log a file as an artifact of the run."""
        import trackio

        artifact = trackio.Artifact(f"{self._run.name}-{path.stem}", type="result")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def finish(self) -> None:
        """Wait until Trackio has written everything."""
        import trackio

        trackio.finish()
