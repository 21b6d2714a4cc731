"""Training runs: resumption, several processes and data-loading workers do not change the result."""

import itertools
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import runs
from support.batches import ALONE, CPU
from support.calls import Operations, count_calls
from support.processes import on_processes
from support.runs import ROOT, assert_close, assert_same_run, records, small_options, timeless, train_and_read
from support.tables import slow

from distribuuuu import trainer
from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.errors import NonFiniteError
from distribuuuu.config.explain import read_comments
from distribuuuu.config.options import OPTIONS
from distribuuuu.data.loader import build_loaders
from distribuuuu.engine.build import build_run
from distribuuuu.trainer import evaluate_weights, train_epoch, train_model


def test_a_run_that_ends_after_an_epoch_continues_exactly(finished_run, small_cfg, tmp_path):
    for _ in range(2):  # the second start has nothing to do
        train_model(small_cfg(), stop_epoch=1)
        assert runs.newest(tmp_path / "out")["epoch"] == 0
        results = json.loads((tmp_path / "out" / "results.json").read_text())
        assert (results["finished"], results["training"]["epochs_done"]) == (False, 1)
    folder, older = CheckpointManager(tmp_path / "out"), runs.newest(tmp_path / "out")
    folder.save({name: value for name, value in older.items() if name != "images_seen"})
    folder.finish()
    train_model(small_cfg(), stop_epoch=9)
    assert_same_run(finished_run, tmp_path / "out")
    assert timeless(finished_run) == timeless(tmp_path / "out")
    assert runs.newest(tmp_path / "out")["images_seen"] == 96, "an older checkpoint does not tell them"
    finished = json.loads((tmp_path / "out" / "results.json").read_text())
    assert finished["finished"] and finished["config_hash"] == results["config_hash"]


@pytest.mark.slow
def test_an_evaluation_period_changes_the_evaluations_only(small_cfg, tmp_path):
    options = ("OPTIM.MAX_EPOCH", 3, "EMA.HALF_LIFE", 50, "MODEL.PRECISE_BN", 12)
    train_model(small_cfg(*options, "OUT_DIR", tmp_path / "every"))
    cfg = small_cfg(*options, "TRAIN.EVAL_PERIOD", 2)
    train_model(cfg, stop_epoch=1)
    assert runs.newest(cfg.OUT_DIR)["epoch"] == 0 and not (Path(cfg.OUT_DIR) / "results.json").exists()
    train_model(cfg)
    every, mine = runs.newest(tmp_path / "every"), runs.newest(cfg.OUT_DIR)
    for key in ("state_dict", "ema_state_dict"):
        assert all(torch.equal(every[key][name], tensor) for name, tensor in mine[key].items())
    assert mine["best_epoch"] in (1, 2) and mine["checkpoints"] == every["checkpoints"]
    is_expected = [row["kind"] == "train" or row["epoch"] > 1 for row in timeless(tmp_path / "every")]
    rows = [{**row, "best_top1": None} for row in itertools.compress(timeless(tmp_path / "every"), is_expected)]
    assert [{**row, "best_top1": None} for row in timeless(cfg.OUT_DIR)] == rows


@pytest.mark.parametrize("words, most", [
    (("MODEL.ARCH", "resnet20"), 120), (("AUG.MIXUP", 0.2), 160), (("AUG.MIXUP", 0.2, "AUG.CUTMIX", 1.0), 165),
    (("MODEL.ARCH", "resnet20", "EMA.HALF_LIFE", 30, "OPTIM.CLIP_NORM", 1.0, "LOSS.LABEL_SMOOTHING", 0.1), 150),
    (("EMA.HALF_LIFE", 30, "OPTIM.CLIP_NORM", 1.0, "AUG.MIXUP", 0.2), 190), (("TRAIN.GLOBAL_BATCH_SIZE", 24), 175),
    (("TRAIN.GLOBAL_BATCH_SIZE", 24, "AUG.MIXUP", 0.2, "AUG.CUTMIX", 1.0), 245),
    (("MODEL.ARCH", "resnet20", "MODEL.COMPILE", "step", "EMA.HALF_LIFE", 30, "OPTIM.CLIP_NORM", 1.0), 120),
])  # fmt: skip
def test_a_step_costs_few_calls_and_makes_no_tensor_of_a_number(small_cfg, tmp_path, monkeypatch, words, most):
    cfg = small_cfg(*words, "TRAIN.PRINT_FREQ", 100, "OPTIM.MAX_EPOCH", 30, "OUT_DIR", tmp_path)
    run = build_run(cfg, *build_loaders(cfg, ALONE, CPU))
    state, loader, task = run.state, run.train_loader, run.task
    batches = itertools.repeat(next(iter(loader)))
    monkeypatch.setattr(loader, "batches_from", lambda *position: batches)

    def train(num: int) -> None:
        monkeypatch.setattr(loader, "steps_of", lambda epoch: num)
        train_epoch(run)
        state.epoch, state.step = state.epoch + 1, 0

    train(1)
    if "MODEL.COMPILE" in words:
        task.update._graph = graph = SimpleNamespace(replay=lambda: None)  # as on CUDA
        state.optimizer.param_groups[0]["weight_decay"] = 0.5
        train(1)
        assert task.update._graph is None, "captured anew"
        task.update._graph = graph
    with Operations() as one:
        train(1)
    with Operations() as two:
        train(2)
    unwanted = ["_local_scalar_dense", "lift_fresh", "scalar_tensor", "full"]
    unwanted += ["_foreach_lerp_", "_foreach_norm"] if "MODEL.COMPILE" in words else []  # which the graph holds
    assert not (two.counts - one.counts).keys() & {f"aten::{name}" for name in unwanted}
    parts = (task, "train_step"), (state.precision, "backward"), (state.optimizer, "step")
    # Without the start and the end of an epoch; the mixer draws for 16 steps at once.
    short, long = (count_calls(lambda num=num: train(num), *parts, (state.optimizer, "zero_grad")) for num in (16, 32))
    print(f"{(long - short) / 16:.1f} calls per step: {words}")
    assert long - short <= 16 * most


def off_values() -> dict[str, list[str]]:
    """Return the values with which an option is off, as its comment says: "0: none", "Empty: ...", "negative: ..."."""
    found = {key: re.findall(r"\b(-?\d+|empty|null|negative): ", text.lower().replace(" -1", " negative"))
             for key, text in read_comments().items()}  # fmt: skip
    empty = {key: {"()": "[]", "{}": "{}"}.get(repr(OPTIONS[key].default), "") for key in found}
    words = {key: {"negative": "-1", "empty": empty[key]} for key in found}
    return {key: [words[key].get(value, value) for value in values] for key, values in found.items() if values}


@pytest.mark.parametrize("last, words", [
    (False, {"OPTIM.NAME": "adamw", "LOG.TENSORBOARD": True}),
    (True, {"LOSS.NAME": "bce", "EMA.HALF_LIFE": 20, "AUG.MIXUP": 0.2, "MODEL.ACT_CHECKPOINT": True}),
    (False, {"LOSS.NAME": "focal", "OPTIM.MAX_EPOCH": 0}), (True, {"LOSS.NAME": "focal"}),
])  # fmt: skip
def test_every_documented_off_value_trains(small_cfg, last, words):
    values = {key: found[-last] for key, found in off_values().items()}
    assert len(values) > 40 and {"LOG.NUM_IMAGES", "EMA.RAMP_UP", "OPTIM.BIAS_WEIGHT_DECAY"} < values.keys()
    values |= {"OPTIM.MAX_EPOCH": 1, "MODEL.NUM_CLASSES": 3} | words
    cfg = small_cfg(*itertools.chain(*values.items()))
    train_model(cfg)
    assert (Path(cfg.OUT_DIR) / "results.json").exists() == (cfg.OPTIM.MAX_EPOCH > 0)


def test_a_run_writes_the_expected_files(finished_run):
    files = " ".join(sorted(path.name for path in finished_run.iterdir()))
    assert files == ".lock best.pth.tar checkpoints config.yaml metrics.jsonl predictions.npz results.json train.log"
    content = runs.newest(finished_run)
    assert (content["epoch"], content["step"], content["classes"]) == (1, 0, ["ant", "bee", "cat"])
    kinds = [(entry["kind"], entry["epoch"], entry["step"], entry["count"]) for entry in records(finished_run)]
    expected = [[("train", epoch, step, 12) for step in (1, 2, 3, 4)] + [("eval", epoch, 4, 37)] for epoch in (1, 2)]
    assert kinds == sum(expected, [])
    assert load_cfg(str(finished_run / "config.yaml")).OUT_DIR == str(finished_run)
    log = (finished_run / "train.log").read_text()
    assert f"best top1: {content['best_acc1']:.2f} (epoch {content['best_epoch'] + 1})" in log and "rate: 0.1, " in log


def test_zero_is_a_valid_seed(finished_run, small_cfg):
    content = train_and_read(small_cfg("RNG_SEED", 0, "OPTIM.MAX_EPOCH", 1))
    weights = [one["state_dict"]["fc.weight"] for one in (content, runs.newest(finished_run))]
    assert content["seed"] == 0 and not torch.equal(*weights)


def name_job(monkeypatch, job: str, agent: int) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr("os.getppid", lambda: agent)


@pytest.mark.parametrize("job, agent", [("7", 1), slow("8", 1), ("8", 2)])
def test_a_restart_by_the_launcher_resumes_its_own_run_despite_auto_resume_false(
    small_cfg, tmp_path, monkeypatch, job, agent
):
    """Slurm counts its restarts; torchrun starts its processes again without counting if nodes come or go."""
    cfg, is_own = small_cfg("TRAIN.AUTO_RESUME", False), job == "7" or agent == 1
    name_job(monkeypatch, "7", 1)
    train_model(cfg, stop_epoch=1)
    name_job(monkeypatch, job, agent)
    if job == "7":
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        name_job(monkeypatch, "7", 2)
    train_model(cfg)
    log = (tmp_path / "out" / "train.log").read_text()
    assert ("resumed from" in log) == is_own and (tmp_path / "out" / "checkpoints.1").exists() != is_own


def test_a_run_that_a_nan_has_stopped_continues_with_another_seed(small_cfg, monkeypatch):
    num_rows, check_loss = itertools.count(1), trainer.check_loss
    fail = lambda metrics: check_loss({**metrics, "loss": math.nan} if next(num_rows) == 3 else metrics)  # noqa: E731
    said = r"nan in epoch 1, by step 3; the newest checkpoint, .*_step_000002.*, is finite; fix: .* another RNG_SEED"
    with monkeypatch.context() as patch, pytest.raises(NonFiniteError, match=said):
        patch.setattr(trainer, "check_loss", fail)
        train_model(small_cfg("CHECKPOINT.EVERY_STEPS", 2))
    content = train_and_read(cfg := small_cfg("RNG_SEED", 5, "CHECKPOINT.EVERY_STEPS", 2))
    assert content["seed"] == json.loads((Path(cfg.OUT_DIR) / "results.json").read_text())["seed"] == 5
    rows = [(row["epoch"], row["step"]) for row in records(cfg.OUT_DIR) if row["kind"] == "train"]
    assert rows == [(epoch, step) for epoch in (1, 2) for step in (1, 2, 3, 4)]


def test_a_resume_on_other_data_is_a_warning(small_cfg, image_folder, tmp_path):
    root, out_dir = tmp_path / "images", tmp_path / "out"
    shutil.copytree(image_folder, root)
    cfg = load_cfg(None, small_options(root, out_dir, "TRAIN.AUTO_RESUME", True))
    train_model(cfg, stop_epoch=1)
    (root / "train" / "ant" / "000.jpg").unlink()
    (path := root / "val" / "ant" / "000.jpg").rename(path.with_name("renamed.jpg"))
    train_model(cfg)
    log = (out_dir / "train.log").read_text()
    assert "the training data has changed since the checkpoint: 47 images, 48 then" in log
    assert "the evaluation data has changed since the checkpoint: with other names or labels" in log


@pytest.mark.slow
@pytest.mark.parametrize("home", [None, "/proc/no_home"])
def test_a_user_without_a_home_trains(image_folder, tmp_path, monkeypatch, home):
    for name in ("HOME", "XDG_CACHE_HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    # The system does not know the user either.
    code = "import pwd\ndef unknown(uid): raise KeyError(uid)\npwd.getpwuid = unknown"
    (tmp_path / "sitecustomize.py").write_text(code)
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TMPDIR": str(tmp_path), **({"HOME": home} if home else {})}
    options = small_options(image_folder, tmp_path / "out", "OPTIM.MAX_EPOCH", 1)
    done = runs.run_python("-m", "distribuuuu", "train", *options, **env)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_a_corrupt_evaluation_image_loses_no_training_step(finished_run, image_folder, tmp_path, monkeypatch):
    check = "distribuuuu.data.datasets.file_check.check_images"
    monkeypatch.setattr(check, lambda *args: "")  # it breaks after the check
    root, out_dir = tmp_path / "images", tmp_path / "out"
    shutil.copytree(image_folder, root)
    broken = root / "val" / "cat" / "005.jpg"
    broken.write_bytes(b"no image")
    with pytest.raises(ConfigError, match="005.jpg"):
        train_model(load_cfg(None, small_options(root, out_dir)))
    assert [path.name for path in CheckpointManager(out_dir).list()] == ["ckpt_ep_000_step_000004.pth.tar"]
    assert (out_dir / "train.log").read_text().count("005.jpg") == 1, "train.log contains the error once"
    before = (out_dir / "metrics.jsonl").read_text()
    shutil.copy(image_folder / "val" / "cat" / "005.jpg", broken)
    train_model(load_cfg(None, small_options(root, out_dir)))
    assert (out_dir / "metrics.jsonl").read_text().startswith(before), "no step is repeated"
    assert_same_run(out_dir, finished_run)
    assert timeless(out_dir) == timeless(finished_run)
    names = [path.name for path in CheckpointManager(out_dir).list()]
    assert names == ["ckpt_ep_001.pth.tar", "ckpt_ep_002.pth.tar"], "one checkpoint per epoch remains"


def test_a_failed_resume_lists_the_changed_options_and_keeps_the_previous_run(copied_run, small_cfg):
    out_dir = copied_run
    before = {path.name: path.read_bytes() for path in out_dir.glob("*.*") if path.name not in ("train.log", ".lock")}
    for config, message in (("config", "MODEL.ARCH resnet8 -> resnet14, OPTIM.BASE_LR 0.1 -> 0.2"), ("", "MODEL.ARCH")):
        for path in CheckpointManager(out_dir).list():
            content = torch.load(path)
            torch.save({key: value for key, value in content.items() if key != "config" or config}, path)
        (problem,) = runs.problems_of(train_model, small_cfg("MODEL.ARCH", "resnet14", "OPTIM.BASE_LR", 0.2))
        assert problem.count(f"changed since the checkpoint: {message}") == 1
        assert "another OUT_DIR, or TRAIN.AUTO_RESUME False" in problem
    assert (out_dir / "train.log").read_text().count("changed since the checkpoint: MODEL.ARCH resnet8") == 2
    assert {path.name: path.read_bytes() for path in out_dir.glob("*.*") if path.name in before} == before
    assert evaluate_weights(load_cfg(str(out_dir / "config.yaml"), ["OUT_DIR", str(out_dir)]))["count"] == 37


def test_a_finished_run_reports_other_options_and_is_archived_by_the_next(finished_run, copied_run, small_cfg):
    train_model(small_cfg("OPTIM.WEIGHT_DECAY", 1e-3))
    log = (copied_run / "train.log").read_text()
    assert "nothing to train: 2 epochs finished" in log and timeless(copied_run) == timeless(finished_run)
    assert "options changed since the checkpoint: OPTIM.WEIGHT_DECAY 5e-05 -> 0.001" in log
    new, aside = ("TRAIN.AUTO_RESUME", False), copied_run / "checkpoints.1"
    with pytest.raises(ConfigError, match="fails on an input"):
        train_model(small_cfg(*new, "MODEL.ARCH", "timm/vit_tiny_patch16_224", "TEST.CROP_SIZE", 15))
    assert (copied_run / "best.pth.tar").exists() and not aside.exists()
    train_model(small_cfg(*new, "RNG_SEED", 4))
    assert load_cfg(str(aside / "config.yaml")).RNG_SEED == 3 and timeless(aside) == timeless(finished_run)


@pytest.mark.slow
def test_two_processes_with_syncbn_equal_one_with_the_full_batch(small_cfg, tmp_path):
    # Rounding across the kink of a ReLU would change a gradient by far more; with this seed it does not happen.
    shared = ("TRAIN.GLOBAL_BATCH_SIZE", 12, "RNG_SEED", 5)
    alone = train_and_read(small_cfg(*shared, "OUT_DIR", tmp_path / "alone"))
    together = on_processes(2, train_and_read, small_cfg(*shared, "MODEL.SYNCBN", True))[0]
    assert_close(together, alone, 1e-5)
    apart = on_processes(2, train_and_read, small_cfg(*shared, "TRAIN.AUTO_RESUME", False))[0]
    with pytest.raises(AssertionError):
        assert_close(apart, alone, 1e-5)


def test_model_weights_resumes_a_full_checkpoint_and_initializes_with_load_opt_false(finished_run, small_cfg, tmp_path):
    checkpoint = finished_run / "checkpoints" / "ckpt_ep_001.pth.tar"
    continued = small_cfg("MODEL.WEIGHTS", checkpoint, "OUT_DIR", tmp_path / "continued")
    train_model(continued)
    assert_same_run(continued.OUT_DIR, finished_run)
    worse = small_cfg("MODEL.WEIGHTS", checkpoint, "OUT_DIR", tmp_path / "worse", "OPTIM.BASE_LR", 0)
    train_model(worse)
    assert (tmp_path / "worse" / "best.pth.tar").exists()  # though the checkpoint had the same accuracy
    fresh = small_cfg("MODEL.WEIGHTS", checkpoint, "TRAIN.LOAD_OPT", False)
    train_model(fresh)
    assert len(records(fresh.OUT_DIR)) == 10
    assert records(fresh.OUT_DIR)[0]["loss"] != records(finished_run)[0]["loss"]


def test_weights_that_are_not_finite_are_refused_before_the_first_step(finished_run, small_cfg, tmp_path):
    content = torch.load(finished_run / "best.pth.tar", weights_only=True)
    content["state_dict"]["fc.weight"][0, 0] = math.nan
    torch.save(content, tmp_path / "nan.pth.tar")
    with pytest.raises(ConfigError, match="tensor raw/fc.weight is not finite"):
        train_model(small_cfg("MODEL.WEIGHTS", tmp_path / "nan.pth.tar"))
    assert not (tmp_path / "out" / "checkpoints").exists()
