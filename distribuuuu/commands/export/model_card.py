"""Model cards: the README.md of an exported folder, with its Python code, and the metadata that the Hub reads.

Code of every format defines `predict(path)`: pairs of a class and its probability, the most probable class first. It
runs in the exported folder. What the file of a format cannot do, the code does. templates/ holds both.
"""

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import yaml

from distribuuuu.commands.export.export import format_answers
from distribuuuu.commands.stats.finetuned import read_finetuned
from distribuuuu.config.derived import height_and_width
from distribuuuu.config.errors import counted
from distribuuuu.config.options import PIXEL_RANGES
from distribuuuu.config.plugins import is_shipped
from distribuuuu.data.crops import EvalCrop
from distribuuuu.data.transforms import CenterCrop
from distribuuuu.inference.loaded_run import LoadedRun
from distribuuuu.models import count_parameters

_UNITS = {
    "uint8": "pixels from 0 to 1",
    "uint16": "pixels / 65535, from 0 to 1,",
    "float32": "pixels in the units of the files",
}
# Classes that a card lists.
_MAX_CLASSES = 100


@functools.cache
def _template(name: str) -> jinja2.Template:
    loader, undefined = jinja2.FileSystemLoader(Path(__file__).with_name("templates")), jinja2.StrictUndefined
    environment = jinja2.Environment(loader=loader, undefined=undefined, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(name)


def render_code(run: LoadedRun, to: str, threshold: float | None = None, has_paths: bool = False) -> str:
    """Return the code of the card of a run in a format.

    Args:
        threshold: the probability above which there is an answer; None: there always is one.
        has_paths: the code of safetensors imports the plug-ins of the run by their paths; else by their names alone.
    """
    names = [entry if has_paths else os.path.basename(entry) for entry in run.cfg.PLUGINS if not is_shipped(entry)]
    options, crop = run.transform.options, run.transform.crop
    code = _template("code.jinja").render(
        to=to,
        threshold=threshold,
        plugins=repr(",".join(names)) if names else "",
        multilabel=run.task.multilabel,
        num_classes=len(run.classes),
        squash=None if isinstance(crop, CenterCrop) else list(height_and_width(crop.size)),
        is_photo=options.is_rgb or options.is_gray,
        channels=options.channels,
        pixels=options.pixels,
        pixel_range=PIXEL_RANGES[options.pixels],
        exif=run.cfg.DATA.EXIF_ROTATE,
        flip=run.cfg.TEST.FLIP,
        temperature=run.temperature if run.calibration else None,
    )
    return code.rstrip("\n")


def has_crop_code(crop: EvalCrop) -> bool:
    """Tell whether torchvision has transforms for the resize and crop, which the code for timm needs."""
    if isinstance(crop, CenterCrop):
        return isinstance(crop.resize_to, int) and isinstance(crop.size, int)
    return crop.mode == "squash"


def _render_metadata(run: LoadedRun, to: str, name: str, metrics: Mapping[str, tuple[str, float]], kind: str) -> str:
    """Return the metadata of a card as YAML, see https://huggingface.co/docs/hub/model-cards."""
    library = "distribuuuu" if to == "safetensors" else to
    result = {
        "task": {"type": "image-classification", "name": "Image classification"},
        "dataset": {"name": name, "type": kind, "split": run.cfg.TEST.SPLIT},
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
    """Return the README.md of an export: Markdown, with YAML front matter; `record` is the content of export.json."""
    results, to, tuned = run.results or {}, record["format"], None if run.results else read_finetuned(run.folder)
    data = results.get("data", {})
    name = str(data.get("folder") or data.get("name") or run.cfg.DATA.NAME)
    best = results.get("accuracy", {}).get(run.weights, {}).get("best", {})
    labels = results["evaluation"]["metrics"] if best else {}
    metrics = {key: (label, best[key]) for key, label in labels.items() if best.get(key) is not None}
    if tuned:
        name, metrics = tuned.name, {"top1": ("top1", tuned.top1)}
    card = _template("card.jinja").render(
        metadata=_render_metadata(run, to, name, metrics, name if tuned else run.cfg.DATA.NAME),
        run=run,
        cfg=run.cfg,
        results=results,
        tuned=tuned,
        record=record,
        to=to,
        name=name,
        params_m=count_parameters(run.model) / 1e6,
        metrics=metrics,
        code=code,
        input=_describe_input(run, to),
        units=_UNITS[run.cfg.DATA.PIXELS],
        counted=counted,
        format_answers=format_answers,
        max_classes=_MAX_CLASSES,
        names=json.dumps(list(run.classes[:_MAX_CLASSES]), ensure_ascii=False),  # line breaks are escaped
    )
    return card.rstrip("\n") + "\n"


def _describe_input(run: LoadedRun, to: str) -> str:
    options = run.transform.options
    num, colors, kind = options.channels, ", RGB" if options.is_rgb else "", str(options.dtype).removeprefix("torch.")
    if to == "onnx":
        return f"Input of the file: `images`, {kind} (N, height, width, {num}){colors}, of any size."
    return f"Input of the model: float32 (N, {num}, H, W){colors}, normalized."
