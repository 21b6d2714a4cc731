"""The records of a run: results.json, predictions.npz, and the environment."""

import errno
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.commands import command_module
from support.images import write_label_lists
from support.predictions import prediction_arrays
from support.processes import on_processes
from support.runs import ROOT, small_options
from support.tables import slow

from distribuuuu.checkpoint.manager import hash_tensors
from distribuuuu.checkpoint.weights_files import tensors_key
from distribuuuu.config import ConfigError, get_cfg, load_cfg
from distribuuuu.data.batch import Batch
from distribuuuu.data.loader import build_loader
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.process_group import process_group
from distribuuuu.engine.state import TrainState
from distribuuuu.launch.detect import detect_launch
from distribuuuu.models import build_model, count_parameters
from distribuuuu.optim.precision import Precision
from distribuuuu.records import environment, predictions
from distribuuuu.records.environment import describe_hardware, find_commit
from distribuuuu.records.predictions import Recorder, write_npz
from distribuuuu.records.read_results import read_results
from distribuuuu.records.results import RunResults, config_name, hash_config, list_overrides, write_test_results
from distribuuuu.tasks.base import build_task
from distribuuuu.tasks.metrics import Meter, StepOutput
from distribuuuu.trainer import evaluate_weights, train_model

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
    run = SimpleNamespace(cfg=cfg, task=task, state=state, train_loader=loaders[0])
    hash_weights = lambda content, kind: hash_tensors(content[tensors_key(kind)])  # noqa: E731
    return state, RunResults(run, loaders[1].images, hash_weights)


def finish_epoch(state, results, ema: dict | None = None) -> None:
    """Finish an epoch of a quarter of an hour and write the results."""
    new = {"raw": SERIES[state.epoch], **({"ema": ema} if ema else {})}
    state._started -= 900
    state.finish_epoch(new)
    state.timing.update(images=1234, seconds=10.0)
    bests = {kind: {"epoch": state.bests[kind].epoch + 1, **state.bests[kind].metrics} for kind in new}
    content = state.to_dict() | {"evaluations": new, "ema_state_dict": {}, "bests": bests, "finished": state.epoch == 3}
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
    assert len({hash_tensors({name: value}) for name in "ab" for value in (torch.ones(2), torch.ones(1, 2))}) == 4
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
    # default was edited, results of before are of another config. A removed option keeps its place, see `removed`.
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
    other = load_cfg(str(path), ["MODEL.KWARGS", "{}", "MODEL.KWARGS.a", "{b: 1}", "FINETUNE.LR_MULT", "{a.0.*: 2}"])
    assert list_overrides(other) == {"MODEL.KWARGS": {}, "MODEL.KWARGS.a": {"b": 1}, "FINETUNE.LR_MULT.a.0.*": 2.0}
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


def git(folder, *args: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", "-C", folder, *identity, *args], capture_output=True, text=True, check=True).stdout


def test_the_commit_is_that_of_the_code_or_none(tmp_path, monkeypatch, capfd):
    package = tmp_path / "repository" / "package"
    installed = package.parent / ".venv" / "package"  # in a repository that is not its own
    for folder in (package, installed):
        folder.mkdir(parents=True)
        (folder / "code.py").write_text("1\n")
    git(package.parent, "init", "-q")
    git(package, "add", ".")
    git(package, "commit", "-qm", "first")
    head = git(package, "rev-parse", "HEAD").strip()
    (package.parent / "notes.txt").write_text("not code")
    assert find_commit(package) == head and find_commit(installed) is find_commit(tmp_path) is None
    for name, before in (("my_net.py", None), ("code.py", "1\n")):
        (package / name).write_text("2\n")
        assert find_commit(package) == f"{head}+changes"
        (package / name).write_text(before) if before else (package / name).unlink()
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert find_commit(package) is None and capfd.readouterr() == ("", "")


def test_hardware_is_counted_once_though_processes_share_it(monkeypatch):
    own = environment._describe_local_hardware(torch.device("cpu"))
    assert describe_hardware(torch.device("cpu")) == own[1]
    cards = [("a 1", "H100"), ("a 2", "H100"), ("a 2", "H100"), ("b 1", "H200")]
    monkeypatch.setattr(environment.dist, "gather_objects", lambda value: cards)
    assert describe_hardware(torch.device("cpu")) == "2 x H100 + H200"


def read(out_dir):
    return command_module("stats.stored_predictions").read_predictions(out_dir / "predictions.npz", "run it")


def test_the_last_evaluation_of_a_run_is_written_image_by_image(finished_run, image_folder):
    content, last = read(finished_run), read_results(finished_run / "results.json")["accuracy"]["raw"]["last"]
    assert len(content.meta.pop("digest")) == 32
    assert content.meta == {"schema": 1, "weights": "raw", "epoch": 2, "folder": str(image_folder), "multilabel": False,
                            "data": "imagefolder"}  # fmt: skip
    files = sorted(str(path.relative_to(image_folder)) for path in (image_folder / "val").rglob("*.jpg"))
    assert content.path.tolist() == files and content.classes == ["ant", "bee", "cat"]
    assert [content.classes[label] for label in content.label] == [name.split("/")[1] for name in files]
    assert 100 * content.correct.mean() == pytest.approx(last["top1"], abs=1e-9)
    assert content.loss.mean() == pytest.approx(last["loss"], rel=1e-6)
    expected = F.cross_entropy(torch.tensor(content.scores), torch.tensor(content.label).long(), reduction="none")
    assert np.allclose(content.loss, expected.numpy(), atol=1e-6)


@pytest.mark.parametrize(
    "num, size, words", [(1, 1, ()), slow(1, 64, ("DATA.LOADER", "device")), slow(2, 7, ()), (3, 7, ())]
)
def test_the_values_depend_on_neither_batch_size_nor_processes(finished_run, small_cfg, tmp_path, num, size, words):
    weights = ("MODEL.WEIGHTS", finished_run / "best.pth.tar", *words)
    expected = evaluate_weights(small_cfg(*weights, "OUT_DIR", tmp_path / "reference"))
    results = on_processes(num, evaluate_weights, small_cfg(*weights, "TEST.BATCH_SIZE", size))
    files = [tmp_path / name / "predictions.npz" for name in ("out", "reference")]
    content, other = (read(file.parent) for file in files)
    assert content.path.tolist() == other.path.tolist() and content.label.tolist() == other.label.tolist()
    assert np.allclose(content.scores, other.scores, atol=1e-4) and np.allclose(content.loss, other.loss, atol=1e-4)
    assert content.meta["epoch"] is None
    assert results == [pytest.approx(expected, abs=1e-6)] * num and expected["count"] == 37
    assert expected["top1"] == pytest.approx(100 * content.correct.mean(), abs=1e-6)


@pytest.mark.parametrize("num", [1, slow(3)])
def test_a_multilabel_run(image_folder, small_cfg, tmp_path, num):
    words = ("TRAIN.DATASET", write_label_lists(image_folder, tmp_path), "DATA.NAME", "multilabel", "LOSS.NAME", "bce")
    on_processes(num, train_model, small_cfg(*words, "OPTIM.MAX_EPOCH", 1))
    content, last = read(tmp_path / "out"), read_results(tmp_path / "out" / "results.json")["accuracy"]["raw"]["last"]
    assert content.label.shape == content.scores.shape == (37, 3)
    assert content.label.sum(axis=1).tolist()[:4] == [0, 1, 2, 1]
    assert content.loss.mean() == pytest.approx(last["loss"], rel=1e-5)
    assert np.allclose(content.probabilities(), torch.tensor(content.scores).sigmoid(), atol=1e-6)


def fail(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("name", "value", "message"), [
    ("write_npz", fail, "CANNOT BE WRITTEN"), ("MAX_IMAGES", 36, "is not written for more than 36 images"),
    ("MAX_LOGITS", 110, "is not written for more than 1,000,000 images or 110 scores"),
])  # fmt: skip
def test_a_run_ends_without_predictions(small_cfg, tmp_path, monkeypatch, name, value, message):
    monkeypatch.setattr(predictions, name, value)
    train_model(small_cfg("OPTIM.MAX_EPOCH", 1))
    assert read_results(tmp_path / "out" / "results.json")["finished"]
    assert not (tmp_path / "out" / "predictions.npz").exists()
    assert f"predictions.npz {message}" in (tmp_path / "out" / "train.log").read_text()


def record(logits: torch.Tensor, targets: torch.Tensor, *sizes: int, classes: int = 0) -> dict[str, np.ndarray] | None:
    """Return the arrays of one process, of batches of some sizes, in reverse order."""
    task = SimpleNamespace(classes=range(classes or logits.shape[1]), multilabel=False, classifies=True)
    recorder, index = Recorder(None, task, range(len(logits))), torch.arange(len(logits)).flip(0)
    for part in index.split(sizes or [5, len(logits) - 5]):
        recorder.add(Batch(None, None, part), StepOutput(torch.tensor(0.0), logits[part], targets[part]))
    return recorder.gather(torch.device("cpu"))


def record_boxes() -> dict[str, np.ndarray] | None:
    task, rank = SimpleNamespace(classes=range(4), multilabel=False, classifies=False), detect_launch().rank
    recorder, boxes = Recorder(None, task, range(1)), torch.ones(1, 2, 2)
    if rank == 0:  # the only image
        recorder.add(Batch(None, None, torch.tensor([0])), StepOutput(torch.tensor(0.0), boxes.view(1, 4), boxes))
    with process_group(detect_launch(), torch.device("cpu"), 60):
        return recorder.gather(torch.device("cpu"))


def test_a_process_without_images_has_targets_of_the_shape_of_the_others():
    assert [arrays["target"].shape for arrays in on_processes(2, record_boxes)] == [(1, 2, 2)] * 2


def test_logits_that_are_not_finite_are_refused_and_outputs_without_a_column_for_each_class_not_recorded(tmp_path):
    logits = torch.randn(40, 3)
    logits[2], logits[3, 1] = torch.nan, torch.inf
    arrays = record(logits, torch.zeros(40).long())
    assert arrays.pop("index").tolist() == list(range(40))
    write_npz(tmp_path / "predictions.npz", {**prediction_arrays(40), **arrays})
    with pytest.raises(ConfigError, match="scores that are not finite; fix: evaluate another checkpoint"):
        read(tmp_path)
    assert record(torch.zeros(4, 5), torch.zeros(4).long(), 4, classes=3) is None
