"""Loading trained models: each kind of run, older files, missing parts, and files that are meant to do harm."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from support.commands import command_module
from support.hostile import Payload
from support.runs import small_options
from support.tables import pairwise, slow

from distribuuuu import evaluate, load_run
from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.commands.arguments import parse_args
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.datasets.shapes import CLASSES
from distribuuuu.data.loader import build_loader
from distribuuuu.engine.preflight import resolve_cfg
from distribuuuu.launch.detect import Launch
from distribuuuu.trainer import train_model

CPU = torch.device("cpu")


def evaluation_images(run) -> torch.Tensor:
    return next(iter(build_loader(run.cfg, Launch("alone"), CPU, train=False)))[0]


def assert_same_model(run, other) -> None:
    images = torch.randn(2, 3, 24, 24)
    assert torch.equal(run.model(images), other.model(images))
    assert (run.classes, run.transform) == (other.classes, other.transform)


def test_a_run_has_its_model_classes_transform_config_and_results(shapes_run):
    run = load_run(shapes_run)
    assert_same_model(run, load_run(shapes_run, device="cpu"))
    assert run.classes == tuple(sorted(CLASSES)) and not run.model.training and run.weights == "raw"
    measured = json.loads((shapes_run / "test_results.json").read_text())
    assert run.results["accuracy"]["raw"]["best"]["top1"] == measured["accuracy"]["raw"]["top1"]
    assert run.cfg.is_frozen() and run.cfg.MODEL.ARCH == "resnet8" and run.cfg.DATA.MEAN == (0.485, 0.456, 0.406)
    images = evaluation_images(run)
    files = [run.task.cfg.TEST.DATASET + f"/val/arrow/{number:04d}.jpg" for number in range(3)]
    assert all(torch.equal(run.transform(file), image) for file, image in zip(files, images, strict=False))


def test_the_best_weights_are_enough_to_use_them_alone(shapes_run, tmp_path):
    alone = tmp_path / "shared.pth.tar"
    shutil.copy(shapes_run / "best.pth.tar", alone)
    run = load_run(alone)
    assert_same_model(run, load_run(shapes_run))
    assert run.results is None and run.source == str(alone)
    content = read_checkpoint(alone)
    assert content["config"]["DATA.MEAN"] == (0.485, 0.456, 0.406) and content["weights"] == "raw"
    sizes = content["config"]["TEST.IM_SIZE"], content["config"]["TRAIN.IM_SIZE"]
    assert (content["arch"], sizes) == ("resnet8", (28, 24))


def test_averaged_weights_are_used_if_the_run_has_some_and_the_file_says_which_it_holds(image_folder, tmp_path):
    train_model(load_cfg(None, small_options(image_folder, tmp_path / "out", "EMA.HALF_LIFE", 20)))
    run = load_run(tmp_path / "out")
    assert run.weights == "ema" and run.source.endswith("best_ema.pth.tar")
    for name, kind in (("best", "raw"), ("best_ema", "ema")):
        shutil.copy(tmp_path / "out" / f"{name}.pth.tar", tmp_path / f"{kind}.pth")
        assert load_run(tmp_path / f"{kind}.pth").weights == kind
    averaged, raw = load_run(tmp_path / "ema.pth"), load_run(tmp_path / "raw.pth")
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(run.model(images), averaged.model(images))
    assert not torch.equal(run.model(images), raw.model(images))
    newest = sorted((tmp_path / "out" / "checkpoints").iterdir())[-1]  # has both; its evaluation takes the raw ones
    assert load_run(newest).weights == "raw"


def test_options_of_another_version_and_kwargs_of_any_kind_come_back(shapes_run, tmp_path, caplog):
    content = read_checkpoint(shapes_run / "best.pth.tar")
    kwargs = {"MODEL.KWARGS.width": 16, "DISTILL.KWARGS.text": "true", "DISTILL.KWARGS.numbers": (1, 2.5)}
    content["config"] |= {**kwargs, "NO.SUCH": 1, "FINETUNE.LR_MULT.layer1.*": 2.0, "RNG_SEED": None}
    torch.save(content, tmp_path / "x.pth")
    cfg = load_run(tmp_path / "x.pth").cfg
    assert cfg.DISTILL.KWARGS == {"text": "true", "numbers": (1, 2.5)} and cfg.FINETUNE.LR_MULT == {"layer1.*": 2.0}
    assert "options of another version are ignored: NO.SUCH" in caplog.text
    content["config"]["TEST.IM_SIZE"] = "large"
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(ConfigError, match=r"TEST.IM_SIZE \(.*x.pth\): got 'large'; expected an integer"):
        load_run(tmp_path / "x.pth")


def test_a_bare_state_dict_needs_a_config_and_its_data(shapes_run, tmp_path):
    state_dict = read_checkpoint(shapes_run / "best.pth.tar")["state_dict"]
    torch.save({f"module.{name}": tensor for name, tensor in state_dict.items()}, tmp_path / "best.pth.tar")
    with pytest.raises(ConfigError, match="RUN: .*best.pth.tar: holds weights, but not the config .* --cfg FILE"):
        load_run(tmp_path / "best.pth.tar")
    config = str(shapes_run / "config.yaml")
    assert_same_model(load_run(tmp_path / "best.pth.tar", config), load_run(shapes_run))
    gone = ("TRAIN.DATASET", str(tmp_path), "TEST.DATASET", str(tmp_path))
    with pytest.raises(ConfigError, match="holds no class names, and the data of its config cannot be read"):
        load_run(tmp_path / "best.pth.tar", config, gone)
    # The 2021 distribuuuu left both files in OUT_DIR.
    shutil.copy(config, tmp_path / "config.yaml")
    assert_same_model(load_run(tmp_path), load_run(shapes_run))
    with pytest.raises(ConfigError, match="MODEL.NUM_CLASSES: 11, but DATA.NAME imagefolder has 10"):
        load_run(tmp_path, overrides=("MODEL.NUM_CLASSES", "11"))


def test_nothing_is_written_to_a_folder_that_a_checkpoint_names(shapes_run, shapes_folder, tmp_path, monkeypatch):
    """A checkpoint without class names is given those of its data; an index of these goes to the user's own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(shapes_folder, tmp_path / "data")
    content = read_checkpoint(shapes_run / "best.pth.tar")
    content["classes"] = None
    content["config"] |= {"TRAIN.DATASET": str(tmp_path / "data"), "TEST.DATASET": str(tmp_path / "data"),
                          "DATA.CACHE_DIR": str(tmp_path / "theirs")}  # fmt: skip
    torch.save(content, tmp_path / "foreign.pth.tar")
    before = sorted(map(str, (tmp_path / "data").rglob("*")))
    assert load_run(tmp_path / "foreign.pth.tar").classes == tuple(sorted(CLASSES))
    assert sorted(map(str, (tmp_path / "data").rglob("*"))) == before and not (tmp_path / "theirs").exists()
    run, probe = load_run(tmp_path / "foreign.pth.tar"), command_module("probe.feature_probe")
    assert len(probe.open_labeled_images(run, False)) and len(probe.open_labeled_images(run, True))
    assert sorted(map(str, (tmp_path / "data").rglob("*"))) == before and not (tmp_path / "theirs").exists()
    content["config"] |= {"DATA.NAME": "cifar10", "TEST.DATASET": str(tmp_path / "data")}
    torch.save(content, tmp_path / "foreign.pth.tar")
    with pytest.raises(ConfigError, match="holds no class names, and the data of its config cannot be read"):
        load_run(tmp_path / "foreign.pth.tar")
    assert sorted(map(str, (tmp_path / "data").rglob("*"))) == before, "neither a download nor its lock"


@pytest.fixture
def timm_folder(tmp_path) -> Path:
    """A folder as timm saves it for the Hugging Face Hub."""
    model = timm.create_model("resnet18", num_classes=3, pretrained_cfg_overlay={
        "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "input_size": (3, 64, 64), "crop_pct": 0.8,
        "test_input_size": (3, 96, 96), "test_crop_pct": 0.75, "interpolation": "bicubic"})  # fmt: skip
    labels = {"label_names": ["x", "y", "z"]}
    timm.models.save_for_hf(model, str(tmp_path / "hub"), model_config=labels, safe_serialization=True)
    return tmp_path / "hub"


@pytest.mark.parametrize("named", ["folder", slow("file")])
def test_a_folder_of_timm_is_a_run(timm_folder, named):
    run = load_run(timm_folder if named == "folder" else timm_folder / "model.safetensors")
    other = timm.create_model(f"local-dir:{timm_folder}", pretrained=True).eval()
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(run.model(images), other(images)) and run.classes == ("x", "y", "z")
    crop = run.transform.crop
    assert (crop.resize_to, crop.size, crop.interpolation) == (128, 96, "bicubic")
    assert (run.cfg.TRAIN.IM_SIZE, run.cfg.MODEL.LICENSE) == (64, "apache-2.0")
    assert (run.transform.mean, run.transform.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def nested(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth):
        value = {"a": [value]}
    return value


@pytest.mark.slow
def test_an_exported_folder_is_evaluated_and_initializes_a_model_as_a_run_does(shapes_run, tmp_path):
    content, folder = read_checkpoint(shapes_run / "best.pth.tar"), tmp_path / "export"
    folder.mkdir()
    save_file(content["state_dict"], folder / "model.safetensors")
    entries = {name: content[name] for name in ("classes", "config", "weights")}
    (folder / "config.json").write_text(json.dumps({"distribuuuu": entries}))
    expected, data = evaluate(shapes_run), content["config"]["TRAIN.DATASET"]
    words = ["TRAIN.DATASET", data, "MODEL.NUM_CLASSES", "0", "OUT_DIR", str(tmp_path / "o")]
    assert evaluate(folder) == expected and (folder / "predictions.npz").exists()
    for weights in (folder, folder / "model.safetensors"):
        cfg, _ = parse_args(None, [str(weights)], train=False)
        assert (cfg.MODEL.ARCH, cfg.OUT_DIR) == ("resnet8", str(folder))
        cfg = resolve_cfg(load_cfg(None, ["MODEL.WEIGHTS", str(weights), *words]))
        assert (cfg.MODEL.ARCH, cfg.TEST.IM_SIZE) == ("resnet8", 28)
    assert evaluate(load_cfg(None, ["MODEL.WEIGHTS", str(folder), *words]))["top1"] == expected["top1"]
    assert parse_args(None, ["MODEL.WEIGHTS", str(folder), *words], train=True)[0].MODEL.WEIGHTS == str(folder)
    (folder / "config.json").write_text(json.dumps({"distribuuuu": {**entries, "classes": entries["classes"][::-1]}}))
    with pytest.raises(ConfigError, match="was trained on other classes"):
        evaluate(folder)
    (tmp_path / "c.yaml").write_text("MODEL: {ARCH: resnet14}")
    for run, file, said in [
        (folder, "nosuch", "--cfg nosuch: no such file"), ("timm/test_vit", "nosuch", "--cfg nosuch: no such file"),
        ("timm/test_vit", tmp_path / "c.yaml", "--cfg: timm/test_vit brings its own config"),
        (folder, tmp_path / "c.yaml", "does not fit the model"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            load_run(run, file)


def test_hostile_values_in_the_config_of_an_export_are_named(timm_folder):
    path = timm_folder / "config.json"
    whole = json.loads(path.read_text())
    options = {"MODEL.ARCH": "timm/resnet18", "MODEL.NUM_CLASSES": 3, "DATA.MEAN": [0.5] * 3, "DATA.STD": [0.5] * 3}
    own = {"classes": ["x", "y", "z"], "weights": "raw", "config": options}
    cases = [
        *({key: value} for key, value in (
            ("model_args", "abc"), ("architecture", {}), ("num_classes", "many"), ("pretrained_cfg", "x"),
            ("label_names", [1, 2, 3]), ("distribuuuu", "x"), ("model_args", nested(100)),
            ("model_args", {"pretrained_cfg": {"file": "x.pth"}}), ("model_args", {"block": {"url": "x"}}),
            ("model_args", {"no_such": 1}))),
        *({"pretrained_cfg": {**whole["pretrained_cfg"], key: value}} for key, value in (
            ("mean", ["a", "b", "c"]), ("input_size", [3, 10**9, 10**9]), ("input_size", [3, 64]), ("crop_pct", 0),
            ("crop_pct", 1e-30))),
        *({"distribuuuu": {**own, key: value}} for key, value in (("config", [1]), ("classes", [1, 2, 3]))),
        *({"distribuuuu": {**own, "config": {**options, key: value}}} for key, value in (
            ("MODEL.ARCH", 3), ("MODEL.NUM_CLASSES", "many"), ("MODEL.KWARGS.pretrained_cfg", {"file": "x"}),
            ("OPTIM.STEPS", {"a": 1}), ("DATA.NAME", "x"), ("MODEL.KWARGS.deep", nested(10)),
            ("DISTILL.KWARGS.cache_dir", "/tmp"))),
    ]  # fmt: skip
    texts = [json.dumps({**whole, **case}) for case in cases]
    for text in (*texts, "[" * 10**5, '{"a": 1', "\udcff", "[]", ""):
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ConfigError, match=r"config\.json|safetensors|MODEL.KWARGS") as caught:
            load_run(timm_folder)
        assert len(str(caught.value)) < 800, text


def test_what_is_no_run_is_refused_with_a_clear_message(shapes_run, image_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pth").write_text("hello")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("[1]")
    shutil.copytree(shapes_run / "checkpoints", tmp_path / "young" / "checkpoints")
    for run, message in (
        (shapes_run.with_name("ouut"), "no such file or folder: .*; did you mean out"),
        (tmp_path / "empty", "holds no best.pth.tar, but nothing; expected the OUT_DIR"),
        (image_folder, "holds no best.pth.tar"),
        (tmp_path / "text.pth", "text.pth: not a valid checkpoint"),
        (tmp_path / "broken", "broken holds config.json but no model.safetensors"),
        (tmp_path / "young", "holds no best.pth.tar, .*; fix: name a checkpoint, e.g. .*ckpt_ep_003.pth.tar"),
    ):
        with pytest.raises(ConfigError, match=f"^RUN: .*{message}") as error:
            load_run(run)
        assert error.value.status == 2


@pytest.mark.parametrize(
    "name, save",
    pairwise(("x.pth", "best.pth.tar", "model.safetensors", "x.safetensors"), ("torch", "pickle", "inside")),
)
def test_a_pickle_that_does_harm_is_not_executed(shapes_run, tmp_path, save, name):
    content = read_checkpoint(shapes_run / "best.pth.tar")
    payload = Payload(tmp_path / "done")
    content = {**content, "classes": payload} if save == "inside" else payload
    if save == "pickle":
        (tmp_path / name).write_bytes(pickle.dumps(content))
    else:
        torch.save(content, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    for run in (tmp_path / name, tmp_path):
        with pytest.raises(ConfigError):
            load_run(run)
    assert not (tmp_path / "done").exists()


def test_published_weights_of_timm_bring_their_preprocessing_and_class_names(monkeypatch):
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **options: create(name, **options))
    run = load_run("timm/resnet10t")
    assert run.weights == "published" and len(run.classes) == 1000 and run.classes[0] == "tench, Tinca tinca"
    published = timm.get_pretrained_cfg("resnet10t")
    crop = run.transform.crop
    size = published.test_input_size[-1]
    assert crop.size == size and crop.resize_to == int(size / published.test_crop_pct)
    with pytest.raises(ConfigError, match="RUN: .*unknown model 'timm/resnet10x' of timm/NAME; did you mean"):
        load_run("timm/resnet10x")
