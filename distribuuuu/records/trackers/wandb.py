"""Weights & Biases, online or offline; see the environment variables in docs/trackers.md."""

import os
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
        return run_id

    def send_rows(self, rows: list[MetricRow]) -> None:
        """Hand the rows to the process of W&B."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def send_image(self, path: Path, tag: str, step: int) -> None:
        """Log an image; W&B shows it at the newest step if it has later rows."""
        import wandb

        self._run.log({f"images/{tag}": wandb.Image(str(path))}, step=max(step, self._run.step))

    def send_file(self, path: Path) -> None:
        """Log a file as an artifact of the run."""
        import wandb

        artifact = wandb.Artifact(f"{self._run.id}-{path.stem}", type="result")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def finish(self) -> None:
        """Wait until W&B has written or uploaded everything."""
        self._run.finish()
