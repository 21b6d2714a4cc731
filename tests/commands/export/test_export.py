"""Exported folders: equal outputs when they are read back, the check, and errors that leave nothing behind."""

import json
import math
import shutil
import signal
import subprocess
import sys

import pytest
import timm
import torch
from support.images import draw_folder
from support.processes import wait_for
from support.runs import ROOT, small_options
from support.saved_runs import save_run
from support.tables import slow

from distribuuuu import load_run
from distribuuuu.commands.export.exporter import export_run
from distribuuuu.commands.main import dispatch
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.loader import build_loader
from distribuuuu.launch.detect import Launch

CPU = torch.device("cpu")
# Neither ImageNet's nor timm's defaults.
OTHER = ("DATA.MEAN", "[0.4, 0.5, 0.3]", "DATA.STD", "[0.2, 0.3, 0.25]", "TRAIN.IM_SIZE", "32", "TEST.IM_SIZE", "37")


def logits_of(model, cfg) -> torch.Tensor:
    """Return the logits of the whole evaluation set, read by the evaluation loader."""
    with torch.inference_mode():
        return torch.cat([model(images) for images, *_ in build_loader(cfg, Launch("alone"), CPU, train=False)])


def left_beside(tmp_path) -> list[str]:
    """Return what an export has left in tmp_path besides the run."""
    return sorted(entry.name for entry in tmp_path.iterdir() if entry.name != "out")


def command(*args) -> int:
    return dispatch("distribuuuu", ["export", *map(str, args)])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["resnet18", "vit_tiny_patch16_224", "convnext_atto"])
def test_a_timm_folder_gives_equal_logits_and_our_preprocessing(small_cfg, tmp_path, arch):
    kwargs = ["MODEL.KWARGS.drop_path_rate", "0.1"] if arch == "convnext_atto" else []
    cfg = small_cfg("MODEL.ARCH", arch, "TEST.INTERPOLATION", "bicubic", *OTHER, *kwargs)
    run = load_run(save_run(cfg), device="cpu")
    record = export_run(run, "timm", tmp_path / "exported")
    assert record["verified"] and record["images"] == 37 and record["max_probability_difference"] < 1e-5
    model = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True).eval()
    assert torch.equal(logits_of(model, cfg), logits_of(run.model, cfg))
    found = model.pretrained_cfg
    assert list(found["label_names"]) == ["ant", "bee", "cat"] and found["num_classes"] == 3
    assert tuple(found["mean"]) == (0.4, 0.5, 0.3) and tuple(found["std"]) == (0.2, 0.3, 0.25)
    assert tuple(found["input_size"]) == (3, 32, 32) and found["interpolation"] == "bicubic"
    assert math.floor(32 / found["crop_pct"]) == 37


@pytest.mark.parametrize("to, options, reason", [
    ("timm", ("MODEL.ARCH", "resnet8"), "timm has no model resnet8"),
    slow("timm", ("MODEL.ARCH", "torchvision/efficientnet_b0"), "is another model: "),
    slow("timm", ("MODEL.ARCH", "resnet18"), "computes other outputs"),
    *((to, ("MODEL.ARCH", "resnet8", "TEST.INTERPOLATION", "opencv_area"),
       "cannot express TEST.INTERPOLATION opencv_area") for to in ("timm", "onnx")),
    ("timm", ("MODEL.ARCH", "resnet8", "TEST.CROP", "letterbox"), "cannot express the crop"),
    ("timm", ("MODEL.ARCH", "resnet8", "TEST.SHIFT", 1), "cannot express TEST.SHIFT 1"),
])  # fmt: skip
def test_what_a_format_cannot_express_is_refused(small_cfg, tmp_path, to, options, reason):
    run = load_run(save_run(small_cfg(*options)), device="cpu")
    if "other outputs" in reason:
        run.model.maxpool = torch.nn.AvgPool2d(3, 2, 1)
    with pytest.raises(ConfigError, match="fix: .*safetensors") as caught:
        export_run(run, to, tmp_path / "exported")
    assert reason in str(caught.value) and left_beside(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["botnet50", "resnet8"])
def test_a_safetensors_folder_is_a_run(small_cfg, tmp_path, image_folder, arch, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "own.py").write_text("")
    cfg = small_cfg("MODEL.ARCH", arch, "TEST.FLIP", "True", *OTHER, "PLUGINS", tmp_path / "own.py")
    run = load_run(save_run(cfg), device="cpu")
    record = export_run(run, "safetensors", tmp_path / "exported", check_images=8)
    assert record["verified"] and record["max_probability_difference"] < 1e-6
    read = load_run(tmp_path / "exported", device="cpu")
    assert torch.equal(logits_of(read.model, cfg), logits_of(run.model, cfg))
    assert (read.classes, read.transform, read.weights) == (run.classes, run.transform, run.weights)
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    expected = {"architecture": arch, "num_classes": 3, "label_names": ["ant", "bee", "cat"], "resize": 37, "crop": 32}
    expected |= {"mean": [0.4, 0.5, 0.3], "std": [0.2, 0.3, 0.25], "interpolation": "bilinear", "flip": True}
    assert {key: config[key] for key in expected} == expected
    for path in (tmp_path / "exported").glob("*.[jm][sd]*"):
        assert str(image_folder) not in path.read_text() and str(tmp_path) not in path.read_text(), path
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "plugins = 'own.py'  # code that this folder does not contain" in card


@pytest.mark.slow
def test_a_multi_label_run_is_compared_by_its_labels(tmp_path):
    draw_folder(tmp_path / "data", "images", {"a": 9})
    rows = "".join(f"images/a/{index:03d}.jpg,{'ant;bee' if index % 2 else 'cat'}\n" for index in range(9))
    for split in ("train", "val"):
        (tmp_path / "data" / f"{split}.csv").write_text(f"image,labels\n{rows}")
    options = ("DATA.NAME", "multilabel", "LOSS.NAME", "bce")
    cfg = load_cfg(None, small_options(tmp_path / "data", tmp_path / "out", *options))
    record = export_run(load_run(save_run(cfg), device="cpu"), "safetensors", tmp_path / "exported")
    assert record["verified"] and record["equal_answers"] == 100


@pytest.fixture
def saved(small_cfg):
    return save_run(small_cfg())


def test_arguments_are_checked_before_the_run_is_read(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    cases = {
        ("--to", "timm"): "--out: got nothing; expected one new folder",
        ("--to", "timm", "full"): "--out: {} is not empty; fix: name a new folder",
        ("--to", "onnx", "new.onnx"): "--out: got {}; expected a folder, which will hold model.onnx",
        ("--to", "timm", "new"): "RUN: no such file or folder: no_run",
    }
    for words, expected in cases.items():
        folder = [str(tmp_path / word) if word in ("new", "full", "new.onnx") else word for word in words]
        assert command("no_run" if "no_run" in expected else tmp_path, *folder) == 2
        assert expected.format(folder[-1]) in capsys.readouterr().err, words
    assert left_beside(tmp_path) == ["full"]


def test_a_missing_package_is_named_with_the_pip_line(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("distribuuuu.commands.export.onnx_file.find_spec", lambda name: None)
    assert command(saved, "--to", "onnx", tmp_path / "new") == 2
    expected = "needs onnx, onnxscript, onnxruntime, not installed; fix: pip install 'distribuuuu[onnx]'"
    assert expected in capsys.readouterr().err and left_beside(tmp_path) == []


@pytest.mark.slow
def test_a_full_disk_and_images_that_cannot_be_read_leave_nothing_behind(small_cfg, tmp_path, monkeypatch, capsys):
    from safetensors import SafetensorError

    saved, folder = save_run(small_cfg("MODEL.ARCH", "resnet18")), tmp_path / "out" / "data"
    draw_folder(folder, "val", {"ant": 1, "bee": 1, "cat": 1})
    (folder / "val" / "bee" / "000.jpg").write_bytes(b"\xff\xd8 no image")
    for data, named in ((tmp_path / "gone", str(tmp_path / "gone")), (folder, "bee/000.jpg")):
        assert command(saved, "--to", "safetensors", tmp_path / "new", "--set", "TEST.DATASET", data) == 2
        assert named in capsys.readouterr().err and left_beside(tmp_path) == []
    for to, error in (("timm", SafetensorError), ("safetensors", OSError)):

        def fail(*args, error=error, **options):
            raise error("No space left on device (os error 28)")

        monkeypatch.setattr(type(tmp_path), "write_bytes", fail)
        monkeypatch.setattr("safetensors.torch.save_file", fail)
        with pytest.raises(ConfigError, match="--out: .*cannot be written: .*No space left on device.*nothing is left"):
            export_run(load_run(saved, device="cpu"), to, tmp_path / "new", check_images=1)
        assert left_beside(tmp_path) == []


@pytest.mark.slow
def test_an_export_without_labeled_images_is_checked_on_others_or_marked(saved, tmp_path, image_folder, capsys):
    data = ("TEST.DATASET", tmp_path / "gone", "TRAIN.DATASET", tmp_path / "gone")
    words = (saved / "best.pth.tar", "--format", "safetensors", "--out", tmp_path / "new", *data)
    assert command(*words) == 2 and left_beside(tmp_path) == []
    assert "--images FOLDER" in (said := capsys.readouterr().err) and "--no-check" in said
    assert command(*words, "--images", image_folder / "val" / "ant") == 0
    record = json.loads((tmp_path / "new" / "export.json").read_text())
    assert record["verified"] and record["images"] > 5
    shutil.rmtree(tmp_path / "new")
    assert command(*words, "--no-check") == 0 and "NOT CHECKED" in capsys.readouterr().out
    assert json.loads((tmp_path / "new" / "export.json").read_text())["verified"] is None
    assert "**not checked**" in (tmp_path / "new" / "README.md").read_text()


@pytest.mark.slow
def test_a_stopped_export_leaves_nothing_behind(small_cfg, tmp_path):
    words = ["export", save_run(small_cfg("MODEL.ARCH", "resnet50")), "--to", "safetensors", tmp_path / "new"]
    command = [sys.executable, "-m", "distribuuuu", *map(str, words)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    wait_for(lambda: left_beside(tmp_path), process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143 and left_beside(tmp_path) == [], errors


PLUGIN = '''
import torch
from distribuuuu.config.registry import TASKS
from distribuuuu.tasks.classification import Classification


@TASKS.register("{name}")
class Own(Classification):
    """A task of a user."""

{body}
'''
MEANS = """
    def __init__(self, *args):
        super().__init__(*args)
        self.means = torch.eye(3).flip(0)

    def state_dict(self):
        return {**super().state_dict(), "means": self.means}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.means = state["means"]

    def predict_step(self, model, images):
        with self.autocast():
            return model(images).float() @ self.means
"""


@pytest.fixture
def run_of_plugin(small_cfg, tmp_path):
    """Return a function that saves a run whose task is in a plug-in."""

    def save(name: str, body: str, state: dict, *words) -> None:
        (tmp_path / "own.py").write_text(PLUGIN.replace("{name}", name).replace("{body}", body))
        save_run(small_cfg("PLUGINS", tmp_path / "own.py", "TASK.NAME", name, "TRAIN.AMP", "bf16", *words), task=state)

    return save


@pytest.mark.slow
def test_the_scores_of_a_task_are_exported(run_of_plugin, tmp_path):
    means = torch.tensor([[0.1, 0.9, 0.0], [0.7, 0.0, 0.2], [0.0, 0.3, 1.2]])  # not those of a new task
    run_of_plugin("own_scores", MEANS, {"shared": {"means": means}}, "MODEL.ARCH", "resnet18")
    run = load_run(tmp_path / "out", device="cpu")
    assert torch.equal(run.task.means, means) and export_run(run, "onnx", tmp_path / "onnx")["verified"]
    with pytest.raises(ConfigError, match="--format timm: cannot express Own.predict_step; fix: --format onnx"):
        export_run(run, "timm", tmp_path / "timm")
    with pytest.raises(ConfigError, match="--format safetensors: cannot express the state of Own: means; fix: "):
        export_run(run, "safetensors", tmp_path / "safetensors")
