"""The command pack: arguments, checks before an image is read, exit status."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distribuuuu.commands.flag_hints import CommandParser, at_least, parse_flags
from distribuuuu.commands.output import stop_with
from distribuuuu.commands.pack.packer import DEFAULT_QUALITY, OWN_FILES, SPLITS, PackJob, find_conflict, pack_split
from distribuuuu.commands.scan.data_config import read_data_cfg
from distribuuuu.config import Config, ConfigError, Problem, get_cfg
from distribuuuu.config.config_node import iter_options
from distribuuuu.config.registry import DATASETS
from distribuuuu.config.run_files import find_path_problem
from distribuuuu.data.packed.format import FORMATS
from distribuuuu.launch.host import count_cores
from distribuuuu.launch.signals import handled_by

_DESCRIPTION = """Pack a data set into a few large files. DATA.NAME packed TRAIN.DATASET OUT reads
OUT/train and OUT/val. A pack that was stopped is replaced by the next run.

  %(prog)s OUT TRAIN.DATASET my_images
"""


def pack(prog: str, args: list[str]) -> int:
    """Read the command line, then pack; return the exit status."""
    with handled_by(stop_with("the pack is incomplete, and the next run replaces it")):
        try:
            job = parse_args(args, prog)
            for train in job.trains:
                pack_split(job, train)
        except OSError as error:  # a folder that cannot be listed, a file that cannot be deleted
            raise ConfigError(f"{error.filename or '--'}: {error.strerror or error}") from error
    return 0


def parse_args(words: list[str], prog: str | None = None) -> PackJob:
    """Return the job that a command line describes; raise ConfigError with every problem of it, its data and OUT."""
    parser = build_parser(prog)
    args, rest, unknown = parse_flags(parser, words)
    if unknown:
        raise ConfigError(unknown)
    if not rest or rest[0] in dict(iter_options(get_cfg())):
        raise ConfigError(f"command line: name the folder of the packed data first: {parser.prog} OUT ...")
    cfg, found = read_data_cfg(args.cfg, rest[1:])
    problems: list[str | Problem] = [*found, *find_flag_problems(args)]
    job = PackJob(Path(rest[0]), args, cfg, _options_of(args, cfg))
    problems += _source_problems(job, set_keys_only=bool(problems))
    problems += _out_problems(job)
    if problems:
        raise ConfigError(problems)
    return job


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the flags; it leaves the folder and the KEY VALUE arguments."""
    usage = "%(prog)s OUT [--cfg FILE] [flags] [KEY VALUE ...]"
    epilog = "KEY VALUE arguments name the source, e.g. TRAIN.DATASET my_images"
    parser = CommandParser(prog, description=_DESCRIPTION, usage=usage, epilog=epilog)
    add = parser.add_argument
    add("--cfg", metavar="FILE", help="YAML file that names the source: DATA.NAME, TRAIN.DATASET, TEST.DATASET ...")
    add("--format", choices=FORMATS, default="jpeg", help="files (jpeg, the default) or pixels (raw)")
    add("--shorter-side", metavar="N", type=at_least(1), help="scale larger images down to this many pixels")
    add("--quality", metavar="Q", type=int, help="encode again as JPEG; 90 where a new size makes it necessary")
    add("--shard-mb", metavar="MB", type=float, default=1024.0, help="maximum size of a file (1024)")
    workers = "processes that encode (default: one per core); 0: none"
    add("--workers", metavar="N", type=at_least(0), default=count_cores(), help=workers)
    add("--split", choices=SPLITS, default="both", help="which images to pack (both)")
    return parser


def _options_of(args: argparse.Namespace, cfg: Config) -> dict[str, Any]:
    """Return the options of a pack as its index stores them."""
    encodes = args.format == "jpeg" and args.shorter_side is not None
    quality = DEFAULT_QUALITY if encodes and args.quality is None else args.quality
    options = {"format": args.format, "shorter_side": args.shorter_side, "quality": quality, "shard_mb": args.shard_mb}
    if cfg.DATA.EXIF_ROTATE and (quality is not None or args.format == "raw"):  # a file kept unchanged keeps its EXIF
        options["exif_rotate"] = True
    return options


def find_flag_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield a message for each invalid flag."""
    if args.format == "raw" and args.quality is not None:
        yield f"--quality {args.quality}: --format raw stores pixels, which have no quality; remove one of them"
    if args.quality is not None and not 1 <= args.quality <= 100:
        yield f"--quality {args.quality} is outside the allowed range: 1 to 100"
    if not 0 < args.shard_mb < 2**40:
        yield f"--shard-mb {args.shard_mb} must be above 0"


def _source_problems(job: PackJob, set_keys_only: bool) -> Iterator[Problem]:
    """Yield the problems with the source files; the number of classes of the model does not matter here."""
    cfg = job.cfg
    if cfg.DATA.NAME not in DATASETS:  # reported already
        return
    find = DATASETS.get(cfg.DATA.NAME).find_problems
    for key, message in dict.fromkeys(found for train in job.trains for found in find(cfg, train)):
        if key != "MODEL.NUM_CLASSES" and (key in cfg.origins or not set_keys_only):
            yield Problem(key, message, cfg.origins)


def _out_problems(job: PackJob) -> Iterator[str]:
    if path_problem := find_path_problem(job.out):
        yield f"OUT: {path_problem}"
        return
    for train in job.trains:
        folder, source = job.folder(train), job.source(train)
        if os.path.realpath(folder) == os.path.join(source["folder"], source["split"]):
            yield f"{folder} is the source itself; use another folder"
            continue
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
        if foreign := [name for name in names if not OWN_FILES.fullmatch(name) and not name.startswith(".")]:
            yield f"{folder} holds other files, e.g. {foreign[0]}; use another folder"
        elif conflict := find_conflict(folder, {"options": job.options, "source": source}):
            yield conflict
