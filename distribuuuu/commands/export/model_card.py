"""Model cards: the README.md of an exported folder, with the metadata that the Hugging Face Hub reads."""

import json
from collections.abc import Mapping
from typing import Any

import yaml

from distribuuuu.commands.export.card_code import INSIDE, list_steps
from distribuuuu.config.errors import counted
from distribuuuu.inference.loaded_run import LoadedRun
from distribuuuu.models import count_parameters
from distribuuuu.records.read_results import list_metrics

_MAX_CLASSES = 100
_LIBRARIES = {"timm": "timm", "onnx": "onnx", "torch": "pytorch", "safetensors": "distribuuuu"}


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
    library, metrics = _LIBRARIES[to], find_metrics(run)
    result = {
        "task": {"type": "image-classification", "name": "Image classification"},
        "dataset": {"name": name, "type": run.cfg.DATA.NAME, "split": run.cfg.TEST.SPLIT},
        "metrics": [{"type": "accuracy" if key == "top1" else key, "name": label, "value": value}
                    for key, (label, value) in metrics.items()],
    }  # fmt: skip
    metadata = {  # https://huggingface.co/docs/hub/model-cards
        "library_name": library,
        "pipeline_tag": "image-classification",
        "tags": list(dict.fromkeys(["image-classification", library, "distribuuuu"])),
        "model-index": [{"name": arch, "results": [result]}],
    }
    rows = {
        "architecture": f"`{arch}`, {count_parameters(run.model) / 1e6:.3f} M parameters",
        "data": f"{name}, {classes}",
        "weights": f"{run.weights}, `{record['source']}`",
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
        f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---",
        f"# {arch} on {name}\n\n{table}{note}",
        f"## Use\n\nIn the folder of this card:\n\n```python\n{code}\n```",
        f"## Preprocessing\n\n{steps}\n\n{_describe_input(run, to)}",
        f"## Check of this export\n\n{_describe_check(record)}",
        f"## Classes\n\n{classes}, in the order of the logits.{more}\n\n```json\n{names}\n```",
    ]
    return "\n\n".join(sections) + "\n"


def find_metrics(run: LoadedRun) -> dict[str, tuple[str, float]]:
    """Return the metrics of the exported weights, name -> (display name, value)."""
    results = run.results or {}
    best = results.get("accuracy", {}).get(run.weights, {}).get("best", {})
    labels = list_metrics(results) if best else {}
    return {name: (label, best[name]) for name, label in labels.items() if best.get(name) is not None}


def _describe_input(run: LoadedRun, to: str) -> str:
    options = run.transform.options
    num, colors, kind = options.channels, ", RGB" if options.is_rgb else "", str(options.dtype).removeprefix("torch.")
    return {
        "onnx": f"Input of the file: `images`, {kind} (N, height, width, {num}){colors}, of any size.",
        "torch": f"Input of the file: {kind} (N, {num}, H, W){colors}.",
    }.get(to, f"Input of the model: float32 (N, {num}, H, W){colors}, normalized.")


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
