"""Models by name: the tables, the arguments, the published weights; and the architectures of this package."""

import logging
import math
import os
import pickle
import traceback
import urllib.error

import pytest
import timm
import torch
import torchvision
from support.downloads import serve
from support.hostile import Payload
from support.runs import problems_of
from support.tables import slow
from timm.data import ImageNetInfo
from torch import nn

from distribuuuu.config import ConfigError, get_cfg, load_cfg
from distribuuuu.config.registry import MODELS
from distribuuuu.engine.build import build_initial_model
from distribuuuu.inference.load_run import find_run
from distribuuuu.models import build_model, check_model
from distribuuuu.models.cifar_resnet import CifarBlock, CifarResNet
from distribuuuu.models.find_architecture import build_model_spec, find_architecture
from distribuuuu.models.head import initialize
from distribuuuu.models.pretrained import check_published_head
from distribuuuu.trainer import evaluate_weights


def make_cfg(arch, num_classes=1000, im_size=224, pretrained=False, **kwargs):
    cfg = get_cfg()
    cfg.MODEL.ARCH, cfg.MODEL.NUM_CLASSES, cfg.MODEL.PRETRAINED = arch, num_classes, pretrained
    cfg.TRAIN.IM_SIZE = im_size
    for name, value in kwargs.items():
        cfg.MODEL.KWARGS[name] = value
    return cfg


def start(cfg):
    return build_initial_model(cfg, (), pretrained=True)


def build_on_meta(arch, **options):
    with torch.device("meta"):
        return build_model(make_cfg(arch, **options))


def shapes(model):
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def test_tables_are_asked_in_order_and_a_prefix_forces_one():
    assert find_architecture("resnet50").source == "distribuuuu"  # in all three
    assert find_architecture("convnext_tiny").source == "timm"  # in timm and torchvision
    assert find_architecture("vit_b_16").source == "torchvision"
    assert find_architecture("resnet18.a1_in1k").source == "timm"  # a name with a tag of its weights
    check_model(make_cfg("torchvision/regnet_y_400mf"))  # its constructor cannot run on the meta device
    assert type(build_on_meta("timm/resnet18")).__module__ == "timm.models.resnet"
    assert type(build_on_meta("torchvision/convnext_tiny")).__module__ == "torchvision.models.convnext"


def test_patterns_of_fine_tuning_are_checked_before_anything_is_built_and_all_at_once():
    words = ["FINETUNE.FREEZE", "layr1,conv1", "FINETUNE.LR_MULT.layer4.*", "2", "FINETUNE.LR_MULT.head", "9"]
    problems = problems_of(check_model, load_cfg(None, [*words, "OPTIM.NO_WEIGHT_DECAY", "*norm*"]))
    keys = [f"{key} (command line)" for key in ("FINETUNE.FREEZE", "FINETUNE.LR_MULT.head", "OPTIM.NO_WEIGHT_DECAY")]
    assert [problem.partition(": ")[0] for problem in problems] == keys and "did you mean layer1" in problems[0]
    words = ["MODEL.ARCH", "resnet8", "FINETUNE.WEIGHTS", "pretrained"]
    (problem,) = problems_of(check_model, load_cfg(None, words))
    assert problem.startswith("FINETUNE.WEIGHTS (command line): resnet8 has no published weights")


def test_unknown_keywords_are_reported_at_once_with_the_near_ones():
    problems = problems_of(check_model, make_cfg("resnet20", widht=8, nrom="group"))
    assert [problem.partition(":")[0] for problem in problems] == ["MODEL.KWARGS.widht", "MODEL.KWARGS.nrom"]
    for arch, word, near in [
        ("resnet18", "width_per_grup", "width_per_group"), ("efficientnet_b0", "drop_rat", "drop_rate"),
    ]:  # fmt: skip
        (problem,) = problems_of(check_model, make_cfg(arch, **{word: 1}))
        assert problem.startswith(f"MODEL.KWARGS.{word}: ") and f"did you mean {near}" in problem
    cfg = make_cfg("resnet18")
    cfg.MODEL.KWARGS["num_classes"] = 3
    assert "MODEL.NUM_CLASSES" in problems_of(check_model, cfg)[0]


def test_a_parameter_without_a_default_can_be_set(monkeypatch):
    monkeypatch.setitem(MODELS._table, "own", lambda num_classes, width: nn.Linear(width, num_classes))
    assert build_model_spec(make_cfg("own", 3, width=5)).build().in_features == 5
    with pytest.raises(ConfigError, match="own has no default for width; fix: set MODEL.KWARGS.width"):
        build_model_spec(make_cfg("own", 3))


def test_refused_value_names_its_key():
    for options, key, why in [
        ({"arch": "resnet20", "norm": "foo"}, "MODEL.KWARGS.norm", "batch, group"),
        ({"arch": "resnet20", "width": 0}, "MODEL.KWARGS.width", "1 or more"),
        ({"arch": "resnet18", "norm_layer": "batch"}, "MODEL.KWARGS.norm_layer", "not callable"),  # TypeError
        ({"arch": "efficientnet_b0", "global_pool": "foo"}, "MODEL.KWARGS.global_pool", "foo"),  # an assert in timm
        ({"arch": "regnetx_160", "no_such": 1}, "MODEL.KWARGS.no_such", "unexpected keyword"),  # takes **kwargs
        ({"arch": "torchvision/vit_b_16", "im_size": 100}, "TRAIN.IM_SIZE", "patch size"),
    ]:  # fmt: skip
        (problem,) = problems_of(check_model, make_cfg(**options))
        assert problem.startswith(f"{key}: ") and why in problem


@pytest.mark.slow
def test_image_size_reaches_the_constructors_that_take_one():
    assert shapes(build_on_meta("vit_tiny_patch16_224", im_size=64))["pos_embed"] == (1, 17, 192)
    assert shapes(build_on_meta("vit_b_16", im_size=64))["encoder.pos_embedding"] == (1, 17, 768)
    cfg = make_cfg("vit_tiny_patch16_224", im_size=64)
    cfg.MODEL.KWARGS.img_size = 32
    with torch.device("meta"):
        assert shapes(build_model(cfg))["pos_embed"] == (1, 5, 192)


@pytest.mark.parametrize(("arch", "head"), [("resnet18", "fc"), ("mobilenetv3_small_050", "classifier")])
@pytest.mark.parametrize("words", [["MODEL.PRETRAINED", "True"], ["FINETUNE.WEIGHTS", "pretrained"]])
def test_published_weights_load_but_a_head_of_other_classes_or_a_reset_one(monkeypatch, caplog, arch, head, words):
    published = (torchvision.models.get_model if arch == "resnet18" else timm.create_model)(arch).state_dict()
    published[f"{head}.bias"].fill_(0.5)
    serve(monkeypatch, published)
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", lambda *args, **options: dict(published))
    reset = [["1000", "FINETUNE.HEAD_RESET", "True"]] if "FINETUNE.WEIGHTS" in words else []
    words = ["MODEL.ARCH", arch, *words, "MODEL.NUM_CLASSES"]
    for own in (["3"], *reset):
        with caplog.at_level(logging.INFO, logger="distribuuuu.models.finetune"):
            state = start(load_cfg(None, [*words, *own])).state_dict()
        fresh = [name for name in state if not torch.equal(state[name], published[name])]
        assert fresh == [f"{head}.weight", f"{head}.bias"], "timm's deviation is 0.3"
        assert state[fresh[0]].std() < 0.015 and not state[fresh[1]].any() and len(state[fresh[1]]) == int(own[0])
        assert f"randomly initialized: {head}.weight, {head}.bias; " in caplog.text
    whole = start(load_cfg(None, [*words, "1000"])).state_dict()
    assert all(torch.equal(whole[name], published[name]) for name in published)


@pytest.mark.slow
def test_a_published_head_is_used_only_for_its_own_classes(small_cfg, monkeypatch):
    synsets, words = (getattr(ImageNetInfo(), name)() for name in ("label_names", "label_descriptions"))
    accepted = (
        synsets, [f"class_{number}" for number in range(1000)], [f"{number:04}" for number in range(1000)],
        [name.partition(",")[0].replace(" ", "_") for name in words],
    )  # fmt: skip
    for arch in ("resnet18", "timm/mobilenetv3_small_050"):
        for classes in accepted:
            check_published_head(arch, classes)
        for classes, said in [
            (["ant", "bee"], "has 1,000 classes, the data has 2"),
            (synsets[1:] + synsets[:1], "other classes, e.g. 'tench, Tinca tinca' where the data has 'n01443537'"),
            ([f"mine {number}a" for number in range(1000)], "has other classes"),
        ]:
            with pytest.raises(ConfigError, match=f"^the head of the published weights of {arch} .*{said}"):
                check_published_head(arch, classes)
    serve(monkeypatch, AssertionError("nothing is downloaded"))
    with pytest.raises(ConfigError, match=r"^MODEL.PRETRAINED .*: .* has 1,000 classes, the data has 3; fix: fine"):
        evaluate_weights(small_cfg("MODEL.ARCH", "resnet18", "MODEL.PRETRAINED", True))
    with pytest.raises(ConfigError, match="names 1,000 classes"):
        find_run("timm/test_vit", None, ["MODEL.NUM_CLASSES", "3", "DATA.NAME", "dummy"])


@pytest.mark.parametrize("error", [urllib.error.URLError("no route"), RuntimeError('invalid hash value (got "00")')])
def test_failed_download_names_the_file_and_the_remedy(monkeypatch, error):
    serve(monkeypatch, error)
    (problem,) = problems_of(start, make_cfg("resnet18", pretrained=True))
    assert problem.startswith("MODEL.PRETRAINED: cannot load https://") and "resnet18-" in problem
    assert "MODEL.WEIGHTS" in problem


@pytest.mark.slow
def test_downloaded_weights_of_torchvision_are_read_as_plain_data(monkeypatch, tmp_path):
    """torchvision asks torch to unpickle anything, and does not check the hash of a file that it has downloaded."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    cached = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    cached.parent.mkdir(parents=True)
    torch.save(Payload(tmp_path / "done"), cached)
    with pytest.raises(ConfigError) as caught:
        start(make_cfg("resnet18", pretrained=True))
    assert not (tmp_path / "done").exists() and os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    assert f"{os.mkdir.__module__}.mkdir, which is not plain data" in str(caught.value)
    whole = "".join(traceback.format_exception(caught.value))
    assert "weights_only" not in whole and "safe_globals" not in whole
    torch.save(torchvision.models.resnet18().state_dict(), cached)
    start(make_cfg("resnet18", pretrained=True))


@pytest.mark.parametrize("arch", ["resnet18", "timm/regnety_002", "timm/test_vit"])
def test_initial_weights_by_fan_out_are_those_of_pycls(arch):
    words = ["MODEL.ARCH", arch, "MODEL.NUM_CLASSES", "9", "RNG_SEED", "0"]
    torch.manual_seed(0)
    model = build_model(load_cfg(None, [*words, "MODEL.INIT", "fan_out"]))
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Conv2d):  # pycls: fan-out = kernel area x output channels, whatever the groups
            std, num = math.sqrt(2 / (math.prod(layer.kernel_size) * layer.out_channels)), layer.weight.numel()
            assert layer.weight.detach().std().item() == pytest.approx(std, rel=4 / math.sqrt(num)), name
            bound = 1 / math.sqrt(layer.weight[0].numel())
            assert layer.bias is None or 0 < layer.bias.abs().max() <= bound, name
        elif isinstance(layer, torch.nn.Linear):
            num = layer.weight.numel()
            assert layer.weight.detach().std().item() == pytest.approx(0.01, rel=4 / math.sqrt(num)), name
            assert not layer.bias.any(), name
        elif isinstance(layer, torch.nn.BatchNorm2d):
            assert (layer.weight == 1).all() and not layer.bias.any(), name
            nn.init.constant_(layer.weight, 0.5)
            initialize(layer, keep_norms=True)
            assert (layer.weight == 0.5).all()


@pytest.mark.parametrize("name", ["pretrained_cfg", "pretrained_cfg_overlay"])
def test_weights_that_timm_is_told_to_read_are_plain_data(tmp_path, name):
    """Below the check of the keywords, which refuses these names."""
    torch.save({"state_dict": Payload(tmp_path / "done")}, tmp_path / "x.pth")
    spec = build_model_spec(make_cfg("timm/test_efficientnet", 3))
    with pytest.raises((RuntimeError, pickle.UnpicklingError)):  # the type depends on the version of timm
        spec.build(pretrained=True, **{name: {"file": str(tmp_path / "x.pth"), "architecture": "test_efficientnet"}})
    assert not (tmp_path / "done").exists()


def test_group_norm_leaves_no_batch_statistics():
    torch.manual_seed(0)
    images = torch.randn(4, 3, 32, 32)
    grouped, batched = (CifarResNet(8, norm=norm).train() for norm in ("group", "batch"))
    assert torch.allclose(grouped(images)[:1], grouped(images[:1]), atol=1e-5)
    assert not torch.allclose(batched(images)[:1], batched(images[:1]), atol=1e-2)
    assert not list(grouped.buffers())
    norms = [module for module in grouped.modules() if isinstance(module, nn.GroupNorm)]
    assert {norm.num_channels // norm.num_groups for norm in norms} == {8}


def test_shortcut_has_no_parameters_and_keeps_the_pixels():
    block = CifarResNet(8).stage2[0]
    x = torch.randn(1, 16, 7, 7)
    short = block.shortcut(x)
    assert short.shape == block(x).shape == (1, 32, 4, 4)
    assert torch.equal(short[:, 8:24], x[:, :, ::2, ::2]) and short[:, :8].abs().sum() == 0
    assert CifarResNet(8).stage1[0].shortcut(x) is x
    narrow = CifarBlock(16, 16, stride=2, norm=nn.BatchNorm2d)
    assert torch.equal(narrow.shortcut(x), x[:, :, ::2, ::2]) and narrow(x).shape == (1, 16, 4, 4)


@pytest.mark.parametrize("name", ["deit_tiny", slow("deit_small"), slow("deit3_small")])
def test_with_the_same_weights_the_outputs_are_those_of_timm(name):
    words = ["MODEL.ARCH", name, "MODEL.NUM_CLASSES", "5", "TRAIN.IM_SIZE", "32", "MODEL.KWARGS.drop_path_rate", "0"]
    mine = build_model(load_cfg(None, words)).eval()
    theirs = timm.create_model(f"{name}_patch16_224", num_classes=5, img_size=32).eval()
    theirs.load_state_dict(mine.state_dict())
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(mine(images), theirs(images))
