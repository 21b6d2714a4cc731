"""FINETUNE.LORA: what is trained, saved and resumed; merged weights; errors."""

import math

import pytest
import torch
from support.runs import make_cfg, newest, small_options
from support.tables import each_row

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.checkpoint.weights_files import merge_adapters
from distribuuuu.config import ConfigError
from distribuuuu.models import build_model, check_model
from distribuuuu.models.lora import add_adapters
from distribuuuu.testing import assert_resumes, assert_same_on_processes, list_rows
from distribuuuu.trainer import evaluate_weights, train_model

VIT = ("MODEL.ARCH", "timm/test_vit", "TRAIN.IM_SIZE", 32, "TEST.IM_SIZE", 32, "OPTIM.NAME", "adamw", "OPTIM.BASE_LR",
       0.01, "OPTIM.LR_UPDATE", "step", "FINETUNE.LORA.rank", 4)  # fmt: skip


@pytest.fixture
def lora_cfg(image_folder, tmp_path):
    """Return the config of a run with adapters from random weights in a file, with a moving average."""
    torch.manual_seed(7)
    model = build_model(make_cfg("MODEL.ARCH", "timm/test_vit", "MODEL.NUM_CLASSES", 3, "TRAIN.IM_SIZE", 32))
    torch.save(model.state_dict(), tmp_path / "backbone.pth")
    words = (*VIT, "FINETUNE.WEIGHTS", tmp_path / "backbone.pth", "EMA.HALF_LIFE", 40)
    return lambda *more: make_cfg(*small_options(image_folder, tmp_path / "out", *words, *more))


def test_adapters_and_head_are_trained_and_the_best_weights_are_merged(lora_cfg, tmp_path, image_folder):
    cfg, out = lora_cfg(), tmp_path / "out"
    train_model(cfg)
    first, last = read_checkpoint(tmp_path / "backbone.pth")["state_dict"], newest(out)["state_dict"]
    adapters = {name for name in last if "lora_" in name}
    assert last.keys() == adapters | {"head.weight", "head.bias"} and len(adapters) == 3 * 4 * 6
    assert newest(out)["ema_state_dict"].keys() == last.keys()
    assert {name for names in newest(out)["optimizer_names"] for name in names} == {
        name for name in last if "lora_scale" not in name}  # fmt: skip
    best = read_checkpoint(out / "best.pth.tar")["state_dict"]
    assert best.keys() == first.keys() and not torch.equal(best["blocks.0.attn.qkv.weight"],
                                                           first["blocks.0.attn.qkv.weight"])  # fmt: skip
    # The evaluation of the training is that of the merged weights, of the average, and of a checkpoint.
    for name, kind in (("best.pth.tar", "eval"), ("best_ema.pth.tar", "eval_ema")):
        epoch = read_checkpoint(out / name)["epoch"] + 1
        (trained,) = (row for row in list_rows(out) if (row["kind"], row["epoch"]) == (kind, epoch))
        found = evaluate_weights(make_cfg(*small_options(image_folder, out, *VIT, "MODEL.WEIGHTS", out / name)))
        assert found["loss"] == pytest.approx(trained["loss"], rel=1e-5)
    images, model = torch.randn(2, 3, 32, 32), build_model(cfg)
    model.load_state_dict(first)
    add_adapters(cfg, model)
    model.load_state_dict(newest(out)["state_dict"], strict=False)
    plain = build_model(cfg)
    plain.load_state_dict(merge_adapters(model.state_dict()))
    with_adapters = model.eval()(images)
    assert with_adapters.requires_grad, "beside the layer"
    torch.testing.assert_close(plain.eval()(images), with_adapters, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model(images), plain(images))


@pytest.mark.slow
def test_a_run_with_adapters_resumes_bitwise(lora_cfg):
    content = assert_resumes(lora_cfg("CHECKPOINT.EVERY_STEPS", 2, "OPTIM.MAX_EPOCH", 1), steps=(3,))
    assert content["state_dict"]["blocks.0.attn.qkv.lora_up"].abs().max() > 0


@pytest.mark.slow
def test_a_resume_refuses_other_weights(lora_cfg, tmp_path):
    train_model(lora_cfg(), stop_epoch=1)
    tensors = torch.load(tmp_path / "backbone.pth")
    torch.save({**tensors, "norm.weight": tensors["norm.weight"] + 1}, tmp_path / "backbone.pth")
    with pytest.raises(ConfigError, match="leaves out tensors, .*; fix: restore the task, and the file of FINETUNE.W"):
        train_model(lora_cfg())


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "zero1"])
def test_two_processes_train_the_same_adapters(lora_cfg, shard):
    words = ("TRAIN.GLOBAL_BATCH_SIZE", 12, "DIST.SHARD", shard, "OPTIM.MAX_EPOCH", 1, "OPTIM.NAME", "sgd")
    assert_same_on_processes(lora_cfg(*words), 2)


@pytest.mark.slow
@each_row("words, message", [
    (("FINETUNE.LORA.targets", "[qkvx]"),
     r"FINETUNE.LORA.targets .*: 'qkvx' matches no linear layer.*; the model has blocks.0.attn.qkv, "),
    (("FINETUNE.LORA.targets", "[head]"), r"'head' matches no linear layer"),
    (("FINETUNE.LORA.rank", 512), r"FINETUNE.LORA.rank .*: got 512; expected at most 64, the width of blocks.0"),
    (("MODEL.ARCH", "resnet8"), r"FINETUNE.LORA.targets.*: '\*' matches no linear layer; it has none"),
    (("FINETUNE.WEIGHTS", ""), "FINETUNE.LORA.*expected none without trained weights"),
    (("FINETUNE.LORA.rank", 0), "FINETUNE.LORA.rank.*expected 1 or more"),
    (("FINETUNE.LORA.ranks", 8), "FINETUNE.LORA.ranks.*no such setting; did you mean rank"),
    (("FINETUNE.FREEZE", "backbone"), "FINETUNE.FREEZE.*would freeze the adapters"),
    (("DIST.SHARD", "fsdp"), "FINETUNE.LORA.*cannot be merged"),
])  # fmt: skip
def test_values_that_contradict_the_model_or_each_other(words, message):
    with pytest.raises(ConfigError, match=message):
        check_model(make_cfg(*VIT, "MODEL.NUM_CLASSES", 3, "FINETUNE.WEIGHTS", "x.pth", *words))


def test_rank_and_alpha_scale_the_update(lora_cfg):
    cfg = lora_cfg("FINETUNE.LORA.alpha", 8, "FINETUNE.LORA.targets", "['*.attn.*']")
    model = build_model(cfg)
    add_adapters(cfg, model)
    layers = {name for name, layer in model.named_modules() if hasattr(layer, "lora_up")}
    assert layers == {f"blocks.{i}.attn.{name}" for i in range(6) for name in ("qkv", "proj")}
    layer = model.blocks[0].attn.qkv
    assert layer.lora_scale == 2 and not layer.lora_up.any()
    assert layer.lora_down.abs().max() <= 1 / math.sqrt(64)
