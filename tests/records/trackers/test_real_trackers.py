"""The trackers against the real packages: MLflow's sqlite store, Trackio's local store, W&B offline."""

import contextlib
import importlib
import json
import sqlite3

import pytest
from support.runs import TRAIN_NET, assert_same_run, run_tool, small_options, train_and_stop

from distribuuuu.trainer import train_model

pytestmark = pytest.mark.slow
STEPS = [1, 2, 3, 4, 5, 6, 7, 8]


def load(name: str):
    return pytest.importorskip(name, reason=f"pip install 'distribuuuu[{name}]'")


def train_twice(small_cfg, monkeypatch, name: str) -> None:
    """Train to the middle of the first epoch, then resume."""
    words = ("LOG.TRACKERS", name, "CHECKPOINT.EVERY_STEPS", 2)
    monkeypatch.setattr(importlib.import_module("distribuuuu.records.trackers.base"), "FLUSH_S", 60.0)
    train_and_stop(small_cfg(*words), (0, 2), monkeypatch)
    train_model(small_cfg(*words))


def test_mlflow(small_cfg, tmp_path, monkeypatch, finished_run):
    client = load("mlflow").MlflowClient
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    train_twice(small_cfg, monkeypatch, "mlflow")
    assert_same_run(tmp_path / "out", finished_run)
    client = client()
    (run,) = client.search_runs([client.get_experiment_by_name("distribuuuu").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [metric.step for metric in history] == STEPS and run.info.status == "FINISHED"
    assert run.data.params["MODEL.ARCH"] == "resnet8" and run.data.metrics["eval/top1"] > 0
    files = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert files == {"config.yaml", "results.json", "images"}
    assert "WARNING" not in (tmp_path / "out" / "train.log").read_text()


def test_a_run_of_mlflow_whose_options_fail_is_continued(small_cfg, tmp_path, monkeypatch):
    client = load("mlflow").MlflowClient
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    cfg, left = small_cfg("LOG.TRACKERS", "mlflow"), ["a failure"]
    log_batch = client.log_batch

    def fail_once(*args, **kwargs):
        if left:
            raise ConnectionError(left.pop())
        return log_batch(*args, **kwargs)

    monkeypatch.setattr(client, "log_batch", fail_once)
    monkeypatch.setattr(importlib.import_module("distribuuuu.records.trackers.base"), "FLUSH_S", 60.0)
    monkeypatch.setattr(importlib.import_module("distribuuuu.records.trackers.base"), "RETRY_S", 0.05)
    train_model(cfg)
    client = client()
    (run,) = client.search_runs([client.get_experiment_by_name("distribuuuu").experiment_id])
    assert {key: run.data.params[key] for key in ("MODEL.ARCH", "RNG_SEED")} == {
        "MODEL.ARCH": "resnet8",
        "RNG_SEED": "3",
    }
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")] == STEPS


def test_trackio(image_folder, tmp_path, finished_run):
    load("trackio")
    args = small_options(image_folder, tmp_path / "out", "LOG.TRACKERS", "trackio")
    for more in (["--stop-epoch", "1"], []):
        done = run_tool(TRAIN_NET, *args, *more, TRACKIO_DIR=str(tmp_path / "store"))
        assert done.returncode == 0 and "WARNING" not in done.stderr and "rackio" not in done.stdout, done
    assert_same_run(tmp_path / "out", finished_run)
    name = json.loads((tmp_path / "out" / "trackers" / "trackio.json").read_text())["run"]
    with contextlib.closing(sqlite3.connect(tmp_path / "store" / "distribuuuu.db")) as store:
        rows = store.execute("SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY step", (name,)).fetchall()
    assert [step for step, metrics in rows if "train/loss" in str(metrics)] == STEPS


def test_wandb_offline(small_cfg, tmp_path, monkeypatch, finished_run):
    load("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train_twice(small_cfg, monkeypatch, "wandb")
    assert_same_run(tmp_path / "out", finished_run)
    name = json.loads((tmp_path / "out" / "trackers" / "wandb.json").read_text())["run"]
    written = list((tmp_path / "out" / "trackers" / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert written and b"train/loss" in b"".join(path.read_bytes() for path in written)
    assert "WARNING" not in (tmp_path / "out" / "train.log").read_text()
