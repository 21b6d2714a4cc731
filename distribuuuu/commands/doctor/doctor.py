"""The command doctor: arguments, progress, and the report as text or JSON."""

import argparse
import json
import os
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distribuuuu.commands.flag_hints import CommandParser, at_least, parse_flags
from distribuuuu.commands.main import USAGE_ERROR
from distribuuuu.commands.output import FORMATS, WIDTH, align_columns, print_report
from distribuuuu.commands.scan.data_config import read_data_cfg
from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.config_node import changed
from distribuuuu.config.errors import counted
from distribuuuu.config.reader import COMMAND_LINE, list_files
from distribuuuu.files.untrusted import printable
from distribuuuu.hints.sources import missing_root
from distribuuuu.inference.locate_run import locate_run
from distribuuuu.launch.host import count_cores

# Files or groups of a finding, and rows of the table of classes, that the text shows.
MAX_SHOWN, MAX_CLASSES = 5, 24
_DESCRIPTION = """Check a data set before training: damaged images, duplicates, leakage between
splits, contradicting labels, class folders, sizes. It writes and deletes
nothing. Exit status: 0 clean (notes at most), 2 problems.

  %(prog)s my_images            SPLIT/CLASS/IMAGE or CLASS/IMAGE below it
  %(prog)s --cfg configs/clothing10/resnet14.yaml
  %(prog)s my_images --format json > report.json
  %(prog)s my_images --model pypi/efficientnet_lite0     wrong labels, too
"""


def doctor(prog: str, args: list[str]) -> int:
    """Check a data set and print the report; return the exit status."""
    flags, folder, cfg = parse_args(prog, args)
    if flags.model:
        locate_run(flags.model)
    if flags.statistics:
        from distribuuuu.commands.doctor.findings import format_statistics

        cfg = cfg if folder is None else changed(cfg, {"TRAIN.DATASET": str(folder)})
        print_report(format_statistics(cfg, flags.workers, as_json=flags.format == "json"))
        return 0
    if folder is not None and not folder.is_dir():
        raise ConfigError(Problem(*missing_root("FOLDER", folder, "SPLIT/CLASS/IMAGE or CLASS/IMAGE")))
    if (cfg.DATA.CHANNELS, cfg.DATA.PIXELS) not in ((3, "uint8"), (1, "uint8")):
        message = f"got {cfg.DATA.CHANNELS} with DATA.PIXELS {cfg.DATA.PIXELS}; expected 8-bit RGB or gray images"
        raise ConfigError(Problem("DATA.CHANNELS", f"{message}; fix: --statistics, which takes any"))
    from distribuuuu.commands.doctor.findings import examine, open_cfg, open_folder
    from distribuuuu.commands.scan.duplicates import find_groups
    from distribuuuu.commands.scan.scan import scan_images
    from distribuuuu.data.decode import build_decode_options
    from distribuuuu.hints.sources import describe_files
    from distribuuuu.records.run_log import progress

    options, started = build_decode_options(cfg), time.perf_counter()
    splits = open_cfg(cfg) if folder is None else open_folder(folder)
    if any(images.targets == "structured" for images in splits.values()):
        raise ConfigError(Problem("DATA.NAME", f"got {cfg.DATA.NAME} with structured targets; expected labels"))
    if not (total := sum(map(len, splits.values()))):
        root = folder or Path(cfg.TRAIN.DATASET)
        hint = describe_files(root)
        raise ConfigError(Problem("FOLDER", f"{root}: no images; expected CLASS/IMAGE{hint}"))
    with progress(None, "measuring", total, unit="img") as bar:
        scan = scan_images(splits, options, flags.workers, bar.update)
    seconds = time.perf_counter() - started
    groups = find_groups(scan, options)
    files = " ".join(list_files(flags.cfg)) or "the defaults"
    source = str(folder) if folder is not None else f"{files}, DATA.NAME {cfg.DATA.NAME}"
    suspicious: dict[int, str] = {}
    if flags.model:
        from distribuuuu.commands.doctor.suspicious_labels import find_suspicious_labels

        suspicious = find_suspicious_labels(flags.model, splits, flags.workers)
    report = {"source": source, "seconds": round(seconds, 2), **examine(scan, groups, options, suspicious)}
    print_report(json.dumps(report, indent=1) if flags.format == "json" else format_text(report, folder))
    return USAGE_ERROR if report["status"] != "clean" else 0


def parse_args(prog: str | None, args: Sequence[str]) -> tuple[argparse.Namespace, Path | None, Any]:
    """Return the flags, the folder (None: the data of the config) and the config of a command line."""
    flags, rest, problems = parse_flags(build_parser(prog), args)
    folder = Path(rest.pop(0)) if len(rest) % 2 else None
    cfg, found = read_data_cfg(flags.cfg, rest)
    # What the flag is to find may be missing.
    problems += [one for one in found if not (flags.statistics and one.key in ("DATA.MEAN", "DATA.STD"))]
    if folder is None and not flags.cfg and not rest:
        problems.append(Problem(COMMAND_LINE, "got no data; expected FOLDER or --cfg FILE"))
    if folder is not None and flags.cfg:
        fix = f"fix: use TRAIN.DATASET {folder}"
        problems.append(Problem(COMMAND_LINE, f"got both {folder} and --cfg; expected one of them; {fix}"))
    if problems:
        raise ConfigError(problems)
    return flags, folder, cfg


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the flags; it leaves the folder and the KEY VALUE arguments."""
    usage = "%(prog)s FOLDER [flags]\n       %(prog)s --cfg FILE [flags] [KEY VALUE ...]"
    epilog = "KEY VALUE arguments change the config, e.g. DATA.MAX_PIXELS 50000000."
    parser = CommandParser(prog, description=_DESCRIPTION, usage=usage, epilog=epilog)
    add = parser.add_argument
    add("--cfg", metavar="FILE", help="check the data set of a config: TRAIN.DATASET and TEST.DATASET")
    add("--format", choices=FORMATS, default="text", help="output on standard output (text)")
    add("--statistics", action="store_true", help="only print DATA.MEAN and DATA.STD of the training images, as YAML")
    add("--model", metavar="RUN", help="also rank labels that disagree with the features of this model")
    workers = "processes that read images (one per core)"
    add("--workers", metavar="N", type=at_least(0), default=count_cores(), help=workers)
    return parser


# ---------------------------------------------------------------------------------------- text


def format_text(report: dict[str, Any], root: Path | None) -> str:
    """Return the report of `examine`, with "source" and "seconds", for a terminal; paths are relative to the root."""
    splits, kinds = report["splits"], [finding["severity"] for finding in report["findings"]]
    names = {label for split in splits.values() for label in split["classes"]}
    head = f"{report['source']}: {counted(report['images'], 'image')}, {counted(len(splits), 'split')}, "
    head += f"{counted(len(names), 'class')}; measured in {report['seconds']:.1f} s"
    verdict = f"{counted(kinds.count('problem'), 'problem')}, {counted(kinds.count('note'), 'note')}"
    suggested = " ".join(f"{key} {value}" for key, value in report["suggested"].items())
    suggested = f"suggested: {suggested}" if suggested else "no image can be decoded"
    lines = [*_wrap(head), "", *_class_table(splits), "", suggested, "", verdict]
    for finding in report["findings"]:
        lines += ["", *_wrap(f"{finding['severity'].upper()} {finding['kind']}: {finding['message']}")]
        shown = [_group_lines(group, root) for group in finding["groups"]]
        reasons = {file: _wrap(f"    {reason}", "    ") for file, reason in finding["reasons"].items()}
        shown = shown or [[_relative(file, root), *reasons.get(file, ())] for file in finding["files"]]
        lines += [f"    {line}" for item in shown[:MAX_SHOWN] for line in item]
        if len(shown) > MAX_SHOWN:
            lines.append(f"    and {len(shown) - MAX_SHOWN} more; --format json lists all")
        lines += _wrap(f"  fix: {finding['fix']}")
    return "\n".join(lines)


def _wrap(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _class_table(splits: dict[str, Any]) -> list[str]:
    """Return the images of each class in each split; of many classes, the largest and the smallest ones."""
    totals = Counter[str]()
    for split in splits.values():
        totals.update(split["classes"])
    shown = [*totals]
    if len(shown) > MAX_CLASSES:
        by_size = [label for label, _ in totals.most_common()]
        shown = [*by_size[: MAX_CLASSES // 2], "...", *by_size[-MAX_CLASSES // 2 :]]
    lines = [["class", *splits]]
    for label in shown:
        cells = ["" if label == "..." else str(split["classes"].get(label, "-")) for split in splits.values()]
        lines.append([textwrap.shorten(printable(label), 40, placeholder="..."), *cells])
    lines.append(["images", *(f"{split['images']:,}" for split in splits.values())])
    return align_columns(lines, "<" + ">" * len(splits))


def _group_lines(group: dict[str, Any], root: Path | None) -> list[str]:
    """Return the files of a group; `=` marks identical files, `~` near-duplicates."""
    sign, files = "=" if group["identical"] else "~", group["files"]
    lines = [f"{sign if number else ' '} {_relative(file['file'], root)}" for number, file in enumerate(files)]
    hidden = [f"{sign} and {counted(len(files) - MAX_SHOWN, 'file')} more"] if len(files) > MAX_SHOWN else []
    return lines[:MAX_SHOWN] + hidden


def _relative(path: str, root: Path | None) -> str:
    return printable(path.removeprefix(os.path.join(root, "")) if root else path)
