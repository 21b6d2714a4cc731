"""The command split: lists of training, validation and test images of a folder or a table without splits."""

import argparse
import contextlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from distribuuuu.commands.flag_hints import CommandParser, at_least, parse_flags
from distribuuuu.commands.output import align_columns, check_out
from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import counted
from distribuuuu.config.reader import COMMAND_LINE
from distribuuuu.files.untrusted import open_regular, printable
from distribuuuu.hints.sources import missing_root

# Headers of images, evenly spaced, that are read for the suggested sizes.
MAX_HEADERS = 1000

_DESCRIPTION = """Split a folder with one sub-folder of images per class, or a table of paths and
classes, into lists, which DATA.NAME list reads. No image is copied, moved or
deleted. The classes keep their shares in each list. The split depends on the
names and the seed only, and equal files are never divided.

  %(prog)s my_images --val 0.2 --out my_lists
  %(prog)s my_images --val 0.1 --group-by '^(patient\\d+)' --out my_lists
  %(prog)s my_images --folds 5 --out my_folds
  %(prog)s dogs.csv --val 0.2 --out dog_lists DATA.TABLE.path id
"""


def split(prog: str, args: list[str]) -> int:
    """Write the lists of a split, and print their sizes and the command to train with them; return the exit status."""
    flags, words, problems = parse_flags(build_parser(prog), args)
    from distribuuuu.files.image_files import TABLE_ENDINGS

    source = Path(flags.folder)
    is_table = source.is_file() and source.suffix.lower() in TABLE_ENDINGS
    if words and not is_table:
        problems.append(Problem(COMMAND_LINE, f"got {' '.join(words)}; expected KEY VALUE pairs after a table only"))
    if (flags.val or 0) + flags.test >= 1:
        problems.append(Problem("--val, --test", f"got {flags.val} and {flags.test}; no image is left to train on"))
    if problems:
        raise ConfigError(problems)
    check_out("--out", flags.out)
    if not source.exists():
        raise ConfigError(Problem(*missing_root("FOLDER", source, "CLASS/IMAGE")))
    from distribuuuu.commands.scan.splitting import list_images, list_table_images, plan_split, write_split

    try:
        images = list_table_images(source, words) if is_table else list_images(source)
        files, notes = plan_split(images, flags.val or 0.0, flags.test, flags.folds, flags.group_by, flags.seed)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}") from error
    write_split(images, Path(flags.out), files)
    total = len(images.names)
    lines = [f"{counted(total, 'image')} of {counted(len(images.classes), 'class')} in {flags.folder}"]
    sizes = []
    for name, indices in files.items():
        num_classes = len({images.labels[index] for index in indices})
        share = f"{100 * len(indices) / total:.1f} %"
        sizes.append([f"  {name}", f"{len(indices):>9,}", f"{share:>7}", counted(num_classes, "class")])
    folder = str(Path(flags.out, "fold_1") if flags.folds else Path(flags.out))
    out_dir = os.path.join("exp", Path(flags.out).resolve().name)
    words = ["DATA.NAME", "list", "TRAIN.DATASET", folder, "TEST.DATASET", folder, "OUT_DIR", out_dir]
    command = shlex.join(words + _suggest_sizes([images.folder / name for name in images.names]))
    own = prog.rpartition(" ")[0] or "distribuuuu"
    steps = f"to fine-tune: {own} finetune {shlex.quote(folder)}", f"to train: {own} train --cfg photographs {command}"
    print(*map(printable, (*lines, *align_columns(sizes, "<>>"), *notes, *steps)), sep="\n")
    return 0


def _suggest_sizes(paths: Sequence[Path]) -> list[str]:
    """Return the words of the sizes that suit the images, by the headers of some; [] for those of the config.

    Small images are enlarged to 128 px: the weights of the config were trained with 224.
    """
    from distribuuuu.commands.scan.scan import LEAST_SIDE, USUAL_SIDE, suggest_sizes
    from distribuuuu.data.decode import open_image

    shorter = []
    for path in paths[:: -(-len(paths) // MAX_HEADERS)]:
        with contextlib.suppress(Exception), open_regular(path) as file:  # the images are checked by doctor
            shorter.append(min(open_image(file).size))
    least = sorted(shorter)[round((len(shorter) - 1) / 10)] if shorter else USUAL_SIDE
    sizes = suggest_sizes(max(least, LEAST_SIDE)) if least < USUAL_SIDE else {}
    return [str(word) for size in sizes.items() for word in size]


def build_parser(prog: str) -> CommandParser:
    """Return the parser of the command line."""
    usage = "%(prog)s FOLDER|TABLE --out FOLDER [flags] [KEY VALUE ...]"
    epilog = "KEY VALUE arguments name the columns of a table: DATA.TABLE of --help-config."
    parser = CommandParser(prog, description=_DESCRIPTION, usage=usage, epilog=epilog)
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="the images: FOLDER/CLASS/IMAGE, at any depth below CLASS; or a table: .csv, "
        ".tsv or .txt")  # fmt: skip
    add("--out", metavar="FOLDER", required=True, help="folder of the lists")
    either = parser.add_mutually_exclusive_group(required=True).add_argument
    either("--val", metavar="SHARE", type=_share, help="share of the validation images, above 0 and below 1")
    either("--folds", metavar="K", type=at_least(2), default=0, help="K splits for cross-validation, instead of --val")
    add("--test", metavar="SHARE", type=_share, default=0.0, help="share of the test images (none)")
    add("--group-by", metavar="REGEX", default="", help="images with the same first capture group, or else the same "
        "match, in their names (relative to the class folder) stay in one split")  # fmt: skip
    add("--seed", metavar="N", type=int, default=0, help="another seed gives another split (0)")
    return parser


def _share(text: str) -> float:
    """Return the value of a flag."""
    if not 0 < (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"got {text}; expected a share above 0 and below 1")
    return value
