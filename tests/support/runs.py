"""Small training runs: their options, the tools in processes of their own, and what a run leaves behind."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.trainer import train_model

ROOT = Path(__file__).parents[2]


def small_options(root: Path, out_dir: Path, *words: Any) -> list[str]:
    """Return the KEY VALUE words of a run that takes a second: resnet8 on 16 px."""
    settings = {
        "MODEL.ARCH": "resnet8", "MODEL.NUM_CLASSES": 3, "TRAIN.DATASET": root,
        "TRAIN.IM_SIZE": 16, "TEST.IM_SIZE": 18, "TRAIN.BATCH_SIZE": 12, "TEST.BATCH_SIZE": 16, "TRAIN.WORKERS": 0,
        "TRAIN.PRINT_FREQ": 1, "OPTIM.MAX_EPOCH": 2, "OPTIM.WARMUP_EPOCHS": 1, "OPTIM.BASE_LR": 0.1, "RNG_SEED": 3,
        "LOG.TENSORBOARD": False, "OUT_DIR": out_dir,
    }  # fmt: skip
    return [str(word) for pair in settings.items() for word in pair] + [str(word) for word in words]


def run_tool(tool: str, *words: Any, **env: str) -> subprocess.CompletedProcess:
    """Run tools/TOOL with words in a process of its own; returns its status and what it printed."""
    command = [sys.executable, str(ROOT / "tools" / tool), *(str(word) for word in words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)


# Group norm: what a process computes does not depend on which images share its batch.
GROUP_NORM = ("MODEL.KWARGS.norm", "group")


def newest(out_dir: Path | str) -> dict:
    return read_checkpoint(sorted((Path(out_dir) / "checkpoints").glob("*.pth.tar"))[-1])


def assert_same_run(one: Path | str, other: Path | str) -> None:
    """Compare the weights, the momentum and the best of two finished runs, bit by bit."""
    one, other = newest(one), newest(other)
    assert one["state_dict"].keys() == other["state_dict"].keys()
    assert all(torch.equal(one["state_dict"][key], other["state_dict"][key]) for key in one["state_dict"])
    buffers = [
        [entry["momentum_buffer"] for entry in content["optimizer"]["state"].values()] for content in (one, other)
    ]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*buffers, strict=True))
    assert one["best_acc1"] == other["best_acc1"]
    assert one["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]


def assert_close(one: dict, other: dict, tolerance: float) -> None:
    for key, tensor in one["state_dict"].items():
        torch.testing.assert_close(tensor, other["state_dict"][key], rtol=tolerance, atol=tolerance, msg=key)


def records(out_dir: Path | str) -> list[dict]:
    return [json.loads(line) for line in (Path(out_dir) / "metrics.jsonl").read_text().splitlines()]


def timeless(out_dir: Path | str) -> list[dict]:
    timed = {"time", "seconds", "images_per_s", "wait", "eta_s"}
    return [{key: value for key, value in entry.items() if key not in timed} for entry in records(out_dir)]


class _Stopped(BaseException):
    """Stands for the end of the process, at an exact place."""


def train_and_stop(cfg, place: tuple[int, int], monkeypatch) -> None:
    """Train until the checkpoint of (finished epochs, steps since) is written, and not a step more."""
    save = CheckpointManager.save_in_background

    def save_and_stop(self, state, new_bests=()):
        save(self, state, new_bests)
        if (state.epoch, state.step) == place:
            self.wait()
            raise _Stopped

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointManager, "save_in_background", save_and_stop)
        with pytest.raises(_Stopped):
            train_model(cfg)


def train_and_read(cfg) -> dict:
    train_model(cfg)
    return newest(cfg.OUT_DIR)


def train_and_kill(cfg, place: tuple[int, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        train_and_stop(cfg, place, patch)
