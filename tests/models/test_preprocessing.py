"""Mean, std, interpolation, sizes and crop of weights: unset options follow them, set ones that differ are reported."""

import json
import logging

import pytest
import timm
import torch
from support.images import draw_folder
from support.runs import make_cfg, small_options
from timm.models import save_for_hf

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.config_node import get_value
from distribuuuu.inference.load_run import find_run
from distribuuuu.models.preprocessing import FOLLOWING, follow, resolve_preprocessing
from distribuuuu.trainer import evaluate_weights, train_model

HALF = (0.5, 0.5, 0.5)
OF_RUN = {"DATA.MEAN": HALF, "DATA.STD": [0.25, 0.25, 0.25], "TEST.INTERPOLATION": "bicubic", "TRAIN.IM_SIZE": 64,
          "TEST.IM_SIZE": 72, "TEST.CROP": "center", "OPTIM.BASE_LR": 7.0}  # fmt: skip
OF_TEST_VIT = {"DATA.MEAN": HALF, "DATA.STD": HALF, "TEST.INTERPOLATION": "bicubic", "DATA.INTERPOLATION": "bicubic",
               "TRAIN.IM_SIZE": 160, "TEST.IM_SIZE": 168}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with weights of each kind: `run` (an OUT_DIR), file.pth, `hub`, `export`, bare.pth."""
    root = tmp_path_factory.mktemp("weights")
    content = {"state_dict": {"a": torch.zeros(1)}, "config": OF_RUN}
    for name in ("run", "export"):
        (root / name).mkdir()
    torch.save(content, root / "file.pth")
    torch.save(content, root / "run" / "best.pth.tar")
    torch.save({"a": torch.zeros(1)}, root / "bare.pth")
    save_for_hf(timm.create_model("test_vit"), root / "hub", safe_serialization=True)
    settings = json.loads((root / "hub" / "config.json").read_text())
    settings["pretrained_cfg"].update(mean=HALF, std=HALF, input_size=[3, 160, 160], crop_pct=0.95)
    (root / "hub" / "config.json").write_text(json.dumps(settings))
    (root / "export" / "config.json").write_text(json.dumps({"distribuuuu": {"config": OF_RUN}}))
    (root / "export" / "model.safetensors").write_bytes((root / "hub" / "model.safetensors").read_bytes())
    return root


def notes_of(cfg, level):
    return [text for own, text in cfg.notes if own == level]


@pytest.mark.parametrize("name, expected", [
    ("run", OF_RUN), ("file.pth", OF_RUN), ("export", OF_RUN), ("hub", OF_TEST_VIT),
])  # fmt: skip
def test_unset_options_follow_the_weights_and_the_log_names_them(folder, name, expected):
    key = "FINETUNE.WEIGHTS"
    cfg = resolve_preprocessing(make_cfg(key, folder / name))
    for option, value in expected.items():
        if not option.startswith("OPTIM"):
            assert get_value(cfg, option) == (tuple(value) if isinstance(value, list) else value), option
            assert cfg.origins[option] == f"{key} {folder / name}"
    assert cfg.OPTIM.BASE_LR == 0.2 and notes_of(cfg, logging.WARNING) == []
    (note,) = notes_of(cfg, logging.INFO)
    assert f"{key} {folder / name}" in note and "DATA.MEAN [0.5, 0.5, 0.5]" in note
    assert resolve_preprocessing(cfg) is cfg


@pytest.mark.parametrize("arch, expected", [
    ("timm/test_vit", {**OF_TEST_VIT, "TEST.IM_SIZE": 168}),
    ("resnet50", {"DATA.MEAN": (0.485, 0.456, 0.406), "TRAIN.IM_SIZE": 224, "TEST.IM_SIZE": 232}),
    ("torchvision/efficientnet_b4", {"TRAIN.IM_SIZE": 380, "TEST.IM_SIZE": 384, "TEST.INTERPOLATION": "bicubic"}),
])  # fmt: skip
@pytest.mark.parametrize("words", [["MODEL.PRETRAINED", True], ["FINETUNE.WEIGHTS", "pretrained"]])
def test_published_weights_bring_theirs(arch, expected, words):
    cfg = resolve_preprocessing(make_cfg("MODEL.ARCH", arch, *words))
    assert {key: get_value(cfg, key) for key in expected} == expected


def test_set_options_stay_and_a_difference_is_a_warning_with_the_words_to_add(folder):
    words = ("DATA.MEAN", "[0.485,0.456,0.406]", "TRAIN.IM_SIZE", 32, "TEST.INTERPOLATION", "bicubic")
    cfg = resolve_preprocessing(make_cfg("FINETUNE.WEIGHTS", folder / "file.pth", *words))
    assert cfg.DATA.MEAN == (0.485, 0.456, 0.406) and cfg.DATA.STD == (0.25, 0.25, 0.25), "one may be set alone"
    assert (cfg.TRAIN.IM_SIZE, cfg.TEST.IM_SIZE) == (32, 256), "sizes follow together or not at all"
    (note,) = notes_of(cfg, logging.WARNING)
    assert "add: DATA.MEAN '[0.5, 0.5, 0.5]' TRAIN.IM_SIZE 64" in note and "INTERPOLATION" not in note
    same = make_cfg("FINETUNE.WEIGHTS", folder / "file.pth", "DATA.MEAN", "[0.5,0.5,0.5]")
    assert notes_of(resolve_preprocessing(same), logging.WARNING) == []
    for theirs in ((0.485, 0.456, 0.406), (0.449,)):  # those of the data set, or their mean
        empty = resolve_preprocessing(make_cfg("DATA.MEAN", "[]"))
        assert notes_of(follow(empty, "run", {"DATA.MEAN": theirs}), logging.WARNING) == []
    (note,) = notes_of(follow(make_cfg("DATA.MEAN", "[]"), "run", {"DATA.MEAN": HALF}), logging.WARNING)
    assert "than DATA.MEAN [0.485, 0.456, 0.406]" in note


def test_weights_that_say_nothing_are_named_and_a_teachers_are_compared(folder):
    cfg = resolve_preprocessing(make_cfg("MODEL.WEIGHTS", folder / "bare.pth"))
    assert "not known" in notes_of(cfg, logging.INFO)[0] and cfg.DATA.MEAN == ()
    teacher = ("DISTILL.TEACHER", "timm/test_vit", "DISTILL.WEIGHTS", "pretrained")
    assert "DATA.MEAN '[0.5, 0.5, 0.5]'" in notes_of(resolve_preprocessing(make_cfg(*teacher)), logging.WARNING)[0]
    own = ("DATA.MEAN", "[0.5,0.5,0.5]", "DATA.STD", "[0.5,0.5,0.5]")
    assert resolve_preprocessing(make_cfg(*teacher, *own)).notes == []


def test_training_evaluation_and_prediction_use_the_mean_of_the_weights(image_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    half = ("DATA.MEAN", "[0.5, 0.5, 0.5]", "DATA.STD", "[0.5, 0.5, 0.5]")
    train_model(load_cfg(None, small_options(image_folder, "a", *half, "OPTIM.MAX_EPOCH", 1)))
    train_model(load_cfg(None, small_options(image_folder, "b", "FINETUNE.WEIGHTS", "a", "OPTIM.MAX_EPOCH", 1)))
    log = (tmp_path / "b" / "train.log").read_text()
    assert "preprocessing of FINETUNE.WEIGHTS a: DATA.MEAN [0.5, 0.5, 0.5]" in log and "mean 0.5 0.5 0.5" in log
    assert find_run("b").cfg.DATA.MEAN == HALF
    evaluate_weights(load_cfg(None, small_options(image_folder, "c", "MODEL.WEIGHTS", "a/best.pth.tar")))
    assert "mean 0.5 0.5 0.5" in (tmp_path / "c" / "test.log").read_text()
    # A config without the mean, for a checkpoint that has it.
    (tmp_path / "c.yaml").write_text(
        "MODEL: {ARCH: resnet8, NUM_CLASSES: 3}\nTRAIN: {IM_SIZE: 16}\nTEST: {IM_SIZE: 18}\n"
    )
    assert find_run("a/best.pth.tar", "c.yaml").cfg.DATA.MEAN == HALF


@pytest.mark.parametrize("first", [(), ("DATA.MEAN", "[0.1, 0.2, 0.3]", "TEST.INTERPOLATION", "bicubic")])
def test_a_run_that_is_resumed_keeps_the_preprocessing_it_was_trained_with(first, image_folder, folder, tmp_path):
    """Also one that was begun before weights brought theirs, whose config has an empty mean or none at all."""
    trained = load_cfg(None, small_options(image_folder, tmp_path / "out", *first))
    train_model(trained)
    words = ("FINETUNE.WEIGHTS", folder / "file.pth")
    resumed = resolve_preprocessing(load_cfg(None, small_options(image_folder, tmp_path / "out", *map(str, words))))
    assert [get_value(resumed, key) for key in FOLLOWING] == [get_value(trained, key) for key in FOLLOWING]
    assert ("TEST.INTERPOLATION bicubic" in str(notes_of(resumed, logging.INFO))) == bool(first)
    for name, auto_resume in (("new", True), ("out", False)):
        own = small_options(image_folder, tmp_path / name, *map(str, words), "TRAIN.AUTO_RESUME", str(auto_resume))
        assert resolve_preprocessing(load_cfg(None, own)).DATA.MEAN == HALF
    (tmp_path / "out/config.yaml").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        resolve_preprocessing(load_cfg(None, small_options(image_folder, tmp_path / "out", *map(str, words))))


@pytest.mark.parametrize("name", ["timm/vit_small_patch14_dinov2"])
def test_a_backbone_without_a_head_has_no_classifier(name, tmp_path):
    draw_folder(tmp_path, "val", {"a": 1, "b": 1})
    run = find_run(name, None, ["TRAIN.DATASET", str(tmp_path)])
    assert not run.has_classifier and run.classes == ("a", "b")
    with pytest.raises(ValueError, match="published without a classifier"):
        run.predict([tmp_path])
