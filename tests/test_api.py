"""Python API: results, errors as exceptions, signals, and the state of the process after a run."""

import logging
import os
import random
import signal
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from support.processes import on_processes
from support.runs import assert_same_run, newest, problems_of, run_python, small_options
from support.tables import slow
from torch import nn

import distribuuuu
from distribuuuu import api
from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.config import ConfigError, get_cfg, load_cfg
from distribuuuu.config.registry import MODELS
from distribuuuu.distributed.comm import GroupState, StopRequest
from distribuuuu.launch import signals
from distribuuuu.launch.signals import SignalState


@pytest.fixture
def options(image_folder, tmp_path) -> dict:
    words = small_options(image_folder, tmp_path / "out", "OPTIM.MAX_EPOCH", 1)
    return dict(zip(words[::2], words[1::2], strict=True))


class Signaling(nn.Sequential):
    """A model that sends signals to its process in training: one in each forward pass from the third on."""

    def __init__(self, num_classes: int, signum: int):
        super().__init__(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))
        self.signum, self.num_passes = signum, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.num_passes += self.training
        if self.training and self.num_passes >= 3:
            os.kill(os.getpid(), self.signum)
            time.sleep(0.05)  # the thread that receives the signal
        return super().forward(images)


@MODELS.register
def signaling(num_classes: int, signum: int = signal.SIGINT) -> nn.Module:
    return Signaling(num_classes, signum)


def test_the_import_imports_nothing_that_takes_time():
    code = (
        "import sys; import distribuuuu;"
        "assert {'train', 'evaluate', 'predict', 'load_run'} <= set(distribuuuu.__all__);"
        "assert set(distribuuuu.__all__) <= set(dir(distribuuuu));"
        "heavy = ('torch', 'numpy', 'yaml', 'yacs', 'distribuuuu.');"
        "sys.exit(any(name.startswith(heavy) for name in sys.modules))"
    )
    assert run_python("-c", code).returncode == 0


def test_a_training_returns_its_results_and_can_be_evaluated_and_predict(options, image_folder, tmp_path):
    out = tmp_path / "out"
    result = distribuuuu.train(None, {**options, "EMA.HALF_LIFE": 30, "TRAIN.TOPK": 2})
    assert result.out_dir == out and result.weights == out / "best_ema.pth.tar"
    assert result.results["training"]["epochs_done"] == 1
    last = result.results["accuracy"]["ema"]["last"]
    assert result.metrics == {"top1": last["top1"], "top2": last["topk"], "loss": last["loss"]}
    assert result.best == max(result.results["accuracy"][kind]["best"]["top1"] for kind in ("raw", "ema"))
    assert "results" not in repr(result)
    expected = {**result.metrics, "count": 37}
    for run in (result, result.weights):
        assert distribuuuu.evaluate(run) == pytest.approx(expected, abs=1e-5)
    raw = distribuuuu.evaluate(out / "best.pth.tar", ["TEST.BATCH_SIZE", 5])
    assert raw["top1"] == result.results["accuracy"]["raw"]["last"]["top1"] and raw["count"] == 37
    images = sorted((image_folder / "val").rglob("*.jpg"))
    predicted = distribuuuu.load_run(out).predict(images, topk=2)
    for run in (str(out), distribuuuu.load_run(out)):
        assert distribuuuu.predict(run, images, topk=2) == predicted
    assert len(predicted) == 37 and len(predicted[0].labels) == 2
    with pytest.raises(ConfigError, match="no/such"):
        distribuuuu.predict("no/such/run", images)
    loaded = types.SimpleNamespace(cfg=load_cfg(str(out / "config.yaml")), source=str(result.weights))
    assert distribuuuu.evaluate(loaded) == pytest.approx(expected, abs=1e-5)
    assert distribuuuu.evaluate(loaded.cfg, {"MODEL.WEIGHTS": result.weights}) == pytest.approx(expected, abs=1e-5)


def average_of(out_dir: Path) -> dict[str, torch.Tensor]:
    """Return the average of the weights after both epochs of a run."""
    one, other = (read_checkpoint(path)["state_dict"] for path in sorted((out_dir / "checkpoints").iterdir())[-2:])
    return {key: (one[key] + other[key]) / 2 if one[key].is_floating_point() else one[key] for key in one}


def evaluate_average(run: Path, out_dir: Path, recalibrate: int) -> tuple[dict, dict]:
    """Evaluate an average after other weights, and twice; save it with its statistics."""
    average = average_of(run)
    with distribuuuu.open_evaluation(run, {"OUT_DIR": out_dir}) as opened:
        opened.evaluate({key: torch.zeros_like(value) for key, value in average.items()})
        results = [opened.evaluate(average, "soup", recalibrate) for _ in range(2)]
        if GroupState.rank == 0:
            torch.save(opened.model.state_dict(), out_dir / "soup.pth.tar")
    return results


@pytest.mark.parametrize(("num", "recalibrate"), [slow(1, 0), slow(2, 24)])
def test_an_average_is_evaluated_like_its_file(finished_run, tmp_path, num, recalibrate):
    out = tmp_path / "soup"
    results = on_processes(num, evaluate_average, finished_run, out, recalibrate)
    expected = distribuuuu.evaluate(finished_run, {"MODEL.WEIGHTS": out / "soup.pth.tar", "OUT_DIR": tmp_path / "test"})
    for first, second in results:
        assert first == second == pytest.approx(expected, rel=1e-6) and first["count"] == 37
    assert "validation of soup weights: top1 " in (out / "test.log").read_text()
    assert {path.name for path in out.iterdir()} == {"soup.pth.tar", "test.log"}
    saved, average = torch.load(out / "soup.pth.tar"), average_of(finished_run)
    changed = {key for key, value in average.items() if not torch.equal(value, saved[key])}
    assert bool(changed) == bool(recalibrate) and all("running_" in key for key in changed)


def test_a_finished_run_is_not_trained_again_and_one_runs_at_a_time(options):
    first = distribuuuu.train(None, options)
    again = distribuuuu.train(None, [word for pair in options.items() for word in pair])
    assert again == first
    with api._run_of_program():
        assert "a run is active in this process" in problems_of(distribuuuu.train, None, options)[0]


def test_all_problems_are_raised_and_name_their_origin(options):
    cfg = get_cfg()
    cfg.OPTIM.BASELR, cfg.OPTIM.MAX_EPOCH = 1, "many"
    found = problems_of(distribuuuu.train, cfg, {"TRAIN.BATCHSIZE": 3})
    assert [problem.split(";")[0] for problem in found] == [
        "OPTIM.MAX_EPOCH (config): got 'many'",
        "OPTIM.BASELR (config): no such key",
        "TRAIN.BATCHSIZE (overrides): no such key",
    ]
    odd = problems_of(distribuuuu.train, None, ["OUT_DIR"])
    assert odd == ["overrides: expected KEY VALUE pairs, but 'OUT_DIR' has no value"]
    assert "expected a dict or a list" in problems_of(distribuuuu.train, None, "OUT_DIR x")[0]
    assert "did you mean shapes/resnet14.yaml" in problems_of(distribuuuu.train, "shapes/resnet41")[0]


def test_what_cannot_be_evaluated(options, tmp_path):
    assert f"RUN: no config.yaml in or above {tmp_path};" in problems_of(distribuuuu.evaluate, tmp_path)[0]
    result = distribuuuu.train(None, {**options, "OPTIM.MAX_EPOCH": 0})
    assert (result.metrics, result.results, result.weights) == ({}, {}, None)
    assert "is not set, and" in problems_of(distribuuuu.evaluate, tmp_path / "out")[0]


def test_a_signal_saves_and_the_same_call_resumes(options, tmp_path):
    settings = {**options, "MODEL.ARCH": "signaling", "MODEL.KWARGS": {"signum": int(signal.SIGINT)}}
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="a checkpoint was saved"):
        distribuuuu.train(None, settings)
    assert newest(tmp_path / "out")["step"] == 2 and signal.getsignal(signal.SIGINT) is handler
    with pytest.raises(KeyboardInterrupt):
        distribuuuu.train(None, settings)
    assert newest(tmp_path / "out")["step"] == 4
    other = {**settings, "MODEL.KWARGS": {"signum": int(signal.SIGTERM)}, "OUT_DIR": tmp_path / "other"}
    with pytest.raises(distribuuuu.RunStopped, match="SIGTERM"):
        distribuuuu.train(None, other)
    assert newest(tmp_path / "other")["step"] == 2


def test_a_second_ctrl_c_interrupts_and_the_process_continues(options, tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "ECHO_S", 0.0)
    monkeypatch.setattr(StopRequest, "check", lambda self, position: None)  # hangs, as far as signals are concerned
    settings = {**options, "MODEL.ARCH": "signaling", "OPTIM.MAX_EPOCH": 50}
    before = SignalState.current
    with pytest.raises(KeyboardInterrupt):
        distribuuuu.train(None, settings)
    assert SignalState.current is before
    monkeypatch.undo()


def state_of_the_process() -> dict:
    """Return what a run must leave as it was."""
    logger, cudnn = logging.getLogger("distribuuuu"), torch.backends.cudnn
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":  # of a queue that has been closed; it ends soon
            thread.join(10)
    return {
        "random": (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "wakeup": wakeup,
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text() if sys.platform == "linux" else "",
        "logger": (logger.handlers[:], logger.level, logger.propagate),
        "torch": (cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled(),
                  torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.is_grad_enabled()),
        "classes": (GroupState.local_rank, SignalState.current, vars(SignalState.current).copy()),
        "process": (PIL.Image.MAX_IMAGE_PIXELS, threading.excepthook, sys.excepthook, dict(os.environ), os.getcwd()),
    }  # fmt: skip


@pytest.mark.slow
def test_two_runs_leave_no_state_and_are_equal(options, tmp_path):
    handler = logging.StreamHandler(sys.stdout)
    logging.getLogger("distribuuuu").addHandler(handler)
    settings = {**options, "TRAIN.WORKERS": 1, "CUDNN.DETERMINISTIC": True, "LOG.TENSORBOARD": True,
                "DATA.MAX_PIXELS": 10**9}  # fmt: skip
    before, threads = state_of_the_process(), {*threading.enumerate()}
    for name in ("one", "two"):
        distribuuuu.train(None, {**settings, "OUT_DIR": tmp_path / name})
        assert state_of_the_process() == before
    assert handler in logging.getLogger("distribuuuu").handlers
    assert_same_run(tmp_path / "one", tmp_path / "two")
    with pytest.raises(ConfigError):
        distribuuuu.train(None, {**settings, "OUT_DIR": tmp_path / "three", "MODEL.WEIGHTS": __file__})
    assert state_of_the_process() == before
    distribuuuu.evaluate(tmp_path / "one")
    assert state_of_the_process() == before
    # Threads of earlier tests may end meanwhile.
    assert {thread.name for thread in threading.enumerate() if thread not in threads} <= {"tqdm_monitor"}
