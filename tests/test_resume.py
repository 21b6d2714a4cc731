"""Runs that stop and resume, or share their batches among processes, compared with one process that runs through."""

import itertools
import signal
import threading
from pathlib import Path

import pytest
import torch
from support import runs
from support.processes import on_processes
from support.runs import GROUP_NORM, assert_close, records, small_options, timeless, train_and_read
from support.tables import slow
from torch.utils._pytree import tree_flatten

from distribuuuu import trainer
from distribuuuu.config import load_cfg
from distribuuuu.launch.signals import WRITER_NAME, RunStopped
from distribuuuu.trainer import train_model

EVERYTHING = (
    "OPTIM.NAME", "adamw", "OPTIM.BASE_LR", 0.002, "OPTIM.NORM_WEIGHT_DECAY", 0, "OPTIM.CLIP_NORM", 0.5,
    "OPTIM.LR_UPDATE", "step", "OPTIM.LR_SCALE", "sqrt", "EMA.HALF_LIFE", 40, "EMA.EVERY_STEPS", 2,
    "EMA.START_EPOCH", 1, "LOSS.NAME", "bce", "LOSS.LABEL_SMOOTHING", 0.1, "AUG.POLICY", "rand-m7-mstd0.5-inc1",
    "AUG.COLOR_JITTER", "(0.3,)", "AUG.ERASING", 0.5, "AUG.MIXUP", 0.4, "AUG.CUTMIX", 1.0, "AUG.MIX_GROUP", 8,
    "DATA.REPEATS", 2, "DATA.SAMPLING", "balanced", "TRAIN.IM_SIZE_START", 12, "TRAIN.IM_SIZE_EPOCHS", "(0, 1)",
    "TRAIN.IM_SIZE_MULTIPLE", 4, "TRAIN.GLOBAL_BATCH_SIZE", 12, "TRAIN.BATCH_SIZE", 2,
    "TEST.FLIP", True, "FINETUNE.LR_MULT.stem", 0.5,
)  # fmt: skip
BATCH_NORM = ("MODEL.PRECISE_BN", 24, "MODEL.CHANNELS_LAST", True)
TINY_VIT = ("MODEL.ARCH", "timm/test_vit", "TRAIN.IM_SIZE", 32, "TEST.IM_SIZE", 32)
LAYER_DECAY = ("OPTIM.BASE_LR", 0.001, "OPTIM.WEIGHT_DECAY", 0.05, "OPTIM.NORM_WEIGHT_DECAY", 0, "OPTIM.CLIP_NORM", 0.5,
               "OPTIM.BIAS_WEIGHT_DECAY", 0, "OPTIM.LAYER_DECAY", 0.7, "OPTIM.LR_UPDATE", "step")  # fmt: skip
AIRBENCH = ("MODEL.ARCH", "airbench94", "MODEL.KWARGS.width", 24, "TASK.NAME", "airbench", "TASK.KWARGS.steps", 3,
            "TASK.KWARGS.frozen_from", 1, "DATA.CROP", "pad", "DATA.CROP_PADDING_MODE", "reflect",
            "DATA.FLIP_MODE", "alternating", "TEST.SHIFT", 1, "EMA.HALF_LIFE", 40)  # fmt: skip
# Options with random numbers or state of their own: add a row for a new one.
OPTIONS = {
    "default": (), "rows of 3 steps": ("TRAIN.PRINT_FREQ", 3),
    "dropout": (*TINY_VIT, "MODEL.KWARGS.depth", 2, "MODEL.KWARGS.drop_path_rate", 0.3,
                "MODEL.KWARGS.proj_drop_rate", 0.2, "TRAIN.BATCH_SIZE", 6, "TRAIN.GLOBAL_BATCH_SIZE", 12),
    "adamw": (*TINY_VIT, *LAYER_DECAY, "OPTIM.NAME", "adamw"), "lamb": (*TINY_VIT, *LAYER_DECAY, "OPTIM.NAME", "lamb"),
    "amsgrad": (*TINY_VIT, *LAYER_DECAY, "OPTIM.NAME", "adamw", "OPTIM.KWARGS.amsgrad", True),
    "muon": (*TINY_VIT, *LAYER_DECAY, "OPTIM.NAME", "muon"),
    "lr factors": ("FINETUNE.LR_MULT.fc", 4, "FINETUNE.LR_MULT.*", 0.5),
    "frozen": ("FINETUNE.FREEZE", "stem,stage1,stage2.0.conv1.weight"),
    "fp16": ("TRAIN.AMP", "fp16"), "bf16": ("TRAIN.AMP", "bf16"),
    "flips": ("DATA.CROP", "letterbox", "DATA.VFLIP", 0.5, "TRAIN.IM_SIZE", "[16, 24]", "TEST.CROP", "squash"),
    "gray": ("DATA.CHANNELS", 1, "DATA.PIXELS", "float32", "DATA.MEAN", [128], "DATA.STD", [64], "AUG.ERASING", 0.5,
             "AUG.ERASING_MODE", "pixel"),
    "airbench": AIRBENCH,
    "airbench muon": (*AIRBENCH, "MODEL.ARCH", "airbench94_muon", "OPTIM.NAME", "airbench_muon", "OPTIM.BASE_LR", 0.24),
    "last epoch": ("OPTIM.LAST_EPOCH", 0.3, "OPTIM.LR_POLICY", "lin", "OPTIM.LR_UPDATE", "step"),
    "everything": (*EVERYTHING, *BATCH_NORM, "TRAIN.BATCH_SIZE", 6),
    # Evaluations in batches of another size than those of training, the last one shorter; 48 and 37 images.
    "compiled": ("MODEL.COMPILE", "default", "TEST.BATCH_SIZE", 14, "EMA.HALF_LIFE", 30),
    "step": (*EVERYTHING, *BATCH_NORM, "TRAIN.BATCH_SIZE", 6, "OPTIM.NAME", "sgd", "EMA.EVERY_STEPS", 1,
             "EMA.RAMP_UP", 0.2, "MODEL.COMPILE", "step"),
}  # fmt: skip
NOT_STATIC = ("lamb", "muon", "airbench muon", "fp16", "compiled", "step")  # or another row
PLACES = [(0, 1), (0, 3), (0, 4), (1, 0), (1, 2), (1, 4)]  # (finished epochs, steps since), of four steps per epoch
DEFAULT_TIER = [
    ("default", "killed", (0, 3)), ("default", "signal", (0, 2)), ("everything", "killed", (1, 0)),
    ("step", "killed", (0, 3)),
]  # fmt: skip
SLOW_TIER = [
    *((name, "killed", (0, 2 if "rows" in name else 3)) for name in OPTIONS),
    *((name, "killed", place) for name in ("everything", "step") for place in PLACES),
    ("last epoch", "killed", (1, 1)),
    *((name, way, (1, 4)) for name in ("default", "airbench", "everything") for way in ("signal", "evaluation")),
]


@pytest.fixture(scope="module")
def teacher(image_folder, tmp_path_factory):
    """Return the overrides that select a teacher trained for one epoch."""
    out_dir = tmp_path_factory.mktemp("teacher")
    train_model(load_cfg(None, small_options(image_folder, out_dir, "OPTIM.MAX_EPOCH", 1)))
    return ("DISTILL.TEACHER", "resnet8", "DISTILL.WEIGHTS", out_dir / "best.pth.tar", "DISTILL.TEMPERATURE", 2)


@pytest.fixture(scope="module")
def options_of(teacher):
    """Return a function from a row of OPTIONS to its overrides."""
    return lambda name: (*OPTIONS[name], *(teacher if name == "everything" else ()))


@pytest.fixture(scope="module")
def uninterrupted(image_folder, tmp_path_factory, options_of):
    """Return a function from a row of OPTIONS to the folder of its uninterrupted run, which is trained once."""
    folders: dict[str, Path] = {}

    def train(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("uninterrupted")
            train_model(load_cfg(None, small_options(image_folder, folders[name], *options_of(name))))
        return folders[name]

    return train


def stop_run(cfg, way: str, place: tuple[int, int], monkeypatch) -> None:
    """Train up to a place: killed after its checkpoint, stopped by a signal, or killed in the evaluation after it."""
    if way == "killed":
        runs.train_and_stop(cfg, place, monkeypatch)
        return
    set_lr, evaluate, num_steps = trainer.set_lr, trainer.evaluate, itertools.count(1)

    def set_lr_or_signal(*arguments):
        if way == "signal" and next(num_steps) == 4 * place[0] + place[1]:
            signal.raise_signal(signal.SIGTERM)
        set_lr(*arguments)

    def evaluate_or_die(*args):
        if way == "evaluation" and (Path(cfg.OUT_DIR) / "best.pth.tar").exists() == bool(place[0]):
            raise runs.Stopped
        return evaluate(*args)

    with monkeypatch.context() as patch, pytest.raises((RunStopped, runs.Stopped)) as stopped:
        patch.setattr(trainer, "set_lr", set_lr_or_signal)
        patch.setattr(trainer, "evaluate", evaluate_or_die)
        train_model(cfg)
    assert way == "evaluation" or stopped.value.status == 128 + signal.SIGTERM
    for thread in threading.enumerate():  # a save in progress, for which the interpreter waits before it exits
        if thread.name == WRITER_NAME:
            thread.join()


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Compare the newest checkpoints of two runs, but for the times, the folder and the number of workers."""
    # `checkpoints` lists the checkpoints in the folder: a stopped run has one more.
    left_out = {"seconds", "timing", "peak_memory_mib", "config", "checkpoints", "meter"}
    contents = [{key: value for key, value in runs.newest(out).items() if key not in left_out} for out in (one, other)]
    (leaves, form), (others, other_form) = map(tree_flatten, contents)
    assert form == other_form
    for mine, theirs in zip(leaves, others, strict=True):
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs


@pytest.mark.parametrize(
    "name, way, place", [*DEFAULT_TIER, *(slow(*case) for case in dict.fromkeys(SLOW_TIER) if case not in DEFAULT_TIER)]
)
def test_a_resumed_run_is_the_whole_one(uninterrupted, options_of, small_cfg, tmp_path, monkeypatch, name, way, place):
    words, whole = (*options_of(name), "CHECKPOINT.EVERY_STEPS", 1), uninterrupted(name)
    forget = torch._dynamo.reset if name == "compiled" else lambda: None  # what the process has compiled
    forget()
    stop_run(small_cfg(*words), way, place, monkeypatch)
    forget()
    train_model(small_cfg(*words, "TRAIN.WORKERS", 2))
    log = (tmp_path / "out" / "train.log").read_text()
    assert f": epoch {place[0] + 1}, step {place[1]}\n" in log and ("SIGTERM: stopped" in log) == (way == "signal")
    assert_same_checkpoint(tmp_path / "out", whole)
    assert timeless(tmp_path / "out") == timeless(whole)


@pytest.mark.parametrize("name", ["step", *(slow(name) for name in OPTIONS if name not in NOT_STATIC)])
def test_static_steps_are_those_of_the_loop(uninterrupted, options_of, small_cfg, tmp_path, name):
    train_model(small_cfg(*options_of(name), "MODEL.COMPILE", "none" if name == "step" else "step"))
    assert_same_checkpoint(tmp_path / "out", uninterrupted(name))
    assert timeless(tmp_path / "out") == timeless(uninterrupted(name))


@pytest.mark.slow
@pytest.mark.parametrize("num, place, words", [
    (2, (1, 1), (*EVERYTHING, *BATCH_NORM)), (3, (0, 2), ("TRAIN.PRINT_FREQ", 3)),
    (2, (1, 4), AIRBENCH),
])  # fmt: skip
def test_several_processes_resume_bitwise(small_cfg, tmp_path, num, place, words):
    words = (*words, "CHECKPOINT.EVERY_STEPS", 1, "TRAIN.GLOBAL_BATCH_SIZE", 12)
    on_processes(num, train_and_read, small_cfg(*words, "OUT_DIR", tmp_path / "whole"))
    on_processes(num, runs.train_and_kill, small_cfg(*words), place)
    on_processes(num, train_and_read, small_cfg(*words))
    assert_same_checkpoint(tmp_path / "out", tmp_path / "whole")
    assert timeless(tmp_path / "out") == timeless(tmp_path / "whole")


def test_a_run_resumes_with_another_number_of_processes(small_cfg, tmp_path, monkeypatch):
    shared = ("TRAIN.GLOBAL_BATCH_SIZE", 12, "CHECKPOINT.EVERY_STEPS", 1, "OPTIM.MAX_EPOCH", 1, *GROUP_NORM)
    alone = train_and_read(small_cfg(*shared, "OUT_DIR", tmp_path / "alone"))
    runs.train_and_stop(small_cfg(*shared), (0, 3), monkeypatch)
    assert_close(on_processes(2, train_and_read, small_cfg(*shared))[0], alone, 1e-5)


@pytest.mark.slow
def test_the_last_epoch_may_end_early(uninterrupted):
    out = uninterrupted("last epoch")
    assert "4 steps per epoch, 2 in the last one" in (out / "train.log").read_text()
    rows = [(row["kind"], row["epoch"], row["step"]) for row in timeless(out)]
    assert rows[4:] == [("eval", 1, 4), ("train", 2, 1), ("train", 2, 2), ("eval", 2, 2)]
    assert (runs.newest(out)["epoch"], timeless(out)[-2]["lr"]) == (1, pytest.approx(0.1 / 26))


def test_processes_that_share_a_global_batch_train_the_same_model(small_cfg, tmp_path, teacher):
    # Not AdamW: it normalizes gradients, so the rounding of gradients close to zero would decide the sign of steps.
    overrides = (*EVERYTHING, *GROUP_NORM, *teacher, "OPTIM.NAME", "sgd", "OPTIM.BASE_LR", 0.01)
    alone = train_and_read(small_cfg(*overrides, "TRAIN.BATCH_SIZE", 6, "OUT_DIR", tmp_path / "alone"))
    shared = on_processes(2, train_and_read, small_cfg(*overrides))[0]
    assert_close(shared, alone, 1e-5)
    averages = ({"state_dict": content["ema_state_dict"]} for content in (shared, alone))
    assert_close(*averages, 1e-5)
    for kind in ("eval", "eval_ema"):
        one, other = ([e for e in records(tmp_path / out) if e["kind"] == kind] for out in ("alone", "out"))
        assert [(e["count"], e["top1"]) for e in one] == [(e["count"], e["top1"]) for e in other]
        assert one[0]["count"] == 37
        assert [e["loss"] for e in one] == pytest.approx([e["loss"] for e in other], rel=1e-4)


def test_a_drawn_seed_is_kept_when_the_run_is_resumed(small_cfg, monkeypatch):
    cfg = small_cfg("RNG_SEED", "null", "CHECKPOINT.EVERY_STEPS", 2)
    runs.train_and_stop(cfg, (0, 2), monkeypatch)
    seed = runs.newest(cfg.OUT_DIR)["seed"]
    assert train_and_read(cfg)["seed"] == seed
