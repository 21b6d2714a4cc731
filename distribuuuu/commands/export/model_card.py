"""Model cards: the README.md of an exported folder, with its Python code, and the metadata that the Hub reads.

Code of every format defines `predict(path)`: pairs of a class and its probability, the most probable class first. It
runs in the exported folder. What the file of a format cannot do, the code does.
"""

import json
import os
from collections.abc import Mapping
from string import Template
from typing import Any

import yaml

from distribuuuu.config.derived import height_and_width
from distribuuuu.config.errors import counted
from distribuuuu.config.options import PIXEL_RANGES
from distribuuuu.config.plugins import is_shipped
from distribuuuu.data.crops import EvalCrop
from distribuuuu.data.transforms import CenterCrop
from distribuuuu.inference.loaded_run import LoadedRun
from distribuuuu.models import count_parameters
from distribuuuu.records.read_results import list_metrics

# Steps of the preprocessing that are inside the file of a format.
INSIDE = {
    "timm": (),
    "safetensors": (),
    "onnx": ("crop", "normalize", "mirror", "shift", "temperature"),
    "torch": ("normalize", "mirror", "shift", "temperature"),
}

_LOAD_IMAGE = '''def load_image(path):
    """Return the pixels of an image file: uint8 (height, width, $channels)."""
    image = Image.open(path)
$draft$exif    if image.mode.startswith("I"):  # 16 bits
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    return np.array(image.convert("$mode"))$axis'''
_LOAD_RASTER = '''def load_image(path):
    """Return the pixels of a file (.npy, TIFF or another image): $pixels (height, width, $channels)."""
    if path.lower().endswith(".npy"):
        pixels = np.load(path, allow_pickle=False)
    elif path.lower().endswith((".tif", ".tiff")):
        import tifffile

        pixels = tifffile.imread(path, key=0)
    else:
        image = Image.open(path)
        mode = {1: "L", 3: "RGB", 4: "RGBA"}.get($channels)
${inner_exif}        pixels = np.array(image.convert(mode) if mode and image.mode[0] not in "IF" else image)
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    pixels = pixels if pixels.shape[2] == $channels else pixels.transpose(1, 2, 0)
    return np.ascontiguousarray(pixels, dtype=np.$host)'''
_EXIF = "    image = ImageOps.exif_transpose(image)  # upright, as for the evaluation of the run\n"

_UNITS = {
    "uint8": "pixels from 0 to 1",
    "uint16": "pixels / 65535, from 0 to 1,",
    "float32": "pixels in the units of the files",
}

_PREDICT = '''def predict(path):
    """Return pairs of a class and its probability, the most probable class first."""
    image = load_image(path)  # of any size
$scores
    probabilities = $activation
    order = np.argsort(-probabilities, kind="stable")
    return [(classes[index], float(probabilities[index])) for index in order]'''
_TORCH_SCORES = """    pixels = torch.from_numpy(image).permute(2, 0, 1)
    with torch.inference_mode():
        images = transform(pixels)[None]
        logits = $logits
    scores = logits[0].double().numpy()$scale_scores"""
_ONNX_SCORES = """    (logits,) = session.run(["logits"], {"images": image[None]})
    scores = logits[0].astype(np.float64)"""

_CODE = {
    "timm": """import math

import numpy as np
import timm
import torch
from PIL import Image$image_ops
from torchvision.transforms import v2

model = timm.create_model("local-dir:.", pretrained=True).eval()  # or "hf-hub:OWNER/NAME"
classes = model.pretrained_cfg["label_names"]
data = timm.data.resolve_data_config({}, model=model)
size, mode = data["input_size"][-1], v2.InterpolationMode(data["interpolation"])
transform = v2.Compose([
    $timm_crop,
    $scale,
    v2.Normalize(data["mean"], data["std"]),
])""",
    "torch": """import json

import numpy as np
import torch
from PIL import Image$image_ops
from torchvision.transforms import v2

extra = {"metadata.json": ""}
model = torch.export.load("model.pt2", extra_files=extra).module()
meta = json.loads(extra["metadata.json"])
classes, mode = meta["label_names"], v2.InterpolationMode(meta["interpolation"])
transform = $torch_crop""",
    "onnx": """import json

import numpy as np
import onnxruntime
from PIL import Image$image_ops

session = onnxruntime.InferenceSession("model.onnx")
classes = json.loads(session.get_modelmeta().custom_metadata_map["label_names"])""",
    "safetensors": '''from distribuuuu import load_run

$load_run  # this folder


def predict(path):
    """Return pairs of a class and its probability, the most probable class first."""
    (found,) = run.predict([path], $selection)
    return list(zip(found.labels, found.probabilities))''',
}

_ANSWER = '''def answer(pairs):
    """Return the class that `predict` has found; None, if the model is not sure."""
    return pairs[0][0] if pairs[0][1] > $threshold else None'''
_MAIN = """if __name__ == "__main__":
    $show"""


def render_code(run: LoadedRun, to: str, threshold: float | None = None, has_paths: bool = False) -> str:
    """Return the code of the card of a run in a format.

    Args:
        run: the run.
        to: the format.
        threshold: the probability above which there is an answer; None: there always is one.
        has_paths: the code of safetensors imports the plug-ins of the run by their paths; else by their names alone.
    """
    names = [entry if has_paths else os.path.basename(entry) for entry in run.cfg.PLUGINS if not is_shipped(entry)]
    code = f"plugins = {','.join(names)!r}  # code that this folder does not contain: set the paths of the files\n"
    with_plugins = f'{code}run = load_run(".", overrides=["PLUGINS", plugins])'
    multilabel, exif = run.task.multilabel, run.cfg.DATA.EXIF_ROTATE
    options = run.transform.options
    load = _LOAD_IMAGE if options.is_rgb or options.is_gray else _LOAD_RASTER
    parts = [_CODE[to], *([load, _PREDICT] if to != "safetensors" else [])]
    parts += [_MAIN] if threshold is None else [_ANSWER, _MAIN]
    scores = _ONNX_SCORES if to == "onnx" else _TORCH_SCORES
    softmax = "np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()"
    mirrors = run.cfg.TEST.FLIP and "mirror" not in INSIDE[to]
    values = {
        **(render_crop(run.transform.crop) or {}),
        "mode": "L" if options.is_gray else "RGB",
        "axis": "[:, :, None]" if options.is_gray else "",
        "draft": '    image.draft("L", None)  # of a JPEG, the luminance\n' if options.is_gray else "",
        "pixels": options.pixels,
        "channels": options.channels,
        "host": "uint8" if options.pixels == "uint8" else "float32",
        "scale": "v2.ToDtype(torch.float32, scale=True)"
        if options.pixels == "uint8"
        else f"v2.Lambda(lambda pixels: pixels / {PIXEL_RANGES[options.pixels]})",
        "image_ops": ", ImageOps" if exif else "",
        "exif": _EXIF if exif else "",
        "inner_exif": f"    {_EXIF}" if exif else "",
        "logits": "(model(images) + model(images.flip(-1))) / 2  # and mirrored" if mirrors else "model(images)",
        "scale_scores": f" / {run.temperature}" if run.calibration and "temperature" not in INSIDE[to] else "",
        "threshold": threshold,
        "activation": "1 / (1 + np.exp(-scores))" if multilabel else softmax,
        "load_run": with_plugins if names else 'run = load_run(".")',
        "selection": "threshold=0" if multilabel else f"topk={len(run.classes)}",
        "show": 'print([pair for pair in predict("image.jpg") if pair[1] > 0.5])'
        if multilabel
        else 'print(predict("image.jpg")[0])'
        if threshold is None
        else 'print(answer(predict("image.jpg")))',
    }
    return Template("\n\n\n".join(parts).replace("$scores", scores)).substitute(values)


def render_crop(crop: EvalCrop) -> dict[str, str] | None:
    """Return the code of resize and crop for timm and torch; None if torchvision has no transform for them."""
    if isinstance(crop, CenterCrop) and isinstance(crop.resize_to, int) and isinstance(crop.size, int):
        resize = 'v2.Resize(math.floor(size / data["crop_pct"]), mode, antialias=True),\n    v2.CenterCrop(size)'
        both = 'v2.Compose([v2.Resize(meta["resize"], mode, antialias=True), v2.CenterCrop(meta["crop"])])'
        return {"timm_crop": resize, "torch_crop": both}
    if isinstance(crop, CenterCrop) or crop.mode != "squash":
        return None
    resize = f"v2.Resize({list(height_and_width(crop.size))}, mode, antialias=True)"
    return {"timm_crop": resize, "torch_crop": resize}


def list_steps(run: LoadedRun) -> dict[str, str]:
    """Return the steps of the preprocessing and of the prediction, in their order, with a description of each."""
    mean, std, shift = list(run.transform.mean), list(run.transform.std), run.cfg.TEST.SHIFT
    return {
        **({"exif": "turn the image upright, as its EXIF orientation says"} if run.cfg.DATA.EXIF_ROTATE else {}),
        "crop": f"{run.transform.crop}, antialiased",
        "normalize": f"normalize {_UNITS[run.cfg.DATA.PIXELS]} with mean {mean} and std {std}",
        **({"mirror": "average the logits with those of the mirrored image"} if run.cfg.TEST.FLIP else {}),
        **({"shift": f"average the logits with those of the image shifted by {shift} px"} if shift else {}),
        **({"temperature": f"divide the logits by {run.temperature:.4g}"} if run.calibration else {}),
    }


_MAX_CLASSES = 100
_LIBRARIES = {"timm": "timm", "onnx": "onnx", "torch": "pytorch", "safetensors": "distribuuuu"}


def _render_metadata(run: LoadedRun, to: str, name: str, metrics: Mapping[str, tuple[str, float]]) -> str:
    """Return the metadata of a card as YAML, see https://huggingface.co/docs/hub/model-cards."""
    library = _LIBRARIES[to]
    result = {
        "task": {"type": "image-classification", "name": "Image classification"},
        "dataset": {"name": name, "type": run.cfg.DATA.NAME, "split": run.cfg.TEST.SPLIT},
        "metrics": [{"type": "accuracy" if key == "top1" else key, "name": label, "value": value}
                    for key, (label, value) in metrics.items()],
    }  # fmt: skip
    metadata = {
        "library_name": library,
        "pipeline_tag": "image-classification",
        "tags": list(dict.fromkeys(["image-classification", library, "distribuuuu"])),
        "model-index": [{"name": run.cfg.MODEL.ARCH, "results": [result]}],
    }
    return yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)


def render_card(run: LoadedRun, record: Mapping[str, Any], code: str) -> str:
    """Return the README.md of an export in Markdown, with YAML front matter.

    Args:
        run: the exported run.
        record: the content of export.json.
        code: the code that the check has run.
    """
    results, arch, to = run.results or {}, run.cfg.MODEL.ARCH, record["format"]
    data, classes = results.get("data", {}), counted(len(run.classes), "class")
    name = str(data.get("folder") or data.get("name") or run.cfg.DATA.NAME)
    best = results.get("accuracy", {}).get(run.weights, {}).get("best", {})
    labels = list_metrics(results) if best else {}
    metrics = {key: (label, best[key]) for key, label in labels.items() if best.get(key) is not None}
    rows = {
        "architecture": f"`{arch}`, {count_parameters(run.model) / 1e6:.3f} M parameters",
        "data": f"{name}, {classes}",
        "weights": f"{run.weights}, `{record['source']}`",
        **({"license of the initial weights": license} if (license := run.cfg.MODEL.LICENSE) else {}),
        "code": f"distribuuuu, commit `{results.get('commit') or 'unknown'}`",
    }
    if results:
        training, images = results["training"], f"{data['num_train']:,} training and {data['num_val']:,} evaluation"
        rows |= {"data": f"{name}, {images} images, {classes}",
                 "epochs": f"{training['epochs_done']} of {training['epochs_planned']}",
                 "config": f"`{results['config']}`"}  # fmt: skip
    rows |= {label: f"{value:.2f}" for label, value in metrics.values()}
    table = "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    note = "\n\nThe metrics are those of the evaluation images, which also selected the weights." if metrics else ""
    inside = INSIDE[to]
    steps = "\n".join(f"{number}. {text}: {'inside the file' if step in inside else 'in the code above'}"
                      for number, (step, text) in enumerate(list_steps(run).items(), 1))  # fmt: skip
    names = json.dumps(list(run.classes[:_MAX_CLASSES]), ensure_ascii=False)  # line breaks are escaped
    more = f" The first {_MAX_CLASSES}:" if len(run.classes) > _MAX_CLASSES else ""
    sections = [
        f"---\n{_render_metadata(run, to, name, metrics)}---",
        f"# {arch} on {name}\n\n{table}{note}",
        f"## Use\n\nIn the folder of this card:\n\n```python\n{code}\n```",
        f"## Preprocessing\n\n{steps}\n\n{_describe_input(run, to)}",
        *([f"## Confidence\n\n{_describe_confidence(run, record)}"] if run.calibration else []),
        f"## Check of this export\n\n{_describe_check(record)}",
        f"## Classes\n\n{classes}, in the order of the logits.{more}\n\n```json\n{names}\n```",
    ]
    return "\n\n".join(sections) + "\n"


def _describe_input(run: LoadedRun, to: str) -> str:
    options = run.transform.options
    num, colors, kind = options.channels, ", RGB" if options.is_rgb else "", str(options.dtype).removeprefix("torch.")
    return {
        "onnx": f"Input of the file: `images`, {kind} (N, height, width, {num}){colors}, of any size.",
        "torch": f"Input of the file: {kind} (N, {num}, H, W){colors}.",
    }.get(to, f"Input of the model: float32 (N, {num}, H, W){colors}, normalized.")


def _describe_confidence(run: LoadedRun, record: Mapping[str, Any]) -> str:
    assert run.calibration
    images = counted(run.calibration.images, "validation image")
    text = f"The probabilities are calibrated by {images}: the logits are divided by {run.temperature:.4g}."
    if (threshold := record.get("threshold")) is None:
        return text
    share = f"{100 * record['promised_precision']:g} %"
    return (
        f"{text} `answer` returns None where the probability is {threshold:.4g} or less. At least {share} of its other "
        "answers are right for images like these, with a probability of 95 % over the choice of the validation images."
    )


def _describe_check(record: Mapping[str, Any]) -> str:
    if record["verified"] is None:
        return "The code above was **not checked** on images."
    failed = f"The code has failed: {record['error']}\n\n" if "error" in record else ""
    verdict = "verified" if record["verified"] else "NOT VERIFIED: do not use it"
    share = f"{record['equal_answers']:.2f} % equal answers on {counted(record['images'], 'image')}"
    return (
        f"The code above was run on the original files in a process of its own, and compared with the predictions of "
        f"the trained model: {share}; **{verdict}**.\n\n{failed}"
        f"Difference of the probability of the answer: {record['mean_probability_difference']:.2g} on average, at most "
        f"{record['max_probability_difference']:.2g}. Machine: {record['hardware']}."
    )
