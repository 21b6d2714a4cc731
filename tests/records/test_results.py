"""results.json: content, interrupted writes and full disks, errors for damaged files."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.runs import ROOT, small_options

from distribuuuu.checkpoint.manager import hash_tensors
from distribuuuu.checkpoint.weights_files import KINDS
from distribuuuu.config import ConfigError, get_cfg, load_cfg
from distribuuuu.data.loader import build_loader
from distribuuuu.distributed import comm as dist
from distribuuuu.engine.state import TrainState
from distribuuuu.launch.detect import detect_launch
from distribuuuu.models import build_model, count_parameters
from distribuuuu.optim.precision import Precision
from distribuuuu.records.read_results import read_results
from distribuuuu.records.results import RunResults, config_name, hash_config, list_overrides, write_test_results
from distribuuuu.tasks.base import build_task
from distribuuuu.tasks.metrics import Meter

# What `evaluate` returns after each epoch: the second is the best.
SERIES = [
    {"count": 37, "loss": 1.1, "top1": 40.0, "topk": 100.0},
    {"count": 37, "loss": 0.8, "top1": 60.0, "topk": 99.0},
    {"count": 37, "loss": 0.9, "top1": 50.0, "topk": 98.0},
]


def start(cfg, epochs: int = 0):
    """Return the state and the results of a run that starts after so many epochs, in an existing process group."""
    launch, device = detect_launch(), torch.device("cpu")
    loaders = [build_loader(cfg, launch, device, train) for train in (True, False)]
    model = build_model(cfg)
    state = TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), seed=3, arch=cfg.MODEL.ARCH,
                       classes=loaders[0].images.classes, global_batch=loaders[0].plan.global_batch,
                       meter=Meter({}, 1, device))  # fmt: skip
    for result in SERIES[:epochs]:
        state.finish_epoch({"raw": result})
    task = build_task(cfg, state.classes, device, Precision())
    run = SimpleNamespace(cfg=cfg, task=task, state=state, train_loader=loaders[0], val_loader=loaders[1])
    return state, RunResults(run, lambda content, kind: hash_tensors(content[KINDS[kind].tensors]))


def finish_epoch(state, results, ema: dict | None = None) -> None:
    """Finish an epoch of a quarter of an hour and write the results."""
    evaluations = {"raw": SERIES[state.epoch], **({"ema": ema} if ema else {})}
    state._started -= 900
    state.finish_epoch(evaluations)
    state.timing.update(images=1234, seconds=10.0)
    bests = {kind: {"epoch": state.bests[kind].epoch + 1, **state.bests[kind].metrics} for kind in evaluations}
    content = {**state.to_dict(), "ema_state_dict": {}, "bests": bests, "finished": state.epoch == 3}
    if dist.is_main():
        results.write(content)


@pytest.fixture
def cfg(small_cfg):
    cfg = small_cfg("OPTIM.MAX_EPOCH", 3, "TEST.INTERPOLATION", "bicubic")
    Path(cfg.OUT_DIR).mkdir()
    return cfg


@pytest.fixture
def path(cfg) -> Path:
    return Path(cfg.OUT_DIR) / "results.json"


def test_the_file_has_the_facts_and_the_results_of_the_run(cfg, path):
    state, results = start(cfg)
    finish_epoch(state, results, ema=SERIES[2])
    assert read_results(path)["finished"] is False and "weights_sha256" not in read_results(path)
    finish_epoch(state, results, ema=SERIES[0])
    finish_epoch(state, results, ema=SERIES[0])
    record = read_results(path)
    raw, ema = record["accuracy"]["raw"], record["accuracy"]["ema"]
    assert raw["last"] == {"epoch": 3, "top1": 50.0, "topk": 98.0, "loss": 0.9}
    assert raw["best"] == {"epoch": 2, "top1": 60.0, "topk": 99.0, "loss": 0.8}
    assert (ema["last"]["epoch"], ema["best"]) == (3, {"epoch": 1, "top1": 50.0, "topk": 98.0, "loss": 0.9})
    assert record["finished"] is True and record["seed"] == 3
    assert record["training"] == {
        "px": 16, "epochs_planned": 3, "global_batch": 12, "processes": 1, "epochs_done": 3,
        "hours": pytest.approx(0.75, abs=0.01), "images_per_s": 123.4,
    }  # fmt: skip
    assert record["evaluation"] == {"resize": 18, "crop": 16, "interpolation": "bicubic", "k": 3, "count": 37,
                                    "metrics": {"top1": "top1", "topk": "top3"}}  # fmt: skip
    assert record["data"] == {"name": "imagefolder", "folder": Path(cfg.TRAIN.DATASET).name, "num_classes": 3,
                              "num_train": 48, "num_val": 37}  # fmt: skip
    assert record["model"] == {"arch": "resnet8", "params_m": count_parameters(state.model) / 1e6}
    weights = {"raw": hash_tensors(state.model.state_dict()), "ema": hash_tensors({})}
    assert record["weights_sha256"] == weights and record["environment"]["threads"] == torch.get_num_threads()
    assert record["config_hash"] == hash_config(cfg) and record["peak_memory"]["mib"] > 50
    assert record["versions"]["torch"] == torch.__version__ and record["hardware"].rstrip("s").endswith(" core")
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


@pytest.mark.parametrize("is_older", [False, True])
def test_a_resumed_run_knows_its_best_evaluation(cfg, path, is_older):
    """From its checkpoint alone; that of an older version holds the epoch and the selecting metric."""
    state, results = start(cfg, epochs=2)
    if is_older:
        state.bests["raw"].metrics = {"top1": 60.0}
    finish_epoch(state, results)
    others = {"topk": None, "loss": None} if is_older else {"topk": 99.0, "loss": 0.8}
    assert read_results(path)["accuracy"]["raw"]["best"] == {"epoch": 2, "top1": 60.0, **others}
    assert not path.with_name("results.older.json").exists()


def test_results_of_an_earlier_run_are_archived(cfg, path):
    state, results = start(cfg)
    finish_epoch(state, results)
    content = path.read_text()
    state, results = start(cfg)
    assert not path.exists() and path.with_name("results.older.json").read_text() == content
    finish_epoch(state, results)
    assert read_results(path)["training"]["epochs_done"] == 1


def test_an_evaluation_leaves_the_results_of_the_training_alone(cfg, path):
    state, results = start(cfg)
    finish_epoch(state, results)
    before = path.read_text()
    task = build_task(cfg, state.classes, torch.device("cpu"), Precision())
    write_test_results(cfg, task, state.model, "best.pth.tar", {"raw": SERIES[1], "ema": SERIES[2]})
    assert path.read_text() == before
    record = json.loads(path.with_name("test_results.json").read_text())
    assert record["accuracy"]["raw"] == {"loss": 0.8, "top1": 60.0, "topk": 99.0}
    assert (record["weights"], record["evaluation"]["count"], record["kind"]) == ("best.pth.tar", 37, "evaluation")
    assert record["config_hash"] == read_results(path)["config_hash"]
    with pytest.raises(ConfigError, match="test_results.json: .*kind 'evaluation'; expected 1 and 'training'"):
        read_results(path.with_name("test_results.json"))


def test_seeds_and_places_share_a_hash_and_nothing_else_does(image_folder, tmp_path):
    def hashed(*args) -> str:
        return hash_config(load_cfg(None, small_options(image_folder, tmp_path, *args)))

    first = hashed()
    shared = {"OUT_DIR": "x", "CFG_DEST": "c.yaml", "RNG_SEED": "5", "TRAIN.DATASET": "y", "TEST.DATASET": "z",
              "DATA.CACHE_DIR": "w", "LOG.TENSORBOARD": "True", "LOG.NUM_IMAGES": "1"}  # fmt: skip
    assert {hashed(key, value) for key, value in shared.items()} == {first}
    others = {"OPTIM.BASE_LR": "0.2", "MODEL.WEIGHTS": "a", "MODEL.KWARGS.width": "8", "TRAIN.SPLIT": "b",
              "DATA.CROP_SCALE": "(0.1, 1.0)"}  # fmt: skip
    assert len({first, *(hashed(key, value) for key, value in others.items())}) == 1 + len(others)


def test_a_neutral_option_of_the_command_line_leaves_the_hash_of_the_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("TRAIN: {WORKERS: 2}\n")
    hashed = hash_config(load_cfg(str(recipe)))
    given = load_cfg(str(recipe), ["TRAIN.WORKERS", "0", "TRAIN.PRINT_FREQ", "7"])
    assert hashed == hash_config(given) == hash_config(load_cfg(given, ["TRAIN.WORKERS", "1"]))
    assert hashed != hash_config(load_cfg(None, ["TRAIN.WORKERS", "2"])) == hash_config(get_cfg())


def test_the_defaults_have_the_hash_of_the_recorded_runs():
    # If this fails after an option was added: give it `hash_default`, or all rows of earlier results are split. After a
    # default was edited or an option removed, results of before are of another config.
    # The number of classes is that of the data, so a run has it; ImageNet's was the default.
    cfg = load_cfg(None, ["MODEL.NUM_CLASSES", "1000"])
    assert hash_config(cfg) == "6b13999432882ede58b0502064b373131be007af7b44e888a1889a0915ac6a74"


def test_a_config_is_named_by_its_file_and_what_the_command_line_changed(tmp_path):
    path = ROOT / "configs" / "fashion_mnist" / "resnet14.yaml"
    cfg = load_cfg(str(path), ["OPTIM.MAX_EPOCH", "2", "OUT_DIR", "exp/x", "RNG_SEED", "4", "MODEL.KWARGS.width", "8",
                              "TRAIN.WORKERS", "9"])  # fmt: skip
    assert config_name(cfg) == "fashion_mnist/resnet14"
    assert config_name(load_cfg(os.path.relpath(path))) == "fashion_mnist/resnet14"
    (tmp_path / "mine.yaml").write_text("TRAIN: {DATASET: x}")  # the origin of TEST.DATASET names another key
    assert config_name(load_cfg(str(tmp_path / "mine.yaml"))) == f"{tmp_path.name}/mine"
    assert list_overrides(cfg) == {"MODEL.KWARGS.width": 8, "OPTIM.MAX_EPOCH": 2}
    assert config_name(load_cfg(None, ["TRAIN.DATASET", "x:7"])) is None


INVALID = {
    "invalid JSON": lambda text: text[: len(text) // 2],
    "got schema 7": lambda text: text.replace('"schema": 1', '"schema": 7'),
    "hours": lambda text: text.replace('"hours"', '"years"'),
    "`seed`: got 'three'": lambda text: text.replace('"seed": 3', '"seed": "three"'),
    "not a valid results.json": lambda text: text.replace('"top1": "top1"', '"top1": {}'),
}


def test_a_file_that_is_not_valid_is_reported_in_one_line(cfg, path):
    finish_epoch(*start(cfg))
    valid = path.read_text()
    for message, damage in INVALID.items():
        path.write_text(damage(valid))
        with pytest.raises(ConfigError) as caught:
            read_results(path)
        assert str(caught.value).startswith(str(path)) and message in str(caught.value)
        assert "\n" not in str(caught.value)
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match="invalid JSON"):
        read_results(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_results(path.with_name("nothing.json"))
    with pytest.raises(ConfigError, match="cannot be read: not a regular file"):
        read_results(path.parent)
