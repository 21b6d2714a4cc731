"""Tables of a fine-tuning, and the commands that follow it."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distribuuuu.commands.output import align_columns
from distribuuuu.commands.stats.intervals import wilson_interval
from distribuuuu.config.errors import counted


def _share(right: int, num: int) -> str:
    return f"{100 * right / num:.1f}"


def interval(right: int, num: int) -> str:
    """Return the 95 % interval of an accuracy in percent."""
    low, high = wilson_interval(right, num)
    return f"{100 * low:.1f} to {100 * high:.1f}"


def format_backbones(found: Mapping[str, dict[str, Any]], num_val: int) -> list[str]:
    """Return the table of the probes, the best one on the validation images first."""
    rows = [["backbone", "validation", "params", "ms/image", "license"]]
    for name, facts in sorted(found.items(), key=lambda item: -item[1]["correct"]["probe"]["val"]):
        right = facts["correct"]["probe"]["val"]
        size, speed = f"{facts['params_m']:.1f} M", f"{1000 * facts['image_s']:.1f}"
        rows.append([name, f"{_share(right, num_val)} %", size, speed, facts["license"] or "unknown"])
    return ["", *align_columns(rows, "<>>><")]


def format_choice(result: dict[str, Any], facts: dict[str, Any], sizes: Mapping[str, int]) -> list[str]:
    """Return the table of all candidates: accuracies in percent, and the interval of those on the test images."""
    from distribuuuu.commands.finetune.choose import name_of

    rows = [["top-1 in %", "validation", "loss", "test", "95 % interval"]]
    chosen = name_of(result["share"])
    tested = {method: parts["test"] for method, parts in facts["correct"].items()}
    tested[chosen] = round(result["test"]["top1"] * sizes["test"] / 100)
    validated = {method: parts["val"] for method, parts in facts["correct"].items()} | result["correct"]
    for name, right in validated.items():
        test = [_share(tested[name], sizes["test"]), interval(tested[name], sizes["test"])] if name in tested else "--"
        mark, loss = "<- kept" if name == chosen else "", result.get("losses", {}).get(name)
        rows.append([name, _share(right, sizes["val"]), f"{loss:.3f}" if loss else "-", *test, mark])
    losses = result.get("losses", {chosen: 0.0})
    rule = "the lowest loss" if losses[chosen] == min(losses.values()) else "as none is better by a standard error"
    reason = f"{rule} on {sizes['val']:,} validation images"
    shown = f"kept: {chosen}, {reason if len(result['correct']) > 1 else 'the only candidate'}; "
    shown += f"{counted(sizes['test'], 'test image')} used once, at the end"
    return ["", *align_columns(rows, "<>>>>"), shown]


def next_commands(out: Path, config: Path | None) -> list[str]:
    """Return the commands that use the model; `config` is that of its training, if there was one."""
    folder, exported, again = (shlex.quote(f"{out}{end}") for end in ("", "_onnx", "_again"))
    rows = [
        [f"distribuuuu predict {folder} PHOTOS", "classify photographs"],
        [f"distribuuuu report {folder}", "see classes and mistakes"],
        [f"distribuuuu export {folder} --format onnx --out {exported}", "for other programs, verified"],
    ]
    if config:
        rows.append([f"distribuuuu train --cfg {shlex.quote(str(config))} OUT_DIR {again}", "repeat the training"])
    return ["", *align_columns(rows, "<<")]
