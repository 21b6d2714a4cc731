"""The command `export`: write a trained model to a folder for other programs, and check it."""

import contextlib
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from distribuuuu.commands.flag_hints import CommandParser, at_least, parse_flags
from distribuuuu.commands.output import check_out
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.config.run_files import RUN_KINDS
from distribuuuu.files.atomic_file import temporary_folder
from distribuuuu.inference.locate_run import locate_run
from distribuuuu.launch.signals import exit_now, handled_by

_DESCRIPTION = """Write the model of a run to a new folder, and check it: the code of its model
card is run on evaluation images, and its answers are compared with those of
predict.

  %(prog)s exp/r50 --format onnx --out r50_onnx
  %(prog)s exp/r50 --format timm --out r50_timm
  %(prog)s best.pth.tar --format safetensors --out r50_run --images photos

timm: for timm.create_model("local-dir:OUT", pretrained=True); safetensors: any
model, with its config; onnx: preprocessing and model in one file, from uint8
images of any size.

Exit status: 0 verified, or not checked; 1 other answers than those of predict;
2 an error.
"""
FORMATS = ("timm", "safetensors", "onnx")


def export(prog: str, args: list[str]) -> int:
    """Check the arguments, export a run and print the result; return the exit status."""
    flags, words, problems = parse_flags(build_parser(prog), args)
    folders = words[: len(words) - len(flags.overrides)]  # before --out, it was the second argument
    folders += [flags.out] if flags.out else []
    if problems or len(folders) != 1:
        raise ConfigError(problems or f"--out: got {' '.join(folders) or 'nothing'}; expected one new folder")
    locate_run(flags.run)
    from distribuuuu.commands.export.exporter import check_arguments, export_run
    from distribuuuu.inference.image_arguments import list_images
    from distribuuuu.inference.load_run import find_run
    from distribuuuu.inference.loaded_run import CPU

    out = Path(folders[0]).expanduser()
    check_out("--out", out)
    check_arguments(flags.to, out)
    files = [] if flags.no_check else list_images(flags.images) if flags.images else None

    def stop(signum: int) -> None:
        shutil.rmtree(temporary_folder(out), ignore_errors=True)
        exit_now(signum)

    with handled_by(stop) if prog else contextlib.nullcontext():  # a program has handlers of its own
        run = replace(find_run(flags.run, flags.cfg, flags.overrides), given_device=CPU)
        record = export_run(run, flags.to, out, flags.check_images, files, flags.precision)
    print(describe(record, out))
    if record["verified"] is False:
        print(f"{out}: NOT VERIFIED: {record['file']} does not answer as predict does", file=sys.stderr)
    return int(record["verified"] is False)


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the command line."""
    usage = "%(prog)s RUN --format FORMAT --out FOLDER [KEY VALUE ...]"
    parser = CommandParser(prog=prog, description=_DESCRIPTION, usage=usage)
    add = parser.add_argument
    add("run", metavar="RUN", help=RUN_KINDS)
    add("--out", metavar="FOLDER", default="", help="the new folder")
    add("--format", "--to", dest="to", choices=FORMATS, required=True, help="the format")
    either = parser.add_mutually_exclusive_group().add_argument
    either("--images", metavar="PATH", nargs="+", help="check it on these images instead of the evaluation set")
    add("--check-images", metavar="N", type=at_least(0), default=1000, help="check N images (1000); 0: all")
    either("--no-check", action="store_true", help="do not check it, e.g. where no image is at hand")
    promise = "the card gives no answer where the model is not sure; the share P of its answers is right, see calibrate"
    add("--precision", metavar="P", type=float, help=promise)
    add("--cfg", metavar="FILE", help="the config, for weights without one")
    return parser


def format_answers(record: Mapping[str, Any]) -> str:
    """Return the share of equal answers, and the number of ties if there are some."""
    ties = f", {counted(record['ties'], 'tie')}" if record["ties"] else ""
    return f"{record['equal_answers']:.2f} % equal answers{ties}"


def describe(record: dict[str, Any], out: Path) -> str:
    """Return the result of an export in a few lines."""
    lines = [f"{out / record['file']}: {record['weights']} weights of {record['source']}, float32"]
    if record["verified"] is None:
        return f"{lines[0]}\nNOT CHECKED: --images checks it on any images"
    lines.append(
        f"check: {counted(record['images'], 'image')} of {record['images_of_set']:,}; {format_answers(record)}; "
        f"difference of probabilities {record['mean_probability_difference']:.2g} on average, at most "
        f"{record['max_probability_difference']:.2g}"
    )
    lines += [f"the code of the card has failed: {record['error']}"] if "error" in record else []
    return "\n".join(lines)
