"""Small training runs: options, tools in subprocesses, and comparison of the files of a run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.config import Config, ConfigError, load_cfg
from distribuuuu.engine.preflight import find_run_problems
from distribuuuu.testing import list_rows, newest
from distribuuuu.trainer import evaluate_weights, train_model

timeless = list_rows

ROOT = Path(__file__).parents[2]
# A script that runs a tool with faulty models: run_tool(FAILING_MODELS, TRAIN_NET, ...).
FAILING_MODELS = ROOT / "tests" / "support" / "failing_models.py"
TRAIN_NET = ROOT / "tools" / "train_net.py"
# With group norm, the outputs do not depend on which images share a batch.
GROUP_NORM = ("MODEL.KWARGS.norm", "group")


def small_options(root: Path, out_dir: Path, *overrides: Any) -> list[str]:
    """Return the command-line arguments of a training that takes a second: resnet8 at 16 px, then the overrides."""
    settings = {
        "MODEL.ARCH": "resnet8", "MODEL.NUM_CLASSES": 3, "TRAIN.DATASET": root,
        "TRAIN.IM_SIZE": 16, "TEST.IM_SIZE": 18, "TRAIN.BATCH_SIZE": 12, "TEST.BATCH_SIZE": 16, "TRAIN.WORKERS": 0,
        "TRAIN.PRINT_FREQ": 1, "OPTIM.MAX_EPOCH": 2, "OPTIM.WARMUP_EPOCHS": 1, "OPTIM.BASE_LR": 0.1, "RNG_SEED": 3,
        "LOG.TENSORBOARD": False, "OUT_DIR": out_dir,
    }  # fmt: skip
    return [str(arg) for pair in settings.items() for arg in pair] + [str(arg) for arg in overrides]


def make_cfg(*words: Any) -> Config:
    """Return the config of KEY VALUE arguments."""
    return load_cfg(None, [str(word) for word in words])


def errors_of(root: Path, tmp_path: Path, *overrides: Any) -> str:
    """Return the problems that are found before a small run on the data in a folder starts, as a text."""
    cfg = load_cfg(None, small_options(root, tmp_path / "out", *overrides))
    return "\n".join(map(str, find_run_problems(cfg, train=True)))


def run_python(*words: Any, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess:
    """Run Python with the package of this project; return its status and output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, *(str(word) for word in words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)


def run_tool(tool: str | Path, *args: Any, **env: str) -> subprocess.CompletedProcess:
    """Run tools/TOOL, or the script of an absolute path, in a subprocess; return its status and output."""
    return run_python(ROOT / "tools" / tool, *args, **{"PYTHONPATH": os.environ.get("PYTHONPATH", ""), **env})


def assert_same_run(one: Path | str, other: Path | str) -> None:
    """Compare the weights, the momentum and the best accuracy of two finished runs, bit by bit."""
    one, other = newest(one), newest(other)
    assert one["state_dict"].keys() == other["state_dict"].keys()
    assert all(torch.equal(one["state_dict"][key], other["state_dict"][key]) for key in one["state_dict"])
    states = [content["optimizer"]["state"].values() for content in (one, other)]
    buffers = [[entry["momentum_buffer"] for entry in state] for state in states]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*buffers, strict=True))
    assert one["best_acc1"] == other["best_acc1"]
    assert one["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]


def assert_close(one: dict, other: dict, tolerance: float) -> None:
    """Compare the weights of two checkpoints up to a relative and absolute tolerance."""
    for key, tensor in one["state_dict"].items():
        torch.testing.assert_close(tensor, other["state_dict"][key], rtol=tolerance, atol=tolerance, msg=key)


def records(out_dir: Path | str) -> list[dict]:
    """Return the records of metrics.jsonl."""
    return [json.loads(line) for line in (Path(out_dir) / "metrics.jsonl").read_text().splitlines()]


class Stopped(BaseException):
    """Simulates the death of the process at an exact step."""


def train_and_stop(cfg, place: tuple[int, int], monkeypatch) -> None:
    """Train until the checkpoint of `place`, (finished epochs, steps since), is written, and no step further."""
    save = CheckpointManager.save

    def save_and_stop(self, content, **options):
        path = save(self, content, **options)
        if (content["epoch"] + 1, content["step"]) == place:
            self.finish()
            raise Stopped
        return path

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointManager, "save", save_and_stop)
        with pytest.raises(Stopped):
            train_model(cfg)


def train_and_evaluate(root: Path, out: Path, *overrides: Any) -> Path:
    """Train and evaluate a small run on ten classes; return its folder."""
    sizes = ("MODEL.NUM_CLASSES", 10, "TRAIN.IM_SIZE", 24, "TEST.IM_SIZE", 28, "TRAIN.BATCH_SIZE", 20)
    cfg = load_cfg(None, small_options(root, out, *sizes, *overrides))
    train_model(cfg)
    evaluate_weights(cfg)
    return out


def train_and_read(cfg) -> dict:
    """Train, and return the content of the newest checkpoint."""
    train_model(cfg)
    return newest(cfg.OUT_DIR)


def train_and_kill(cfg, place: tuple[int, int]) -> None:
    """Train until a checkpoint is written, in a process that has no `monkeypatch` fixture."""
    with pytest.MonkeyPatch.context() as patch:
        train_and_stop(cfg, place, patch)


def problems_of(function: Callable, *args: Any, **options: Any) -> list[str]:
    """Return the problems of the ConfigError that a call raises."""
    with pytest.raises(ConfigError) as caught:
        function(*args, **options)
    return [str(problem) for problem in caught.value.problems]


def message_of(function: Callable, *args: Any, **options: Any) -> str:
    """Return the text of the ConfigError that a call raises."""
    with pytest.raises(ConfigError) as caught:
        function(*args, **options)
    return str(caught.value)
