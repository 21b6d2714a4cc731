"""The command plan: parameters, memory, hours and disk of a run, measured in about a minute before it starts."""

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from distribuuuu.commands.arguments import run_guarded
from distribuuuu.commands.flag_hints import CommandParser, parse_flags
from distribuuuu.commands.output import FORMATS, WIDTH, print_report
from distribuuuu.config import Config, ConfigError, Problem
from distribuuuu.config.errors import counted, did_you_mean
from distribuuuu.config.reader import COMMAND_LINE, read_cfg
from distribuuuu.engine.preflight import find_run_problems, resolve_num_classes
from distribuuuu.launch.detect import detect_launch

SUMMARY = "predict the hours, memory and disk of a run"
_DESCRIPTION = """Predict what a run needs before it starts: parameters, FLOPs, steps, memory, hours,
disk, and its bottleneck. It measures the steps of the run for about a minute,
longer if a step takes more than a second, and writes nothing to OUT_DIR.

  %(prog)s --cfg shapes/resnet14
  %(prog)s --cfg imagenet/resnet50 --gpus 8 TRAIN.AMP bf16
  %(prog)s --cfg imagenet/resnet50 --format json > plan.json
  %(prog)s --cfg fashion_mnist/resnet14 --tune

With --tune, the options that make it faster without changing the recipe are measured
too, which takes some minutes, and the command line with those that help is printed.
"""


def plan(prog: str, args: list[str]) -> int:
    """Plan a run and print the plan; return the exit status."""
    return run_guarded(lambda: _run(prog, args))


def _run(prog: str, args: list[str]) -> int:
    flags, cfg = parse_args(prog, args)
    from distribuuuu.commands.plan.measure_run import measure_and_plan

    result = {"config": flags.cfg, **measure_and_plan(cfg, flags.gpus)}
    if flags.tune:
        from distribuuuu.commands.plan.tune import tune_plan

        result["tuning"] = tune_plan(cfg, result, flags.overrides)
    print_report(json.dumps(result, indent=1) if flags.format == "json" else format_text(result))
    return 0


def parse_args(prog: str | None, args: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """Return the flags and the checked config of a command line.

    Raises:
        ConfigError: with every problem of the flags, the options, the paths and the data.
    """
    flags, cfg, problems = parse_flags_and_cfg(prog, args)
    if flags.format not in FORMATS:
        hint = did_you_mean(flags.format, FORMATS)
        problems.append(Problem("--format", f"got {flags.format!r}; expected one of {', '.join(FORMATS)}{hint}"))
    if flags.gpus < 1:
        problems.append(Problem("--gpus", f"got {flags.gpus}; expected 1 or more"))
    elif detect_launch().world_size > 1:
        problems.append(Problem(COMMAND_LINE, "got a launcher; expected one process; fix: --gpus N without it"))
    if cfg.OPTIM.MAX_EPOCH < 1:
        message = f"got {cfg.OPTIM.MAX_EPOCH}; expected 1 or more: a run without epochs has no steps to measure"
        problems.append(Problem("OPTIM.MAX_EPOCH", message, cfg.origins))
    problems += find_run_problems(cfg, True, max(1, flags.gpus), set_keys_only=bool(problems))
    if problems:
        raise ConfigError(problems)
    return flags, resolve_num_classes(cfg)


def parse_flags_and_cfg(prog: str | None, args: Sequence[str]) -> tuple[argparse.Namespace, Config, list[Problem]]:
    """Return the flags, the config, and the problems of both, without looking at files other than the config's."""
    flags, overrides, problems = parse_flags(build_parser(prog), args, lambda words: words == "OPTIM.MAX_EPOCH 0")
    flags.overrides = overrides
    cfg, found = read_cfg(flags.cfg, flags.overrides)
    return flags, cfg, problems + found


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the flags; the remaining arguments are KEY VALUE pairs."""
    parser = CommandParser(prog=prog, description=_DESCRIPTION, usage="%(prog)s [--cfg FILE] [flags] [KEY VALUE ...]")
    parser.add_argument(
        "--cfg", metavar="FILE", help="YAML file of the options other than the defaults; several are merged"
    )
    parser.add_argument("--gpus", metavar="N", type=int, default=1, help="extrapolate to N processes (1)")
    parser.add_argument("--tune", action="store_true", help="measure options that make the run faster")
    parser.add_argument("--format", metavar="|".join(FORMATS), default="text", help="output on standard output (text)")
    return parser


# ----------------------------------------------------------------------------------------- text


def format_text(result: dict[str, Any]) -> str:
    """Return the plan as a table of 80 columns."""
    lines = []
    for name, text in _list_rows(result):
        # The lines of a command are continued, so that they can be copied.
        end, width = (" \\", WIDTH - 2) if name == "command" else ("", WIDTH)
        wrapped = textwrap.wrap(f"{name:<14}{text}", width, subsequent_indent=" " * 14, break_on_hyphens=False)
        lines += [f"{line}{end}" for line in wrapped[:-1]] + wrapped[-1:]
    return "\n".join(lines)


def _list_rows(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    model, images, memory, batch = (result[name] for name in ("model", "images", "memory", "batch"))
    yield "model", f"{model['arch']}, {model['params_m']:.3f} M parameters, {model['gflops']:.3g} GFLOPs per image"
    yield "images", f"{images['train']:,} to train, {images['val']:,} to evaluate"
    divided = f"{batch['micro_batch']:,} x {counted(batch['accum_steps'], 'micro-batch')}"
    yield "step", f"{counted(batch['global_batch'], 'image')} = {divided} x {counted(batch['world_size'], 'process')}"
    epochs, images_seen = counted(result["epochs"], "epoch"), result["images_seen"]
    yield "run", f"{epochs} x {result['steps_per_epoch']:,} = {result['steps']:,} steps, {images_seen:,} images"
    known = f"{memory['predicted_mib']:,.0f} MiB predicted from smaller batches; " if memory["predicted_mib"] else ""
    where = "GPU" if memory["of"] == "cuda" else "host"
    free = f"{memory['free_mib']:,.0f} MiB free on the host"
    yield "memory", f"{memory['peak_mib']:,.0f} MiB of the {where} per process; {known}{free}"
    if "hours" not in result:
        if result["assumption"]:
            yield "assumption", result["assumption"]
        yield "does not fit", "fix: TRAIN.BATCH_SIZE auto with TRAIN.GLOBAL_BATCH_SIZE, or a smaller TRAIN.BATCH_SIZE"
        return
    steps = ", ".join(f"{1e3 * seconds:,.4g} ms at {size} px" for size, seconds in result["step_s"].items())
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
    if result["unused"]:
        yield "not in use", f"{', '.join(result['unused'])}; --tune measures the gain of each"
    if "tuning" in result:
        from distribuuuu.commands.plan.tune import list_rows

        yield from list_rows(result["tuning"])
