"""MLflow, Weights & Biases and Trackio; see the environment variables in docs/trackers.md."""

import logging
import os
import re
import sys
import uuid
from pathlib import Path
from typing import Any

from distribuuuu.config.registry import TRACKERS
from distribuuuu.config.run_files import TRACKERS_FOLDER
from distribuuuu.files.atomic_file import make_folder
from distribuuuu.records.trackers.base import PROJECT, MetricRow, Tracker

# Limits of MLflow's REST API: metrics and parameters of a request, characters of a parameter and of a metric's name.
_MAX_METRICS, _MAX_PARAMS, _MAX_VALUE, _MAX_KEY = 1000, 100, 500, 250


@TRACKERS.register("mlflow")
class MLflow(Tracker):
    """A run of MLflow. A row of metrics.jsonl that is sent twice is stored once, since its time is the same."""

    name = package = "mlflow"

    def connect(self, run_id: str) -> str:
        """Open the run; the options become its parameters."""
        from mlflow import MlflowClient

        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # its 7 take minutes, and the process repeats
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        logging.getLogger("mlflow").setLevel(logging.ERROR)
        logging.getLogger("urllib3").addHandler(logging.NullHandler())  # otherwise its retries are printed
        self._client: Any = MlflowClient()
        if run_id:
            self._client.update_run(run_id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            run_id = self._client.create_run(experiment, run_name=self.run.out_dir.name).info.run_id
            self.note_run(run_id)  # at once: a failure of the next request must not begin another run
        self._run_id = run_id
        self._send_options()
        return run_id

    def _send_options(self) -> None:
        """Send the options that the run lacks; MLflow refuses to change a parameter."""
        from mlflow.entities import Param

        known = self._client.get_run(self._run_id).data.params
        options = {_key(key): str(value)[:_MAX_VALUE] for key, value in self.run.options.items()}
        params = [Param(key, value) for key, value in options.items() if key not in known]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _MAX_PARAMS])

    def send_rows(self, rows: list[MetricRow]) -> None:
        """Send the numbers, at most `_MAX_METRICS` per request."""
        from mlflow.entities import Metric

        metrics = [Metric(_key(tag), value, int(1000 * row.time_s), row.step)
                   for row in rows for tag, value in row.values.items()]  # fmt: skip
        for first in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _MAX_METRICS])

    def send_image(self, path: Path, tag: str, step: int) -> None:
        """Send an image as an artifact in the folder images."""
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


def _key(name: str) -> str:
    """Return a name that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:_MAX_KEY]
