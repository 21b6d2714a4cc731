"""Report of the command time: the table of the measurements, and the diagnosis."""

import textwrap
from collections.abc import Iterator

# Line width; with the time before it, a line has 80 columns.
_WIDTH = 71


def format_report(result: dict, compress: str) -> Iterator[str]:
    """Yield the table of the measurements in timing.json, line by line, and the diagnosis."""
    yield f"{'per step':<36} {'images':>8} {'ms':>10} {'images/s':>10}"
    yield _row("model: forward", result["forward"])
    yield _row("model: forward + backward", result["forward_backward"])
    yield f"{'optimizer step':<36} {'':>8} {1e3 * result['optimizer']['seconds']:>10.2f}"
    yield _row("training step, batch in memory", result["step"])
    yield _row("model: forward in evaluation", result["evaluation"])
    yield _row("loader: uint8 batches", result["pixels"])
    yield _row("loader: normalized, on the device", result["loader"])
    yield _row("loader + model", result["together"])
    yield f"of which waiting for data: {result['wait']:.0%}"
    yield format_all_reduce(result, compress)
    mb = {name: value / 1e6 for name, value in result["memory"].items()}
    yield f"MB: parameters {mb['parameters']:,.1f}, gradients {mb['gradients']:,.1f}, optimizer {mb['optimizer']:,.1f}"
    if mb["training"]:
        yield f"peak per process: {mb['training']:,.0f} MB in training, {mb['evaluation']:,.0f} MB including evaluation"
    yield from textwrap.wrap(f"diagnosis: {result['verdict']}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def format_all_reduce(result: dict, compress: str) -> str:
    """Return the line about the all-reduce of the gradients."""
    if "not_exchanged" not in result:
        return "all-reduce of the gradients: none (one process)"
    exposed_ms = 1e3 * (result["forward_backward"]["seconds"] - result["not_exchanged"]["seconds"])
    sent_mb = result["memory"]["gradients"] / 1e6 / (1 if compress == "none" else 2)
    as_type = "" if compress == "none" else f" as {compress}"
    exposed = f"{exposed_ms:.2f} ms" if exposed_ms > 0 else "not measurable"
    return f"all-reduce: {sent_mb:,.1f} MB of gradients{as_type}, exposed: {exposed}"


def _row(name: str, part: dict) -> str:
    return f"{name:<36} {part['images']:>8,} {1e3 * part['seconds']:>10.2f} {part['images_per_s']:>10,.0f}"
