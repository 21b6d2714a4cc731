"""Weights & Biases and Trackio, whose runs have one interface; see the environment variables in docs/trackers.md."""

import os
import sys
import uuid
from pathlib import Path
from typing import Any

from distribuuuu.config.registry import TRACKERS
from distribuuuu.config.run_files import TRACKERS_FOLDER
from distribuuuu.files.atomic_file import make_folder
from distribuuuu.records.trackers.base import PROJECT, MetricRow, Tracker


@TRACKERS.register("wandb")
class Wandb(Tracker):
    """A run of W&B. With WANDB_MODE=offline its files are in OUT_DIR/trackers/wandb, for `wandb sync`."""

    name = package = "wandb"

    def connect(self, run_id: str) -> str:
        """Open the run of an identifier, which W&B lets the client choose."""
        import wandb

        run_id = run_id or uuid.uuid4().hex[:8]
        folder = make_folder(self.run.out_dir, TRACKERS_FOLDER)
        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=os.environ.get("WANDB_NAME", self.run.out_dir.name),
            id=run_id, resume="allow", dir=os.environ.get("WANDB_DIR", str(folder)), config=self.run.options,
            settings=quiet, allow_val_change=True,
        )  # fmt: skip
        self._api, self._identifier = wandb, run_id
        return run_id

    def send_rows(self, rows: list[MetricRow]) -> None:
        """Hand the rows to the process of W&B, or the thread of Trackio."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def send_image(self, path: Path, tag: str, step: int) -> None:
        """Log an image; W&B shows it at the newest step if it has later rows."""
        newest = getattr(self._run, "step", 0) or 0
        self._run.log({f"images/{tag}": self._api.Image(str(path))}, step=max(step, newest))

    def send_file(self, path: Path) -> None:
        artifact = self._api.Artifact(f"{self._identifier}-{path.stem}", type="result")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def finish(self) -> None:
        """Wait until everything has been written or uploaded."""
        self._api.finish()


@TRACKERS.register("trackio")
class Trackio(Wandb):
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
        self._run = trackio.init(project, run_id, config=options, resume="allow", **quiet)
        self._api, self._identifier = trackio, run_id
        return run_id
