"""The check of an export: the code of its card, alone in a process, on the original files, against `predict`."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from support.runs import small_options
from support.saved_runs import save_run

from distribuuuu import load_run
from distribuuuu.commands.export import exporter as export
from distribuuuu.commands.export.export import format_answers
from distribuuuu.commands.export.export_check import _run_code, check_export
from distribuuuu.commands.export.exporter import export_run
from distribuuuu.commands.main import dispatch
from distribuuuu.config import load_cfg
from distribuuuu.data.loader import BadImageError, build_images, build_loader
from distribuuuu.inference.loaded_run import Prediction
from distribuuuu.launch.detect import Launch

CLASSES = ("ant", "bee", "cat")
NORMALIZATION = ("DATA.MEAN", "[0.4, 0.5, 0.3]", "DATA.STD", "[0.2, 0.3, 0.25]")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Photographs whose EXIF turns them, with a bright corner that shows each turn and each mirror image."""
    root = tmp_path_factory.mktemp("photographs")
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "val"):
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
            for number in range(16):
                a, b, c, d, *color = (torch.rand(7, generator=generator) * 60).int().tolist()
                image = Image.new("RGB", (90, 64), (40 + 3 * color[0], 40 + 3 * color[1], 40 + 3 * color[2]))
                draw = ImageDraw.Draw(image)
                draw.rectangle((a // 2, b // 2, a // 2 + 40, b // 2 + 25), (250, 3 * c, 20))
                draw.ellipse((c, d // 2, c + 25, d // 2 + 25), (4 * a, 240, 4 * d))
                for column in range(0, 90, 2):  # a fine grid, which each resize treats in its own way
                    draw.line((column, 45, column, 64), (0, 0, 0))
                exif = image.getexif()
                exif[0x0112] = (6, 3, 8, 5)[number % 4]
                image.save(root / split / name / f"{number:02d}.jpg", exif=exif, quality=95)
    return root


@pytest.fixture(scope="module")
def turned_run(photographs, tmp_path_factory):
    """Return turned_run(arch): a run with EXIF rotation and mirrored averages, and with varied answers."""

    @functools.cache
    def make(arch: str):
        out = tmp_path_factory.mktemp("run") / "out"
        sizes = ("TRAIN.IM_SIZE", 24, "TEST.IM_SIZE", 40, "TEST.FLIP", True, "DATA.EXIF_ROTATE", True)
        cfg = load_cfg(None, small_options(photographs, out, "MODEL.ARCH", arch, *sizes, *NORMALIZATION))
        path = save_run(cfg) / "best.pth.tar"
        content, model = torch.load(path), load_run(out, device="cpu").model
        loader = build_loader(cfg, Launch("alone"), torch.device("cpu"), train=False)
        with torch.inference_mode():
            logits = torch.cat([model(images) for images, *_ in loader])
        # Each class is an answer about as often as the others, so that a mistake changes some of them.
        weights, scale = content["state_dict"], 4 / logits.std(0)
        weights["fc.weight"] *= scale[:, None]
        weights["fc.bias"] = (weights["fc.bias"] - logits.median(0).values) * scale
        torch.save(content, path)
        return load_run(out, device="cpu")

    return make


# A mistake in the code of each format: the code, and what is in its place.
EXIF = ("    image = ImageOps.exif_transpose(image)  # upright, as for the evaluation of the run\n", "")
ROUGH = ('image.convert("RGB")', 'image.convert("RGB").resize((30, 30), 0)')
MISTAKES = {
    "timm": {
        "exif": EXIF,
        "mirror": ("(model(images) + model(images.flip(-1))) / 2", "model(images)"),
        "mean": ('v2.Normalize(data["mean"], data["std"])', "v2.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))"),
        "resize": ('math.floor(size / data["crop_pct"])', "size"),
        "classes": ('model.pretrained_cfg["label_names"]', 'model.pretrained_cfg["label_names"][::-1]'),
    },
    "onnx": {
        "exif": EXIF,
        "mirror": ("image = load_image(path)", "image = np.flipud(load_image(path)).copy()"),
        "mean": ("image = load_image(path)", "image = load_image(path) // 2 + 50"),
        "resize": ROUGH,
        "classes": ('["label_names"])', '["label_names"])[::-1]'),
    },
    "safetensors": {
        "exif": ('load_run(".")', 'load_run(".", overrides=("DATA.EXIF_ROTATE", "False"))'),
        "mirror": ('load_run(".")', 'load_run(".", overrides=("TEST.FLIP", "False"))'),
        "mean": ('load_run(".")', 'load_run(".", overrides=("DATA.MEAN", "[0.5, 0.5, 0.5]"))'),
        "resize": ('load_run(".")', 'load_run(".", overrides=("TEST.IM_SIZE", "24"))'),
        "classes": ("zip(found.labels", "zip(found.labels[::-1]"),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("to", MISTAKES)
def test_five_mistakes_in_the_code_of_a_card_are_refused(turned_run, tmp_path, to, monkeypatch):
    if to == "onnx":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
        pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    run, folder = turned_run("timm/test_resnet" if to == "timm" else "resnet8"), tmp_path / "exported"
    record = export_run(run, to, folder)
    assert record["verified"] and record["images"] == 48 and record["equal_answers"] == 100, record
    assert record["mean_probability_difference"] < 0.001
    code, images = card_of(folder), build_images(run.cfg, train=False)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("distribuuuu.commands.export.export_check._run_code", run_here)
    for mistake, (right, wrong) in MISTAKES[to].items():
        assert right in code, (mistake, code)
        found = check_export(run, images, folder, code.replace(right, wrong))
        assert not found["verified"] and "error" not in found, (mistake, found)
        assert found["mean_probability_difference"] > 0.002 or found["equal_answers"] < 99.9, (mistake, found)


def run_here(code: str, files: list[str], *_) -> tuple[list, list]:
    """Run the code of a card in this process, which has imported its packages: a new one takes seconds."""
    exec(code, card := {"__name__": "card"})
    return [([(str(name), float(share)) for name, share in card["predict"](file)[:20]], True) for file in files], []


def card_of(folder) -> str:
    return re.search(r"```python\n(.*?)\n?```", (folder / "README.md").read_text(), re.DOTALL)[1]


@pytest.mark.slow
def test_a_mistake_in_a_card_ends_with_status_1_and_no_usable_file(turned_run, tmp_path, monkeypatch, capsys):
    run, render = turned_run("resnet8"), export.render_code
    right, wrong = MISTAKES["safetensors"]["exif"]
    monkeypatch.setattr(export, "render_code", lambda *args, **kwargs: render(*args, **kwargs).replace(right, wrong))
    assert dispatch("distribuuuu", ["export", run.cfg.OUT_DIR, "--to", "safetensors", str(tmp_path / "exported")]) == 1
    shown = capsys.readouterr()
    assert "NOT VERIFIED" in shown.err
    names = {path.name for path in (tmp_path / "exported").iterdir()}
    assert names == {"README.md", "config.json", "export.json", "model.safetensors.unverified"}


@pytest.mark.parametrize("code, error", [
    ("raise SystemExit(3)", "ended with status 3"),
    ("def predict(path):\n    raise OSError('no such decoder')", "48 images: OSError: no such decoder"),
    ("print('hello')\ndef predict(path):\n    return [('ant', float('nan'))]", None),
    ("def predict(path):\n    return []", None),
])  # fmt: skip
def test_code_that_fails_is_not_verified(turned_run, tmp_path, code, error):
    run = turned_run("resnet8")
    found = check_export(run, build_images(run.cfg, train=False), tmp_path, code)
    assert not found["verified"] and found["images"] == 48 and list(tmp_path.iterdir()) == []
    assert error is None and "error" not in found or error in found["error"], found


def test_a_difference_that_changes_no_answer_is_found(turned_run, tmp_path):
    run = turned_run("resnet8")
    images, answers = build_images(run.cfg, train=False), {}
    for index in range(len(images)):
        (found,) = run.predict([images.describe(index)])
        answers[images.describe(index)] = list(zip(found.labels, found.probabilities, strict=True))
    right = f"ANSWERS = {answers!r}\ndef predict(path):\n    return ANSWERS[path]"
    assert check_export(run, images, tmp_path, right)["verified"]
    less_sure = right.replace("return ANSWERS[path]", "return [(label, p * 0.99) for label, p in ANSWERS[path]]")
    found = check_export(run, images, tmp_path, less_sure)
    assert found["equal_answers"] == 100 and found["mean_probability_difference"] > 0.002 and not found["verified"]


@pytest.mark.parametrize("top, runner_up, other, answer", [
    (0.4, 0.395, 0.399, "tie"), (0.4, 0.38, 0.399, "other"), (0.4, 0.395, 0.38, "other"),
    (0.004, 0.0038, 0.004, "other"),
])  # fmt: skip
def test_another_class_is_a_tie_if_it_is_as_probable_for_both_sides(
    turned_run, tmp_path, monkeypatch, top, runner_up, other, answer
):
    run, at = turned_run("resnet8"), "distribuuuu.commands.export.export_check."
    own, swapped = [("ant", top), ("bee", runner_up)], [("bee", top), ("ant", other)]
    predicted = [Prediction("", *zip(*own, strict=True))] * 48
    monkeypatch.setattr(f"{at}_predict", lambda *args: predicted)
    monkeypatch.setattr(f"{at}_run_code", lambda *args: ([(own, True)] * 47 + [(swapped, True)], []))
    found = check_export(run, build_images(run.cfg, train=False), tmp_path, "")
    is_tie = answer == "tie"
    assert (found["ties"], found["verified"]) == (int(is_tie), is_tie)
    assert format_answers(found) == f"97.92 % equal answers{', 1 tie' if is_tie else ''}"


@pytest.mark.slow
def test_images_without_files_of_their_own_are_written_as_they_are(small_cfg, tmp_path):
    cfg = small_cfg(*NORMALIZATION)
    run = load_run(save_run(cfg), device="cpu")
    images = build_images(cfg, train=False)
    paths = [Path(images.describe(index)) for index in range(len(images))]
    code = "from distribuuuu import load_run\nrun = load_run('.')\n"
    code += "def predict(path):\n    (one,) = run.predict([path])\n    return list(zip(one.labels, one.probabilities))"
    images.has_files = False
    for read in (lambda index: paths[index].read_bytes(), lambda index: np.array(Image.open(paths[index]))):
        images.read = read
        found = check_export(run, images, tmp_path / "out", code)
        assert found["verified"] and found["images"] == 37 and found["max_probability_difference"] < 1e-6
    broken, intact = "broken image: .*003.jpg: .* is empty; fix: repair it", "cannot read .*003.jpg: .*Git LFS.*pull$"
    for data, folder, said in ((b"", tmp_path, broken), (b"version https://git-lfs", tmp_path / "out", intact)):
        images.read = lambda index, data=data: data if index == 3 else paths[index].read_bytes()
        with pytest.raises(BadImageError, match=said):
            check_export(run, images, folder, code)


def test_the_code_of_a_card_finds_the_modules_of_plug_ins(tmp_path, monkeypatch):
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "own_plug_in.py").write_text("NAME = 'ant'")
    monkeypatch.chdir(tmp_path / "lab")
    monkeypatch.syspath_prepend("")  # as of `python -m distribuuuu`
    code = "import own_plug_in\ndef predict(file):\n    return [(own_plug_in.NAME, 1.0)]"
    assert _run_code(code, ["a.png"], tmp_path, tmp_path, False) == ([([["ant", 1.0]], True)], [])
