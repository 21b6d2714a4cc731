"""The command plan: parameters, memory, hours and disk of a run, measured in about a minute before it starts."""

import json
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from distribuuuu.commands import arguments
from distribuuuu.commands.arguments import parse_args, run_on_config
from distribuuuu.commands.flag_hints import CommandParser
from distribuuuu.commands.output import FORMATS, WIDTH, print_report
from distribuuuu.config import Config, ConfigError, Problem
from distribuuuu.config.errors import counted

_DESCRIPTION = """Predict what a run needs before it starts: parameters, FLOPs, steps, memory,
hours, disk, and its bottleneck. It measures the steps for about a minute,
longer if a step takes more than a second, and writes nothing to OUT_DIR.

  %(prog)s --cfg shapes/resnet14
  %(prog)s --cfg imagenet/resnet50 --nproc 8 TRAIN.AMP bf16
  %(prog)s --cfg imagenet/resnet50 --format json > plan.json
  %(prog)s --cfg imagenet/resnet50 --steps

With --steps, it measures the parts of a training step instead: model, loader,
both together and the all-reduce, on the processes of --nproc or of a launcher,
and names the bottleneck. It also writes them to OUT_DIR/timing.json.

Exit status: 0; 2: an error, also if memory does not suffice.
"""


def plan(prog: str, args: list[str]) -> int:
    """Plan a run, or measure its steps, and print the result; return the exit status."""
    if "--steps" in args:
        return time(prog, [word for word in args if word != "--steps"])
    cfg, flags = parse_args(build_parser(prog), args, train=True)
    if cfg is None:
        return 0
    if cfg.OPTIM.MAX_EPOCH < 1:
        message = f"got {cfg.OPTIM.MAX_EPOCH}; expected 1 or more: a run without epochs has no steps to measure"
        raise ConfigError(Problem("OPTIM.MAX_EPOCH", message, cfg.origins))
    print("measuring the steps for about a minute", file=sys.stderr, flush=True)
    from distribuuuu.commands.plan.measure_run import measure_and_plan

    result = {"config": flags.cfg, **measure_and_plan(cfg, flags.nproc)}
    print_report(json.dumps(result, indent=1) if flags.format == "json" else format_text(result))
    return 0


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the flags; the remaining arguments are KEY VALUE pairs."""
    parser = arguments.build_parser(_DESCRIPTION, prog)
    parser.add_argument("--steps", action="store_true", help="measure the parts of a step instead, as distribuuuu time")
    parser.add_argument("--format", choices=FORMATS, default="text", help="of the output, not with --steps (text)")
    return parser


def time(prog: str, args: list[str]) -> int:
    """Measure the parts of a training step; return the exit status."""
    return run_on_config(arguments.build_parser(_DESCRIPTION, prog), args, _measure_steps, train=True)


def _measure_steps(cfg: Config, flags: Namespace) -> None:
    from distribuuuu.commands.plan.steps import measure_steps

    measure_steps(cfg)


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
    steps = ", ".join(f"{1e3 * seconds:,.1f} ms at {size} px" for size, seconds in result["step_s"].items())
    yield "time per step", steps
    speeds = {name: speed for name, speed in result["images_per_s"].items() if speed}
    yield "images/s", ", ".join(f"{name} {speed:,.0f}" for name, speed in speeds.items()) + " per process"
    total = sum(result["seconds"].values())
    parts = {name: seconds / max(total, 1e-9) for name, seconds in result["seconds"].items()}
    shares = ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share >= 0.005)
    yield "hours", f"{result['hours']:.3g} ({total:,.0f} s): {shares}"
    files = f"{counted(result['checkpoints'], 'checkpoint')} of {result['checkpoint_mib']:,.1f} MiB"
    yield "disk", f"{result['disk_mib']:,.1f} MiB: at most {files}, best weights {result['best_mib']:,.1f} MiB"
    yield "bottleneck", result["bottleneck"]
    if result["assumption"]:
        yield "assumption", result["assumption"]
