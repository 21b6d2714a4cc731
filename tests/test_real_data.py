"""Training, normalization and export on the real images in the folder DATA_ROOT."""

import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from support.commands import command_module
from support.images import find_data
from support.runs import ROOT, small_options
from support.saved_runs import torch_predict

from distribuuuu import load_run
from distribuuuu.commands.main import dispatch
from distribuuuu.config import load_cfg
from distribuuuu.data.decode import open_lazy_image
from distribuuuu.data.image_file import DEFAULTS
from distribuuuu.data.loader import build_images, build_loader
from distribuuuu.launch.detect import Launch
from distribuuuu.trainer import train_model

CPU = torch.device("cpu")

pytestmark = pytest.mark.real_data


def test_normalized_fashion_mnist_has_mean_0_and_std_1():
    root = find_data("FashionMNIST").parent
    overrides = ["DATA.NAME", "fashion_mnist", "MODEL.NUM_CLASSES", "10", "TRAIN.DATASET", str(root)]
    cfg = load_cfg(None, [*overrides, "TRAIN.IM_SIZE", "28", "TEST.IM_SIZE", "28", "TEST.BATCH_SIZE", "2000"])
    loader = build_loader(cfg, Launch("alone"), CPU, train=False)
    images, labels, *_ = next(iter(loader))
    assert len(loader.images) == 10000 and loader.images.classes[9] == "Ankle boot"
    assert abs(float(images.mean())) < 0.05 and abs(float(images.std()) - 1) < 0.05
    assert torch.equal(images[:, 0], images[:, 2]) and sorted(set(labels.tolist())) == list(range(10))


@pytest.fixture(scope="module")
def clothing(tmp_path_factory) -> Path:
    """Return the extracted folder of clothing10."""
    root = tmp_path_factory.mktemp("clothing10")
    with tarfile.open(find_data("clothing10/clothing10_subset.tar")) as archive:
        archive.extractall(root, filter="data")
    return root


def test_training_on_clothing10_lowers_the_loss(clothing, tmp_path):
    overrides = ["TRAIN.DATASET", str(clothing), "TEST.SPLIT", "test", "MODEL.NUM_CLASSES", "10"]
    overrides += ["TRAIN.IM_SIZE", "32", "TEST.IM_SIZE", "36", "OPTIM.MAX_EPOCH", "2", "TRAIN.WORKERS", "2"]
    overrides += ["TRAIN.PRINT_FREQ", "30", "OPTIM.BASE_LR", "0.01"]
    cfg = load_cfg(None, [*small_options(clothing, tmp_path / "out"), *overrides])
    train_model(cfg)
    lines = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    first, *_, before_last, last = [line["loss"] for line in lines if line["kind"] == "train"]
    assert (before_last + last) / 2 < first
    log = (tmp_path / "out" / "train.log").read_text()
    assert "train: 1,192 images, validation: 372 images, 10 classes" in log


@pytest.fixture(scope="module")
def clothing_run(clothing, tmp_path_factory) -> Path:
    """Return the folder of a training on clothing10 of three epochs."""
    out = tmp_path_factory.mktemp("run")
    words = ["TRAIN.DATASET", clothing, "OUT_DIR", out, "OPTIM.MAX_EPOCH", 3, "OPTIM.WARMUP_EPOCHS", 1,
             "TRAIN.WORKERS", 2, "LOG.TENSORBOARD", False]  # fmt: skip
    train_model(load_cfg(str(ROOT / "configs" / "clothing10" / "resnet14.yaml"), list(map(str, words))))
    return out


def count_equal(session, batches, reference) -> int:
    """Return how many answers of an ONNX file equal those of a function, over batches of images of one size."""
    equal = 0
    for batch in batches:
        (logits,) = session.run(["logits"], {"images": torch.stack(batch).permute(0, 2, 3, 1).numpy()})
        equal += int(torch.from_numpy(logits).argmax(1).eq(reference(batch).argmax(1)).sum())
    return equal


def test_an_onnx_file_answers_as_the_run_on_clothing10(clothing_run, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    assert dispatch("distribuuuu", ["export", str(clothing_run), "--to", "onnx", str(tmp_path / "exported")]) == 0
    record = json.loads((tmp_path / "exported" / "export.json").read_text())
    assert record["verified"] and record["images"] == record["images_of_set"] == 372
    results = json.loads((clothing_run / "results.json").read_text())
    assert record["top1"]["run"] == results["accuracy"]["raw"]["best"]["top1"]
    run, by_size = load_run(clothing_run, device="cpu"), {}
    images = build_images(run.cfg, train=False)
    reference = torch_predict(run.model.requires_grad_(False), run.transform)
    pixels = [open_lazy_image(images.read(index), "auto").pixels() for index in range(len(images))]
    for image in pixels:
        by_size.setdefault(image.shape, []).append(image)
    assert len(by_size) > 20
    session = onnxruntime.InferenceSession(tmp_path / "exported" / "model.onnx")
    for num in (1, 7, 8):
        batches = [same[start : start + num] for same in by_size.values() for start in range(0, len(same), num)]
        assert count_equal(session, batches, reference) >= 0.999 * 372, num
    sizes = [(30 + 23 * step, 700 - 31 * step) for step in range(20)]  # from 30 x 700 to 467 x 111
    resized = [
        [F.interpolate(image[None], size, mode="bilinear", antialias=True)[0]]
        for size in sizes for image in pixels[:: len(pixels) // 20]
    ]  # fmt: skip
    assert count_equal(session, resized, reference) >= 0.999 * len(resized)


def check(root: Path) -> dict:
    folder = command_module("doctor.layout").open_folder(root)
    scan = command_module("scan.scan").scan_images(folder, DEFAULTS, 2, lambda num: None)
    groups = command_module("scan.duplicates").find_groups(scan, DEFAULTS)
    return command_module("doctor.findings").examine(scan, groups, DEFAULTS)


def test_clothing10_has_no_findings(clothing):
    report = check(clothing)
    assert report["findings"] == [] and report["status"] == "clean" and report["images"] == 1564
    assert report["statistics"]["shorter_side"] == dict.fromkeys(("min", "p10", "median", "p90", "max"), 400)


@pytest.fixture
def planted(clothing, tmp_path) -> tuple[Path, dict[str, set[frozenset[str]]]]:
    """Return a copy of clothing10 with defects, and the files of each kind of finding."""
    root = tmp_path / "planted"
    shutil.copytree(clothing, root)
    images = {name: sorted(f"train/{name}/{path.name}" for path in (root / "train" / name).iterdir())
              for name in ("dress", "hat", "pants", "shoes", "t-shirt")}  # fmt: skip
    expected: dict[str, set[frozenset[str]]] = {kind: set() for kind in ("leakage", "duplicates", "truncated")}
    for number in range(5):
        source, copy = images["dress"][number], f"train/dress/copy_{number}.jpg"
        shutil.copy(root / source, root / copy)
        expected["duplicates"].add(frozenset({source, copy}))
        source, copy = images["hat"][number], f"train/hat/quality_60_{number}.jpg"
        Image.open(root / source).save(root / copy, quality=60)
        expected["duplicates"].add(frozenset({source, copy}))
    for number in range(3):
        source, copy = images["pants"][number], f"test/pants/leak_{number}.jpg"
        shutil.copy(root / source, root / copy)
        expected["leakage"].add(frozenset({source, copy}))
    for number, size in enumerate((-2000, 1000)):
        path = images["shoes"][number]
        (root / path).write_bytes((root / path).read_bytes()[:size])
        expected["truncated"].add(frozenset({path}))
    (root / "train/T-Shirt").mkdir()
    for path in images["t-shirt"][:20]:
        (root / path).rename(root / "train/T-Shirt" / Path(path).name)
    expected["similar_class_names"] = {frozenset({"train/T-Shirt", "train/t-shirt", "test/t-shirt"})}
    expected["unevaluated_class"] = {frozenset({"train/T-Shirt"})}
    return root, expected


def test_planted_defects_of_clothing10_are_found_and_nothing_else(planted):
    root, expected = planted
    found = {}
    for finding in (report := check(root))["findings"]:
        groups = [[file["file"] for file in group["files"]] for group in finding["groups"]]
        if finding["kind"] == "truncated":
            groups = [[file] for file in finding["files"]]
        found[finding["kind"]] = {
            frozenset(os.path.relpath(file, root) for file in files) for files in groups or [finding["files"]]
        }
    assert found == expected and report["status"] == "problems"
    assert sum(group["identical"] for finding in report["findings"] for group in finding["groups"]) == 8
