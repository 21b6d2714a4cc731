"""MLflow, Weights & Biases and Trackio; see the environment variables in docs/trackers.md."""

import importlib
import logging
import os
import re
import uuid
from pathlib import Path
from typing import Any

from distribuuuu.config.registry import TRACKERS
from distribuuuu.config.run_files import TRACKERS_FOLDER
from distribuuuu.files.atomic_file import make_folder
from distribuuuu.records.trackers.base import MetricRow, Tracker

# Project of the runs if the environment names none.
PROJECT = "distribuuuu"
# Limits of MLflow's REST API: items of a request, and characters of a parameter and of a name.
_MAX_ITEMS, _MAX_VALUE, _MAX_KEY = {"metrics": 1000, "params": 100}, 500, 250


@TRACKERS.register("mlflow")
class MLflow(Tracker):
    """A run of MLflow. A row of metrics.jsonl that is sent twice is stored once, since its time is the same."""

    name = package = "mlflow"

    def connect(self, run_id: str) -> str:
        """Open the run; the options become its parameters, as far as it lacks them: they cannot be changed."""
        import mlflow

        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # its 7 take minutes, and the process repeats
        logging.disable(logging.WARNING)  # of its database and its requests
        self._client: Any = mlflow.MlflowClient()
        if run_id:
            self._client.update_run(run_id, status="RUNNING")
        else:
            experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)).experiment_id
            run_id = self._client.create_run(experiment, run_name=self.run.out_dir.name).info.run_id
            self.note(run=run_id)  # at once: a failure of the next request must not begin another run
        self._run_id, known = run_id, self._client.get_run(run_id).data.params
        options = {_key(key): str(value)[:_MAX_VALUE] for key, value in self.run.options.items()}
        self._send("params", [mlflow.entities.Param(*pair) for pair in options.items() if pair[0] not in known])
        return run_id

    def send_rows(self, rows: list[MetricRow]) -> None:
        from mlflow.entities import Metric

        self._send("metrics", [Metric(_key(tag), value, int(1000 * row.time_s), row.step)
                               for row in rows for tag, value in row.values.items()])  # fmt: skip

    def _send(self, kind: str, items: list) -> None:
        for first in range(0, len(items), size := _MAX_ITEMS[kind]):
            self._client.log_batch(self._run_id, **{kind: items[first : first + size]})

    def send_image(self, path: Path, tag: str, step: int) -> None:
        self._client.log_artifact(self._run_id, str(path), "images")

    def send_file(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)


@TRACKERS.register("wandb")
class Wandb(Tracker):
    """A run of W&B. With WANDB_MODE=offline its files are in OUT_DIR/trackers/wandb, for `wandb sync`."""

    name = package = "wandb"

    def connect(self, run_id: str) -> str:
        """Open the run of an identifier, which the services let the client choose."""
        self._api: Any = importlib.import_module(self.package)
        self._id = run_id or uuid.uuid4().hex[:8]
        project = os.environ.get(f"{self.package.upper()}_PROJECT", PROJECT)
        self._run: Any = self._api.init(project=project, config=self.run.options, resume="allow", **self._arguments())
        return self._id

    def _arguments(self) -> dict[str, Any]:
        quiet = {"silent": True, "console": "off", "x_disable_stats": True, "x_disable_meta": True, "disable_git": True}
        folder = os.environ.get("WANDB_DIR", str(make_folder(self.run.out_dir, TRACKERS_FOLDER)))
        return {"id": self._id, "name": os.environ.get("WANDB_NAME", self.run.out_dir.name), "dir": folder,
                "settings": self._api.Settings(**quiet), "allow_val_change": True}  # fmt: skip

    def send_rows(self, rows: list[MetricRow]) -> None:
        """Hand the rows to the process of W&B, or the thread of Trackio."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def send_image(self, path: Path, tag: str, step: int) -> None:
        """Log an image; W&B shows it at the newest step if it has later rows."""
        newest = getattr(self._run, "step", 0) or 0
        self._run.log({f"images/{tag}": self._api.Image(str(path))}, step=max(step, newest))

    def send_file(self, path: Path) -> None:
        artifact = self._api.Artifact(f"{self._id}-{path.stem}", type="result")
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
        """Open the run of a name, which is unique in the project."""
        return super().connect(run_id or f"{self.run.out_dir.name}-{uuid.uuid4().hex[:6]}")

    def _arguments(self) -> dict[str, Any]:
        return {"name": self._id, "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}


def _key(name: str) -> str:
    """Return a name that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:_MAX_KEY]
