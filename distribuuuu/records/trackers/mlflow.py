"""MLflow: a tracking server or a local store; see the environment variables in docs/trackers.md."""

import logging
import os
import re
from pathlib import Path
from typing import Any

from distribuuuu.config.registry import TRACKERS
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


def _key(name: str) -> str:
    """Return a name that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:_MAX_KEY]
