"""Files of an older version in `older_files`: a pack and a run folder, written before the package was rearranged."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.commands import is_deleted
from support.runs import assert_close, newest, records

from distribuuuu import load_run
from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.commands.main import dispatch
from distribuuuu.config import load_cfg
from distribuuuu.trainer import evaluate_weights, train_model

OLDER = Path(__file__).parent / "older_files"
PACK = OLDER / "pack"


@pytest.fixture
def run(tmp_path) -> Path:
    """A copy of the run folder."""
    return Path(shutil.copytree(OLDER / "run", tmp_path / "run"))


def words_of(run: Path) -> list[str]:
    return ["TRAIN.DATASET", str(PACK), "TEST.DATASET", str(PACK), "OUT_DIR", str(run)]


def test_a_run_is_evaluated_to_its_recorded_result(run):
    recorded = json.loads((run / "results.json").read_text())["accuracy"]
    for name, kind in (("best.pth.tar", "raw"), ("best_ema.pth.tar", "ema")):
        words = [*words_of(run), "MODEL.WEIGHTS", str(run / name)]
        result = evaluate_weights(load_cfg(str(run / "config.yaml"), words))
        best = recorded[kind]["best"]
        assert result["count"] == 7 and result["top1"] == best["top1"]
        assert result["loss"] == pytest.approx(best["loss"], rel=1e-4)


def test_a_run_is_resumed(run):
    expected, rows = newest(run), records(run)
    CheckpointManager(run).list()[-1].unlink()
    train_model(load_cfg(str(run / "config.yaml"), words_of(run)))
    assert_close(newest(run), expected, 1e-3)
    positions = ([(row["kind"], row["epoch"], row["step"]) for row in each] for each in (records(run), rows))
    assert next(positions) == next(positions)


def test_predictions_and_reports_are_read(run, tmp_path):
    stored = np.load(run / "predictions.npz")
    weights = json.loads(str(stored["meta"]))["weights"]
    loaded = load_run(run / "best_ema.pth.tar" if weights == "ema" else run, overrides=words_of(run))
    assert loaded.classes == ("ant", "bee", "cat") and len(stored["label"]) == 7
    assert np.isfinite(stored["logits"]).all()
    for name, *words in (["report", run, "--out", tmp_path / "page.html"], ["table", run]):
        assert is_deleted(name) or dispatch("distribuuuu", [name, *map(str, words)]) == 0, name
