"""The command `export`: write a trained model to a folder for other programs, and check it."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from distribuuuu.checkpoint.weights_files import KINDS, RAW
from distribuuuu.commands.flag_hints import CommandParser
from distribuuuu.commands.output import check_out
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.files.new_folder import delete_temporary_folders
from distribuuuu.launch.signals import exit_now, handled_by

_DESCRIPTION = """Write the model of a run to a new folder, and check it: the code of its model
card is run on evaluation images, and its answers are compared with those of
predict.

  %(prog)s exp/r50 --to timm r50_timm
  %(prog)s exp/r50 --to onnx r50_onnx
  %(prog)s exp/r50 --to timm r50_timm --push OWNER/NAME

timm: for timm.create_model("local-dir:OUT", pretrained=True); safetensors: any
model, with its config; onnx: preprocessing and model in one file, from uint8
images of any size; torch: a program of torch.export.
Exit status: 0 verified; 1 other answers than those of predict; 2 an error.
"""
FORMAT_NAMES = ("timm", "safetensors", "onnx", "torch")


def export(prog: str, args: list[str]) -> int:
    """Export a run; return the exit status."""
    return run_export(build_parser(prog).parse_args(args))


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = CommandParser(prog=prog, description=_DESCRIPTION)
    add = parser.add_argument
    add("run", metavar="RUN", help="an OUT_DIR, a checkpoint, an exported folder, or timm/NAME")
    add("out", metavar="OUT", help="the new folder")
    add("--to", metavar="|".join(FORMAT_NAMES), default="", help="the format")
    add("--check-images", metavar="N", type=int, default=1000, help="check N evenly spaced images (1000); 0: all")
    add("--push", metavar="OWNER/NAME", default="", help="publish a verified export on the Hugging Face Hub")
    add("--cfg", metavar="FILE", help="the config, for weights without one")
    return parser


def run_export(flags: argparse.Namespace) -> int:
    """Check the arguments, load the run, export it and print the result; return the exit status.

    Raises:
        ConfigError: see `export_run`.
    """
    if flags.check_images < 0:
        raise ConfigError(f"--check-images: got {flags.check_images}; expected 1 or more, or 0 for all images")
    from distribuuuu.commands.export.card_code import list_limits
    from distribuuuu.commands.export.exporter import check_arguments, check_format, export_run
    from distribuuuu.inference.load_run import find_run
    from distribuuuu.inference.loaded_run import CPU

    out = Path(flags.out).expanduser()
    check_out("OUT", out)
    check_arguments(flags.to, out, flags.push)

    def stop(signum: int) -> None:
        delete_temporary_folders(out)
        exit_now(signum)

    with handled_by(stop):
        run = replace(find_run(flags.run, flags.cfg, flags.overrides), given_device=CPU)
        check_format(run, flags.to)
        for limit in list_limits(run, flags.to):
            print(f"--to {flags.to}: {limit}", file=sys.stderr)
        record = export_run(run, flags.to, out, flags.check_images, flags.push)
    print(describe(record, out, flags.push))
    if not record["verified"]:
        print(f"{out}: NOT VERIFIED: {record['file']} does not answer as predict does", file=sys.stderr)
    return 0 if record["verified"] else 1


def describe(record: dict[str, Any], out: Path, push: str = "") -> str:
    """Return the result of an export in a few lines."""
    metric = "top1" if "top1" in record else "map"
    both = record[metric]
    averages = {name: f"averaged weights ({name.upper()})" for name in KINDS}
    weights = {**averages, RAW: "raw weights"}.get(record["weights"], record["weights"])
    lines = [
        f"{out / record['file']}: {weights} of {record['source']}, float32",
        f"check: {counted(record['images'], 'image')} of {record['images_of_set']:,}; equal answers "
        f"{record['equal_answers']:.2f} %; difference of probabilities {record['mean_probability_difference']:.2g} on "
        f"average, at most {record['max_probability_difference']:.2g}",
        f"{metric}: predict {both['run']:.3f}, code of the card {both['export']:.3f}",
    ]
    lines += [f"the code of the card has failed: {record['error']}"] if "error" in record else []
    if push and record["verified"]:
        lines.append(f"published: {push}")
    return "\n".join(lines)
