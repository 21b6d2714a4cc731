"""Fine-tuning: file formats, tensors that are loaded or not, frozen parts, and the preprocessing of the weights."""

import argparse
import collections
import copy
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from support.images import draw_folder
from support.processes import on_processes
from support.runs import assert_close, make_cfg, message_of, newest, small_options, train_and_read
from support.tables import each_row
from timm.layers import resample_abs_pos_embed
from timm.models import save_for_hf
from torch import nn

from distribuuuu.checkpoint.io import load_state_dict
from distribuuuu.checkpoint.weights_files import find_weights_file
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.config_node import get_value
from distribuuuu.config.registry import TASKS
from distribuuuu.data.seeding import derive_seed
from distribuuuu.engine.build import build_initial_model
from distribuuuu.engine.precise_bn import compute_precise_statistics
from distribuuuu.engine.preflight import resolve_cfg
from distribuuuu.inference.load_run import find_run
from distribuuuu.models import build_model, check_model
from distribuuuu.models.find_architecture import build_model_spec
from distribuuuu.models.finetune import load_backbone
from distribuuuu.models.freeze import freeze, freeze_backbone
from distribuuuu.models.head import find_head
from distribuuuu.models.preprocessing import FOLLOWING, follow, resolve_preprocessing
from distribuuuu.optim.precision import build_precision
from distribuuuu.tasks.base import build_task
from distribuuuu.tasks.classification import Classification
from distribuuuu.trainer import evaluate_weights, train_model

CLASSES = ("ant", "bee", "cat")
FLAGS = argparse.Namespace(lr=0.1, model="resnet8")


def finetuning(arch="resnet8", num_classes=3, **finetune):
    words = [f"FINETUNE.{name}={value}".split("=", 1) for name, value in finetune.items()]
    words = ["MODEL.ARCH", arch, "MODEL.NUM_CLASSES", str(num_classes), *(part for pair in words for part in pair)]
    return load_cfg(None, words)


def start(cfg, classes=CLASSES) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return build_initial_model(cfg, classes, pretrained=True).state_dict()


def trained(arch="resnet8", num_classes=5, seed=7) -> dict[str, torch.Tensor]:
    """Return weights, statistics too, that no constructor leaves."""
    torch.manual_seed(seed)
    state = build_model(finetuning(arch, num_classes)).state_dict()
    return {name: torch.randn_like(value) if value.is_floating_point() else value + 9 for name, value in state.items()}


def other_than(state, expected) -> list[str]:
    return [name for name in state if name not in expected or not torch.equal(state[name], expected[name])]


def is_new_head(state, name="fc") -> bool:
    """Tell whether a head was drawn with a deviation of 0.01 and without a bias."""
    return 0.005 < state[f"{name}.weight"].std() < 0.015 and not state[f"{name}.bias"].any()


def prefixed(state, prefix):
    return {f"{prefix}{name}": value for name, value in state.items()}


FORMS = {
    "ours.pth.tar": lambda state: {"epoch": 3, "state_dict": state, "classes": list("abcde"), "arch": "resnet8"},
    "original.pth.tar": lambda state: {"epoch": 3, "state_dict": prefixed(state, "module."), "best_acc1": 1.0},
    "timm.pth.tar": lambda state: {"arch": "resnet8", "state_dict": state, "args": FLAGS, "version": 2},
    "torchvision.pth": lambda state: {"model": state, "args": FLAGS, "epoch": 5}, "bare.pth": lambda state: state,
    "pycls.pyth": lambda state: {"model_state": state, "epoch": 3},
    "wrapped.pt": lambda state: prefixed(state, "_orig_mod.module.backbone."),
    "lightning.ckpt": lambda state: {"state_dict": prefixed(state, "model.")},
    "fsdp.pth": lambda state: {name.replace("0.conv", "0._fsdp_wrapped_module.conv"): state[name] for name in state},
    "objects.pth": lambda state: {
        "state_dict": state, "mean": np.array([0.5, 0.2]), "save_dir": Path("runs"), "hub": collections.deque([1.0])
    },
    "detector.pth": lambda state: {**prefixed(state, "visual.trunk."), "neck.fc.weight": state["fc.weight"]},
}  # fmt: skip


@pytest.mark.parametrize("name", [*FORMS, "model.safetensors"])
def test_every_kind_of_file_gives_the_backbone_and_leaves_a_head_of_other_classes_fresh(tmp_path, name):
    published = trained()
    if name == "model.safetensors":
        save_file(published, tmp_path / name)
    else:
        torch.save(FORMS[name](published), tmp_path / name)
    cfg = finetuning(WEIGHTS=tmp_path / name)
    state = start(cfg)
    assert other_than(state, published) == ["fc.weight", "fc.bias"]
    assert is_new_head(state)


@pytest.mark.parametrize(("name", "write"), [("model.safetensors", save_file), ("pytorch_model.bin", torch.save)])
def test_a_folder_of_the_hub_is_read_off_line(tmp_path, name, write):
    write(trained(), tmp_path / name)
    assert find_weights_file(str(tmp_path)) == tmp_path / name
    assert other_than(start(finetuning(WEIGHTS=tmp_path)), trained()) == ["fc.weight", "fc.bias"]


@pytest.mark.parametrize("has_average", [False, True])
def test_the_folder_of_a_run_gives_its_best_weights(tmp_path, has_average):
    raw, averaged = trained(seed=1), trained(seed=2)
    torch.save({"state_dict": raw, "weights": "raw", "epoch": 3}, tmp_path / "best.pth.tar")
    if has_average:
        torch.save({"state_dict": averaged, "weights": "ema", "epoch": 3}, tmp_path / "best_ema.pth.tar")
    (tmp_path / "checkpoints").mkdir()
    chosen = averaged if has_average else raw
    assert other_than(start(finetuning(WEIGHTS=tmp_path)), chosen) == ["fc.weight", "fc.bias"]
    assert other_than(start(finetuning(WEIGHTS=tmp_path / "best.pth.tar")), raw) == ["fc.weight", "fc.bias"]


@pytest.mark.parametrize("raw_key, key", [
    ("state_dict", "ema_state_dict"), ("state_dict", "state_dict_ema"), ("model", "model_ema")
])  # fmt: skip
def test_a_moving_average_is_preferred(tmp_path, raw_key, key, caplog):
    raw, average = trained(seed=1), trained(seed=2)
    counter = {"n_averaged": torch.tensor(5)} if key == "model_ema" else {}  # that of torchvision
    torch.save({raw_key: raw, key: {**prefixed(average, "module."), **counter}}, tmp_path / "a.pth")
    with caplog.at_level(logging.INFO, logger="distribuuuu.models.finetune"):
        assert other_than(start(finetuning(WEIGHTS=tmp_path / "a.pth")), average) == ["fc.weight", "fc.bias"]
    assert " (moving average): " in caplog.text


@pytest.mark.parametrize("classes, words, kept", [
    (["a", "b", "c"], "the head was trained on other classes: 'a' where the data has 'ant'", [0, 1, 2]),
    (["ant", "bee", "cat"], "", [0, 1, 2]),
    (["ant", "bee", "dog"], "the head keeps 2 of 3 classes", [0, 1, -1]),
    (["cat", "ant", "bee"], "the head keeps 3 of 3 classes", [1, 2, 0]),
    (["dog", "bee"], "the head keeps 1 of 3 classes", [-1, 1, -1]),
    (["ant", "bee", "cat", "dog"], "the head keeps 3 of 3 classes", [0, 1, 2]),
    (["ant", "bee", "cat", "dog", "eel"], "", [-1, -1, -1]),  # they are not those of the file's four rows
])  # fmt: skip
def test_a_head_keeps_the_rows_of_shared_classes_unless_it_is_reset(tmp_path, caplog, classes, words, kept):
    published = trained(num_classes=min(4, len(classes)))
    torch.save({"state_dict": published, "classes": classes}, tmp_path / "a.pth")
    with caplog.at_level(logging.INFO, logger="distribuuuu.models.finetune"):
        state = start(finetuning(WEIGHTS=tmp_path / "a.pth"))
    for row, index in enumerate(kept):
        for name in ("fc.weight", "fc.bias"):
            is_same = index >= 0 and torch.equal(state[name][row], published[name][index])
            assert is_same or (index < 0 and state[name][row].abs().max() < 0.1)
    assert words in caplog.text and ("the head " in caplog.text) == bool(words)
    assert is_new_head(start(finetuning(WEIGHTS=tmp_path / "a.pth", HEAD_RESET=True)))


@pytest.mark.parametrize("mode", ["none", "step"])
def test_a_first_loss_far_above_guessing_is_a_warning(finished_run, small_cfg, tmp_path, mode):
    content = torch.load(finished_run / "best.pth.tar")
    content["state_dict"]["fc.weight"] *= -1000  # confident and wrong
    torch.save(content, tmp_path / "a.pth")
    words = ("OPTIM.BASE_LR", 0, "OPTIM.MAX_EPOCH", 1, "TRAIN.PRINT_FREQ", 2, "MODEL.COMPILE", mode)
    train_model(small_cfg("FINETUNE.WEIGHTS", tmp_path / "a.pth", *words))
    logs = [(folder / "train.log").read_text() for folder in (tmp_path / "out", finished_run)]
    assert [log.count("that of guessing is 1.10: check the initial weights of the head") for log in logs] == [1, 0]
    # On a GPU too: reading the loss waits for the device, which the row of the metrics does anyway.
    assert logs[0].index("that of guessing") > logs[0].index("epoch  step") > 0


def test_weights_of_another_model_are_refused(tmp_path):
    torch.save({"state_dict": trained("resnet18"), "arch": "resnet18"}, tmp_path / "a.pth")
    said = message_of(start, finetuning("resnet8", WEIGHTS=tmp_path / "a.pth"))
    assert said.startswith(f"FINETUNE.WEIGHTS (command line): {tmp_path / 'a.pth'} of MODEL.ARCH resnet18 does not fit")


def test_position_embeddings_are_resampled_to_the_size_of_the_image(tmp_path, caplog):
    theirs, ours = 96, 160
    published = timm.create_model("vit_tiny_patch16_224", img_size=theirs, num_classes=5).state_dict()
    torch.save(prefixed(published, "module."), tmp_path / "a.pth")
    words = ["MODEL.ARCH", "timm/vit_tiny_patch16_224", "MODEL.NUM_CLASSES", "3", "TRAIN.IM_SIZE", str(ours)]
    state = start(load_cfg(None, [*words, "FINETUNE.WEIGHTS", str(tmp_path / "a.pth")]))
    assert set(other_than(state, published)) == {"pos_embed", "head.weight", "head.bias"}
    expected = resample_abs_pos_embed(published["pos_embed"], [ours // 16] * 2, [theirs // 16] * 2)
    torch.testing.assert_close(state["pos_embed"], expected)
    assert "of the backbone randomly initialized" not in caplog.text


def test_patterns_freeze_parameters_and_whole_modules_by_their_whole_names():
    model = torchvision.models.resnet18()
    freeze(model, ("conv1", "layer1.*", "layer[23]", "*.bn2.bias"))
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    modules = ("conv1.", "layer1.", "layer2.", "layer3.")
    names = [name for name, _ in model.named_parameters()]
    assert list(frozen) == [name for name in names if name.startswith(modules) or name.endswith(".bn2.bias")]
    model.train()
    modes = {name: module.training for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert modes == {name: not name.startswith(("layer1.", "layer2.", "layer3.")) for name in modes}


@pytest.mark.slow
@each_row(("arch", "head"), [
    ("resnet8", ["fc"]), ("timm/test_vit", ["head"]), ("timm/test_convnext", ["head.fc"]),
    ("torchvision/densenet121", ["classifier"]), ("torchvision/vgg11", ["classifier.6"]),
    ("torchvision/mobilenet_v3_small", ["classifier.3"]), ("torchvision/squeezenet1_1", ["classifier.1"]),
    ("timm/deit_tiny_distilled_patch16_224", ["head", "head_dist"]),
])  # fmt: skip
def test_a_frozen_backbone_leaves_the_head_and_is_never_in_training_mode(arch, head):
    cfg = finetuning(arch, FREEZE="backbone")
    check_model(cfg)
    model = build_model_spec(cfg).build_on_meta()
    freeze_backbone(model, find_head(cfg, model))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == [f"{layer}.{name}" for layer in head for name in ("weight", "bias")]
    modes = {name: layer.training for name, layer in model.train().named_modules()}
    parents = {""} | {layer[:end] for layer in head for end in range(len(layer)) if layer[end] == "."}
    assert {name for name, is_training in modes.items() if is_training} == {*head, *parents}


class Coral(nn.Module):
    """An ordinal head: one weight per feature and a bias for each threshold (CORAL, arXiv 1901.07884)."""

    def __init__(self, backbone, num_classes):
        super().__init__()
        self.weight, self.bias = (
            nn.Linear(backbone.fc.in_features, 1, bias=False),
            nn.Parameter(torch.zeros(num_classes)),
        )
        self.backbone, backbone.fc = backbone, nn.Identity()

    def forward(self, images):
        return self.weight(self.backbone(images)) + self.bias


@TASKS.register("coral")
class CoralTask(Classification):
    def adapt_model(self, model):
        return Coral(model, len(self.classes))


def test_the_head_of_a_task_is_found_for_freezing(small_cfg):
    train_model(cfg := small_cfg("OPTIM.MAX_EPOCH", 1, "TASK.NAME", "coral", "FINETUNE.FREEZE", "backbone"))
    build = build_task(cfg, CLASSES, torch.device("cpu"), build_precision(cfg, torch.device("cpu")))
    torch.manual_seed(derive_seed(3))
    before, after = build.adapt_model(build_model(cfg)).state_dict(), newest(cfg.OUT_DIR)["state_dict"]
    assert sorted(other_than(after, before)) == ["bias", "weight.weight"]


def test_copies_wrappers_and_conversions_keep_what_is_frozen_apart():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    freeze(model, ("0",))
    other = copy.deepcopy(model)
    model[0].training = True  # a copy must not hold on to the original
    nn.ModuleList([other]).train()
    assert (other[0].training, other[1].training, model[0].training) == (False, True, True)
    assert model.state_dict().keys() == other.state_dict().keys()
    assert all(not module.training for module in model.eval())
    statistics = other[0].running_mean.clone(), other[1].running_mean.clone()
    other.train()(torch.randn(8, 3, 4, 4) + 5)
    compute_precise_statistics(other, [torch.randn(8, 3, 4, 4) + 5])
    assert torch.equal(other[0].running_mean, statistics[0])
    assert not torch.equal(other[1].running_mean, statistics[1])


def test_what_is_frozen_stays_bitwise_and_the_weights_are_read_at_the_start_only(finished_run, small_cfg, tmp_path):
    weights = Path(shutil.copy(finished_run / "best.pth.tar", tmp_path))
    cfg = small_cfg("FINETUNE.WEIGHTS", weights, "FINETUNE.FREEZE", "stem,stage1,stage2.0.conv1.weight")
    train_model(cfg, stop_epoch=1)
    weights.write_bytes(b"not read again: a checkpoint in OUT_DIR comes first")
    before, after = torch.load(finished_run / "best.pth.tar")["state_dict"], train_and_read(cfg)["state_dict"]
    frozen = [name for name in after if name.startswith(("stem.", "stage1.")) or name == "stage2.0.conv1.weight"]
    assert [name for name in after if name not in other_than(after, before)] == frozen


@pytest.mark.slow
def test_frozen_parts_on_two_processes_give_the_run_of_one(finished_run, small_cfg, tmp_path):
    words = ("FINETUNE.WEIGHTS", finished_run, "FINETUNE.FREEZE", "backbone", "OPTIM.MAX_EPOCH", 1)
    train_model(small_cfg(*words, "OUT_DIR", tmp_path / "one"))
    on_processes(2, train_model, small_cfg(*words, "TRAIN.BATCH_SIZE", 6, "MODEL.SYNCBN", True))
    one, two = newest(tmp_path / "one"), newest(tmp_path / "out")
    before = torch.load(finished_run / "best.pth.tar")["state_dict"]
    assert set(other_than(two["state_dict"], before)) == {"fc.weight", "fc.bias"}
    assert_close(one, two, 1e-5)


def test_names_are_matched_whatever_wraps_either_model_and_equal_ones_first():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    outer = nn.ModuleDict({"backbone": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))})
    load_backbone(outer, prefixed(inner.state_dict(), "module."), head=[])
    assert torch.equal(outer["backbone"][1].weight, inner[1].weight)
    model = nn.ModuleDict({"backbone": nn.Linear(2, 2)})
    exact = {name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()}
    other = {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()}
    report, _ = load_backbone(model, {**prefixed(other, "module."), **exact, **prefixed(other, "model.")}, head=[])
    assert model["backbone"].bias.tolist() == [2.0, 2.0] and "unused in the file: module." in report


def of_another_program(arch="resnet20") -> dict[str, torch.Tensor]:
    """Return weights with batch statistics of noise, their layers named by another program; the names are in order."""
    torch.manual_seed(3)
    model = build_model(finetuning(arch, 5)).train()
    for _ in range(30):
        model(torch.randn(8, 3, 32, 32))
    names: dict[str, str] = {}
    return {
        f"net.{names.setdefault(layer, str(len(names)))}.{role}": tensor
        for (layer, _, role), tensor in ((name.rpartition("."), value) for name, value in model.state_dict().items())
    }


def exchange_equal_shapes(state):
    groups: dict[tuple, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault((tuple(tensor.shape), name.rpartition(".")[2]), []).append(name)
    exchanged = {name: state[names[index - 1]] for names in groups.values() for index, name in enumerate(names)}
    return {name: exchanged[name] for name in state}


def renamed(state, old, new):
    return {name.replace(old, new): tensor for name, tensor in state.items()}


def test_names_of_another_program_are_matched_by_order_and_the_log_says_so(tmp_path, caplog):
    theirs = of_another_program()
    torch.save(prefixed(theirs, "module."), tmp_path / "a.pth")
    with caplog.at_level(logging.INFO):
        state = start(finetuning("resnet20", WEIGHTS=tmp_path / "a.pth"))
    assert all(torch.equal(*pair) for pair in list(zip(state.values(), theirs.values(), strict=True))[:-2])
    assert "by order and shape (net.0.weight -> stem.0.weight, " in caplog.text
    assert "batch statistics agree" in caplog.text
    old = {name: value for name, value in theirs.items() if "num_batches" not in name and not name.startswith("net.38")}
    torch.save(old, tmp_path / "old.pth")  # without a head too
    state = start(finetuning("resnet20", WEIGHTS=tmp_path / "old.pth"))
    assert torch.equal(state["stage3.2.norm2.running_var"], theirs["net.37.running_var"])
    whole = build_model(finetuning("resnet20", 5))
    load_state_dict(whole, theirs, "a.pth")
    assert all(map(torch.equal, whole.state_dict().values(), theirs.values()))


@pytest.mark.parametrize("alter, reason", [
    (exchange_equal_shapes, "-?0.[012][0-9] between its batch stat"),
    (lambda state: dict(sorted(state.items())), "tensor 2 of the file is net.1.bias"),
    (lambda state: renamed(state, "net.3.", "net.99."), "net.99 precedes net.4.weight"),
    (lambda state: renamed(state, "net.1.weight", "net.0.scale"), "tensor 2 .* expected stem.1.weight"),
    (lambda state: dict(list(state.items())[:-7]), "the file has 109 tensors in 37 layers, the model 114"),
    (lambda state: {**state, "net.2.weight": torch.zeros(16, 16, 5, 5)}, "5, 5.; expected stage1.0.conv1.weight"),
])  # fmt: skip
def test_an_order_that_contradicts_is_refused_with_the_first_difference(tmp_path, alter, reason):
    torch.save(alter(of_another_program()), tmp_path / "a.pth")
    with pytest.raises(ConfigError, match=f"tensors of the backbone do not match, .*{reason}"):
        start(finetuning("resnet20", WEIGHTS=tmp_path / "a.pth"))


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
    *of_model, note = notes_of(cfg, logging.INFO)
    assert of_model == ([f"model of {key} {folder / name}: timm/test_vit"] if name == "hub" else [])
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
    assert notes_of(resolve_preprocessing(make_cfg(*teacher, *own)), logging.WARNING) == []


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
    Path("c.yaml").write_text("MODEL: {ARCH: resnet8, NUM_CLASSES: 3}\nTRAIN: {IM_SIZE: 16}\nTEST: {IM_SIZE: 18}\n")
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
    without = resolve_cfg(load_cfg(None, small_options(image_folder, tmp_path / "out")))
    assert [get_value(without, key) for key in FOLLOWING] == [get_value(trained, key) for key in FOLLOWING]
    for name, auto_resume in (("new", True), ("out", False)):
        own = small_options(image_folder, tmp_path / name, *map(str, words), "TRAIN.AUTO_RESUME", str(auto_resume))
        assert resolve_preprocessing(load_cfg(None, own)).DATA.MEAN == HALF
    (tmp_path / "out/config.yaml").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        resolve_preprocessing(load_cfg(None, small_options(image_folder, tmp_path / "out", *map(str, words))))


def test_a_backbone_without_a_head_has_no_classifier(tmp_path):
    draw_folder(tmp_path, "val", {"a": 1, "b": 1})
    run = find_run("timm/vit_small_patch14_dinov2", None, ["TRAIN.DATASET", str(tmp_path)])
    assert not run.has_classifier and run.classes == ("a", "b")
    with pytest.raises(ValueError, match="published without a classifier"):
        run.predict([tmp_path])
