"""The trackers against the real packages: MLflow's sqlite store, Trackio's local store, W&B offline."""

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest
from support.processes import list_trackers, wait_for
from support.runs import ROOT, assert_same_run, train_and_stop

from distribuuuu.trainer import train_model

pytestmark = pytest.mark.slow
STEPS = [1, 2, 3, 4, 5, 6, 7, 8]


def load(name: str):
    return pytest.importorskip(name, reason=f"pip install 'distribuuuu[{name}]'")


def check_mlflow(folder: Path, run_id: str) -> None:
    client = load("mlflow").MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("distribuuuu").experiment_id])
    history = client.get_metric_history(run_id, "train/loss")
    assert [metric.step for metric in history] == STEPS and run.info.status == "FINISHED"
    assert run.data.params["MODEL.ARCH"] == "resnet8" and run.data.metrics["eval/top1"] > 0
    files = {item.path for item in client.list_artifacts(run_id)}
    assert files == {"config.yaml", "results.json", "images"}


def check_trackio(folder: Path, run_id: str) -> None:
    query = "SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY step"
    with contextlib.closing(sqlite3.connect(folder / "store" / "distribuuuu.db")) as store:
        rows = store.execute(query, (run_id,)).fetchall()
    assert [step for step, metrics in rows if "train/loss" in str(metrics)] == STEPS


def check_wandb(folder: Path, run_id: str) -> None:
    written = list((folder / "out" / "trackers" / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert written and b"train/loss" in b"".join(path.read_bytes() for path in written)


CHECKS = {"mlflow": check_mlflow, "trackio": check_trackio, "wandb": check_wandb}


@pytest.mark.parametrize("name", CHECKS)
def test_a_resumed_run_is_one_run_of_the_tracker(small_cfg, tmp_path, monkeypatch, finished_run, name, capfd):
    load(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    words = ("LOG.TRACKERS", name, "CHECKPOINT.EVERY_STEPS", 2)
    train_and_stop(small_cfg(*words), (0, 2), monkeypatch)
    train_model(small_cfg(*words))
    out = tmp_path / "out"
    wait_for(lambda: not list_trackers(out))
    assert_same_run(out, finished_run)
    CHECKS[name](tmp_path, json.loads((out / "trackers" / f"{name}.json").read_text())["run"])
    assert "LOG.TRACKERS" not in capfd.readouterr().err
