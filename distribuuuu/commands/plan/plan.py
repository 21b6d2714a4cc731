"""The command plan: parameters, memory and hours of a run, measured in about a minute before it starts."""

import json
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from distribuuuu.commands import arguments
from distribuuuu.commands.arguments import parse_args
from distribuuuu.commands.flag_hints import CommandParser
from distribuuuu.commands.output import FORMATS, WIDTH, print_report
from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import counted

_DESCRIPTION = """Predict what a run needs before it starts: parameters, FLOPs, steps, memory,
hours, and its bottleneck. It measures the steps for about a minute, longer if
a step takes more than a second, and writes nothing to OUT_DIR.

  %(prog)s --cfg shapes/resnet14
  %(prog)s --cfg imagenet/resnet50 --nproc 8 TRAIN.AMP bf16
  %(prog)s --cfg imagenet/resnet50 --format json > plan.json
  %(prog)s --cfg imagenet/resnet50 --modes

With --modes, it compares float32, bf16, channels_last and compiled models:
images/s, memory and the logits.
train --profile N shows the parts of the steps of a run, on any processes.

Exit status: 0; 2: an error, also if memory does not suffice.
"""


def plan(prog: str, args: list[str]) -> int:
    """Plan a run, or compare modes, and print the result; return the exit status."""
    cfg, flags = parse_args(build_parser(prog), args, train=True)
    if cfg is None:
        return 0
    if cfg.OPTIM.MAX_EPOCH < 1:
        message = f"got {cfg.OPTIM.MAX_EPOCH}; expected 1 or more: a run without epochs has no steps to measure"
        raise ConfigError(Problem("OPTIM.MAX_EPOCH", message, cfg.origins))
    if flags.modes:
        print("measuring each mode, the compiled one for minutes", file=sys.stderr, flush=True)
        from distribuuuu.commands.plan.modes import format_table, measure_table

        rows = list(measure_table(cfg))
        print_report(json.dumps(rows, indent=1) if flags.format == "json" else "\n".join(format_table(rows)))
        return 0
    print("measuring the steps for about a minute", file=sys.stderr, flush=True)
    from distribuuuu.commands.plan.measure_run import measure_and_plan

    result = {"config": flags.cfg, **measure_and_plan(cfg, flags.nproc)}
    print_report(json.dumps(result, indent=1) if flags.format == "json" else format_text(result))
    return 0


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the flags; the remaining arguments are KEY VALUE pairs."""
    parser = arguments.build_parser(_DESCRIPTION, prog)
    parser.add_argument("--modes", action="store_true", help="compare float32, bf16, channels_last and compiled models")
    parser.add_argument("--format", choices=FORMATS, default="text", help="of the output (text)")
    return parser


# ----------------------------------------------------------------------------------------- text


def format_text(result: dict[str, Any]) -> str:
    """Return the plan as a table of 80 columns."""
    lines = []
    for name, text in _list_rows(result):
        lines += textwrap.wrap(f"{name:<14}{text}", WIDTH, subsequent_indent=" " * 14, break_on_hyphens=False)
    return "\n".join(lines)


def _list_rows(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    model, images, memory, batch = (result[name] for name in ("model", "images", "memory", "batch"))
    yield "model", f"{model['arch']}, {model['params_m']:.3f} M parameters, {model['gflops']:.3g} GFLOPs per image"
    yield "images", f"{images['train']:,} to train, {images['val']:,} to evaluate"
    divided = f"{batch['micro_batch']:,} x {counted(batch['accum_steps'], 'micro-batch')}"
    yield "step", f"{counted(batch['global_batch'], 'image')} = {divided} x {counted(batch['world_size'], 'process')}"
    epochs, images_seen = counted(result["epochs"], "epoch"), result["images_seen"]
    yield "run", f"{epochs} x {result['steps_per_epoch']:,} = {result['steps']:,} steps, {images_seen:,} images"
    where = "GPU" if memory["of"] == "cuda" else "host"
    free = f"{memory['free_mib']:,.0f} MiB free on the host"
    yield "memory", f"{memory['peak_mib']:,.0f} MiB of the {where} per process; {free}"
    yield "time per step", f"{1e3 * result['step_s']:,.1f} ms"
    yield "of which", ", ".join(f"{part} {share:.0%}" for part, share in result["parts"].items())
    yield "images/s", f"{result['images_per_s']:,.0f} per process"
    if "utilization" in result:
        yield "utilization", result["utilization"]
    total = sum(result["seconds"].values())
    parts = {name: seconds / max(total, 1e-9) for name, seconds in result["seconds"].items()}
    shares = ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share >= 0.005)
    yield "hours", f"{result['hours']:.3g} ({total:,.0f} s): {shares}"
    yield "bottleneck", result["bottleneck"]
    if result["assumption"]:
        yield "assumption", result["assumption"]
