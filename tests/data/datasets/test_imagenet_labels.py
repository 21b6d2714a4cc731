"""TEST.LABELS: images right with the ImageNet test sets, against the masking of timm."""

import json
import re
import shutil
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from support.images import draw_folder
from support.saved_runs import save_run
from support.tables import slow
from timm.data import ImageNetInfo

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.registry import dataset_class
from distribuuuu.data.datasets.imagenet_labels import explain_more_classes, read_classes
from distribuuuu.engine.preflight import find_run_problems
from distribuuuu.inference.loaded_run import build_eval_transform
from distribuuuu.trainer import evaluate_weights as evaluate_run

SYNSETS = ImageNetInfo().label_names()
INFO = files("timm.data") / "_info"


def options(root: Path, out: Path, labels: str, *overrides) -> list[str]:
    settings = {
        "MODEL.ARCH": "timm/test_resnet", "MODEL.NUM_CLASSES": 1000, "TEST.LABELS": labels, "TEST.DATASET": root,
        "TRAIN.DATASET": root, "TEST.SPLIT": "images", "TRAIN.IM_SIZE": 32, "TEST.IM_SIZE": 36, "TEST.BATCH_SIZE": 7,
        "TRAIN.WORKERS": 0, "OUT_DIR": out, "DATA.MEAN": "[0.5, 0.5, 0.5]", "DATA.STD": "[0.2, 0.2, 0.2]",
    }  # fmt: skip
    return [str(word) for pair in settings.items() for word in pair] + [str(word) for word in overrides]


def evaluate(args: list[str]) -> dict:
    cfg = load_cfg(None, args)
    if not (Path(cfg.OUT_DIR) / "best.pth.tar").exists():
        save_run(cfg, SYNSETS)
    return evaluate_run(cfg)


def reference_logits(args: list[str], paths: list[Path]) -> torch.Tensor:
    cfg = load_cfg(None, args)
    model = timm.create_model("test_resnet", num_classes=1000)
    model.load_state_dict(torch.load(Path(cfg.OUT_DIR) / "best.pth.tar")["state_dict"])
    with torch.inference_mode():
        return model.eval()(torch.stack([build_eval_transform(cfg)(path) for path in paths]))


def num_right(result: dict) -> tuple[float, float]:
    return tuple(round(result[name] * result["count"] / 100, 6) for name in ("top1", "topk"))


def folder_classes(labels: str) -> list[str]:
    """Return the class folders of the whole set, in the order of timm's class indices."""
    if labels in ("imagenet_a", "imagenet_r"):
        return (INFO / f"{labels}_synsets.txt").read_text().split()
    return [str(number) for number in range(1000)] if labels == "imagenet_v2" else SYNSETS


@pytest.mark.parametrize("labels", ["imagenet_r", slow("imagenet_v2"), slow("imagenet_sketch")])
def test_counts_equal_those_of_timms_masking_on_folders_that_lack_most_classes(tmp_path, labels):
    classes = folder_classes(labels)
    # timm restricts the outputs to the lines of this file, and labels the folders of the full set in sorted order.
    is_subset = (INFO / f"{labels}_indices.txt").is_file()
    valid = [int(line) for line in (INFO / f"{labels}_indices.txt").read_text().split()] if is_subset else None
    chosen = [2, 3, 10, len(classes) // 2, len(classes) - 1]
    draw_folder(tmp_path, "images", {classes[number]: 6 for number in chosen})
    args = options(tmp_path, tmp_path / "out", labels)
    # Weights for which some answers are right: the mask and the map both change the counts.
    save_run(load_cfg(None, args), SYNSETS)
    paths = [path for number in chosen for path in sorted((tmp_path / "images" / classes[number]).iterdir())]
    targets = torch.tensor([number for number in chosen for _ in range(6)])
    favor_labels(tmp_path / "out" / "best.pth.tar", [valid[n] if valid else n for n in chosen], (0,) if valid else ())

    result = evaluate(args)

    output = reference_logits(args, paths)
    output = output[:, valid] if valid else output
    right = output.topk(5).indices.eq(targets[:, None])
    assert result["count"] == len(paths) == 30
    assert num_right(result) == (right[:, 0].sum(), right.sum())
    assert 0 < right[:, 0].sum() < 30 and right[:, 0].sum() < right.sum()
    stored = np.load(tmp_path / "out" / "predictions.npz")["classes"]
    assert stored.tolist() == [SYNSETS[number] for number in valid or range(1000)]
    assert json.loads((tmp_path / "out" / "test_results.json").read_text())["evaluation"]["labels"] == labels


def favor_labels(path: Path, numbers: list[int], masked: tuple[int, ...] = ()) -> None:
    """Raise the head's biases of some classes, and those of classes that a preset masks even more."""
    content = torch.load(path)
    bias = content["state_dict"]["fc.bias"]
    bias[numbers] += bias.abs().max() + 2
    bias[masked] += 1.5 * bias.abs().max()
    torch.save(content, path)


def test_names_of_folders_and_files_that_do_not_fit_are_reported(tmp_path):
    for number, (labels, names, message) in enumerate([
        ("imagenet_a", ["n01498041", "n01440764"], r"class folders n01440764; expected synsets of imagenet_a"),
        ("imagenet_v2", ["0", "1000"], r"class folders 1000; expected .* 0 to 999"),
        ("imagenet_v2", ["0", "n01440764"], r"class folders 0; expected"),
        ("imagenet_sketch", ["goldfish"], r"class folders goldfish; expected synsets of imagenet_sketch"),
    ]):  # fmt: skip
        root = tmp_path / str(number)
        draw_folder(root, "images", dict.fromkeys(names, 1))
        cfg = load_cfg(None, options(root, tmp_path / "out", labels))
        ((key, text),) = dataset_class(cfg).find_problems(cfg, train=False)
        assert key == "TEST.SPLIT" and re.search(message, text), text


def test_weights_of_more_classes_than_the_images_have_lead_to_the_option(tmp_path, image_folder):
    some = explain_more_classes({}, ["n01440764", "n02102040"])
    assert some.startswith("; fix: set TEST.LABELS imagenet, ")
    assert "fix: set TEST.LABELS weights" in explain_more_classes({"classes": ["ant", "bee", "cat"]}, ["ant", "cat"])
    assert explain_more_classes({"classes": ["ant"]}, ["ant", "cat"]) == explain_more_classes({}, ["ant"]) == ""
    cfg = load_cfg(None, ["MODEL.NUM_CLASSES", "1000", "TRAIN.DATASET", str(image_folder)])
    assert "set TEST.LABELS weights, or imagenet" in str(find_run_problems(cfg, train=False)[0])
    assert [*read_classes("imagenet").values()] == [*range(1000)]


def test_some_of_the_classes_of_the_weights_are_found_by_name(finished_run, image_folder, tmp_path):
    for name in ("bee", "cat"):
        shutil.copytree(image_folder / "val" / name, tmp_path / "some" / name)

    def evaluate_some(*words):
        given = ["TEST.DATASET", tmp_path / "some", "OUT_DIR", tmp_path / "out", *words]
        cfg = load_cfg(str(finished_run / "config.yaml"), [str(word) for word in given])
        return find_run_problems(cfg, train=False) or evaluate_run(cfg)

    expected = evaluate_some("MODEL.WEIGHTS", finished_run)  # the training data are there
    assert expected["count"] == 25
    named = ("TRAIN.DATASET", tmp_path / "gone", "TEST.LABELS", "weights", "MODEL.WEIGHTS")
    for weights in (finished_run, finished_run / "best.pth.tar"):
        assert evaluate_some(*named, weights) == evaluate_some(*named, weights, "MODEL.NUM_CLASSES", 0) == expected
    (tmp_path / "some/dog").mkdir()
    shutil.copy(next((tmp_path / "some/cat").iterdir()), tmp_path / "some/dog")
    (problem,) = evaluate_some(*named, finished_run)
    assert problem.key.startswith("TEST.") and "classes that the training data lacks: dog" in problem.message
    state = read_checkpoint(finished_run / "best.pth.tar")["state_dict"]
    torch.save({"state_dict": state}, tmp_path / "nameless.pth")
    with pytest.raises(ConfigError, match=r"nameless.pth does not name its classes; fix: TEST.LABELS imagenet"):
        evaluate_some(*named, tmp_path / "nameless.pth")
