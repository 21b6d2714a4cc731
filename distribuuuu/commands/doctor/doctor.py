"""The command doctor: arguments, progress, and the report as text or JSON."""

import argparse
import json
import os
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distribuuuu.commands.flag_hints import CommandParser, parse_flags
from distribuuuu.commands.main import USAGE_ERROR
from distribuuuu.commands.output import FORMATS, WIDTH, align_columns, print_report
from distribuuuu.commands.scan.data_config import read_data_cfg
from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.config_node import changed
from distribuuuu.config.errors import counted, did_you_mean
from distribuuuu.config.reader import COMMAND_LINE, list_files
from distribuuuu.files.untrusted import printable
from distribuuuu.hints.sources import missing_root
from distribuuuu.launch.host import count_cores

# Files and groups of a finding, and rows of the table of classes, that the text shows.
MAX_FILES, MAX_GROUPS, MAX_CLASSES = 5, 5, 24
_DESCRIPTION = """Check a data set before training: damaged images, duplicates, leakage between
splits, contradicting labels, class folders, sizes, mean and std. It writes and
deletes nothing. Exit status: 0 clean (notes at most), 2 problems.

  %(prog)s my_images                 my_images/SPLIT/CLASS/IMAGE or CLASS/IMAGE
  %(prog)s --cfg configs/clothing10/resnet14.yaml
  %(prog)s my_images --format json > report.json
"""


def doctor(prog: str, args: list[str]) -> int:
    """Check a data set and print the report; return the exit status."""
    flags, folder, cfg = parse_args(prog, args)
    if flags.statistics:
        return _print_statistics(flags, cfg if folder is None else changed(cfg, {"TRAIN.DATASET": str(folder)}))
    if folder is not None and not folder.is_dir():
        raise ConfigError(Problem(*missing_root("FOLDER", folder, "SPLIT/CLASS/IMAGE or CLASS/IMAGE")))
    if (cfg.DATA.CHANNELS, cfg.DATA.PIXELS) not in ((3, "uint8"), (1, "uint8")):
        message = f"got {cfg.DATA.CHANNELS} with DATA.PIXELS {cfg.DATA.PIXELS}; expected 8-bit RGB or gray images"
        raise ConfigError(Problem("DATA.CHANNELS", f"{message}; fix: --statistics, which takes any"))
    from distribuuuu.commands.doctor.findings import examine
    from distribuuuu.commands.doctor.layout import open_cfg, open_folder
    from distribuuuu.commands.scan.duplicates import NUM_BANDS, find_groups
    from distribuuuu.commands.scan.scan import scan_images
    from distribuuuu.data.decode import build_decode_options
    from distribuuuu.hints.sources import describe_arrays, describe_table
    from distribuuuu.records.run_log import progress

    options, started = build_decode_options(cfg), time.perf_counter()
    splits = open_cfg(cfg) if folder is None else open_folder(folder)
    if any(images.targets == "structured" for images in splits.values()):
        raise ConfigError(Problem("DATA.NAME", f"got {cfg.DATA.NAME} with structured targets; expected labels"))
    if not (total := sum(map(len, splits.values()))):
        root = folder or Path(cfg.TRAIN.DATASET)
        hint = describe_table(root) or describe_arrays(root)
        raise ConfigError(Problem("FOLDER", f"{root}: no images; expected CLASS/IMAGE{hint}"))
    with progress(None, "measuring", total, unit="img") as bar:
        scan = scan_images(splits, options, flags.workers, bar.update)
    seconds = time.perf_counter() - started
    with progress(None, "comparing", NUM_BANDS, unit="band") as bar:
        groups = find_groups(scan, options, bar.update)
    files = " ".join(list_files(flags.cfg)) or "the defaults"
    source = str(folder) if folder is not None else f"{files}, DATA.NAME {cfg.DATA.NAME}"
    report = {"source": source, "seconds": round(seconds, 2), **examine(scan, groups, options)}
    print_report(json.dumps(report, indent=1) if flags.format == "json" else format_text(report, folder))
    return USAGE_ERROR if report["status"] != "clean" else 0


def _print_statistics(flags: argparse.Namespace, cfg: Any) -> int:
    from distribuuuu.commands.doctor.statistics import format_snippet, measure_channels, open_training_images
    from distribuuuu.records.run_log import progress

    images = open_training_images(cfg)
    with progress(None, "measuring", len(images), unit="img") as bar:
        found = measure_channels(cfg, images, flags.workers, bar.update)
    print_report(format_snippet(cfg, *found, as_json=flags.format == "json"))
    return 0


def parse_args(prog: str | None, args: Sequence[str]) -> tuple[argparse.Namespace, Path | None, Any]:
    """Return the flags, the folder (None: the data of the config) and the config of a command line.

    Raises:
        ConfigError: with every problem of the arguments and the config.
    """
    flags, rest, problems = parse_flags(build_parser(prog), args)
    folder = Path(rest.pop(0)) if len(rest) % 2 else None
    cfg, found = read_data_cfg(flags.cfg, rest)
    # What the flag is to find may be missing.
    problems += [one for one in found if not (flags.statistics and one.key in ("DATA.MEAN", "DATA.STD"))]
    if folder is None and not flags.cfg and not rest:
        problems.append(Problem(COMMAND_LINE, "got no data; expected FOLDER or --cfg FILE"))
    if folder is not None and flags.cfg:
        fix = f"fix: remove one, or use --cfg {' '.join(list_files(flags.cfg))} TRAIN.DATASET {folder}"
        problems.append(Problem(COMMAND_LINE, f"got both {folder} and --cfg; expected one of them; {fix}"))
    if flags.format not in FORMATS:
        hint = did_you_mean(flags.format, FORMATS)
        problems.append(Problem("--format", f"got {flags.format!r}; expected one of {', '.join(FORMATS)}{hint}"))
    if flags.workers < 0:
        problems.append(Problem("--workers", f"got {flags.workers}; expected 0 or more"))
    if problems:
        raise ConfigError(problems)
    return flags, folder, cfg


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the flags; it leaves the folder and the KEY VALUE arguments."""
    parser = CommandParser(
        prog=prog,
        description=_DESCRIPTION,
        usage="%(prog)s FOLDER [flags]\n       %(prog)s --cfg FILE [flags] [KEY VALUE ...]",
        epilog="KEY VALUE arguments change the config, e.g. DATA.MAX_PIXELS 50000000.",
    )
    add = parser.add_argument
    add("--cfg", metavar="FILE", help="check the data set of a config: TRAIN.DATASET and TEST.DATASET")
    add("--format", metavar="|".join(FORMATS), default="text", help="output on standard output (text)")
    add("--statistics", action="store_true", help="only print DATA.MEAN and DATA.STD of the training images, as YAML")
    add("--workers", metavar="N", type=int, default=count_cores(), help="processes that read images (one per core)")
    return parser


# ---------------------------------------------------------------------------------------- text


def format_text(report: dict[str, Any], root: Path | None) -> str:
    """Return the report for a terminal of 80 columns; paths are relative to the root.

    Args:
        report: of `examine`, with "source" and "seconds".
        root: the folder to remove from paths; None: none.
    """
    splits, num = report["splits"], report["images"]
    rate = num / max(report["seconds"], 1e-9)
    names = {label for split in splits.values() for label in split["classes"]}
    head = f"{report['source']}: {counted(num, 'image')}, {counted(len(splits), 'split')}, "
    head += f"{counted(len(names), 'class')}; measured in {report['seconds']:.1f} s ({rate:,.0f} images/s)"
    kinds = [finding["severity"] for finding in report["findings"]]
    verdict = f"{counted(kinds.count('problem'), 'problem')}, {counted(kinds.count('note'), 'note')}"
    lines = [*_wrap(head), "", *_class_table(splits), "", *_statistics_lines(report), "", verdict]
    for finding in report["findings"]:
        lines += ["", *_finding_lines(finding, root)]
    return "\n".join(lines)


def _wrap(text: str, indent: str = "", first: str | None = None) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent if first is None else first, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _class_table(splits: dict[str, Any]) -> list[str]:
    """Return the images of each class in each split; of many classes, the largest and the smallest ones."""
    counts: dict[str, int] = {}
    for split in splits.values():
        for label, count in split["classes"].items():
            counts[label] = counts.get(label, 0) + count
    shown = [*counts]
    if len(shown) > MAX_CLASSES:
        by_size = sorted(counts, key=lambda label: -counts[label])
        shown = [*by_size[: MAX_CLASSES // 2], "...", *by_size[-MAX_CLASSES // 2 :]]
    lines = [["class", *(name.rjust(9) for name in splits)]]
    for label in shown:
        cells = ["" if label == "..." else str(split["classes"].get(label, "-")) for split in splits.values()]
        lines.append([_shorten(label, 40), *cells])
    lines.append(["images", *(f"{split['images']:,}" for split in splits.values())])
    lines.append(["imbalance", *(str(split["imbalance"] or "-") for split in splits.values())])
    return align_columns(lines, "<" + ">" * len(splits))


def _shorten(text: str, width: int) -> str:
    text = printable(text)
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _statistics_lines(report: dict[str, Any]) -> list[str]:
    statistics = report["statistics"]
    if not statistics:
        return ["no image can be decoded"]
    lines = ["                  min      10 %    median      90 %       max"]
    names = {"width": "width, px", "height": "height, px", "shorter_side": "shorter side", "aspect_ratio": "aspect"}
    for key, name in names.items():
        lines.append(f"{name:<12}" + "".join(f"{value:>10,.5g}" for value in statistics[key].values()))
    lines += [f"mean, std    {statistics['mean']}, {statistics['std']}", "suggested    "]
    lines[-1] += " ".join(f"{key} {value}" for key, value in report["suggested"].items() if "IM_SIZE" in key)
    return lines


def _finding_lines(finding: dict[str, Any], root: Path | None) -> Iterator[str]:
    yield from _wrap(f"{finding['severity'].upper()} {finding['kind']}: {finding['message']}", "  ", "")
    if groups := finding["groups"]:
        for group in groups[:MAX_GROUPS]:
            yield from _group_lines(group, root)
        hidden = counted(len(groups) - MAX_GROUPS, "group")
    else:
        for file in finding["files"][:MAX_FILES]:
            yield f"    {_relative(file, root)}"
            if file in finding["reasons"]:
                yield from _wrap(finding["reasons"][file], "        ")
        hidden = counted(len(finding["files"]) - MAX_FILES, "file")
    if len(groups or finding["files"]) > (MAX_GROUPS if groups else MAX_FILES):
        yield f"    and {hidden} more; --format json lists all"
    yield from _wrap(f"fix: {finding['fix']}", "       ", "  ")


def _group_lines(group: dict[str, Any], root: Path | None) -> Iterator[str]:
    """Yield the files of a group; `=` marks identical files, `~` near-duplicates."""
    sign = "=" if group["identical"] else "~"
    for number, file in enumerate(group["files"][:MAX_FILES]):
        yield f"    {sign if number else ' '} {_relative(file['file'], root)}"
    if len(group["files"]) > MAX_FILES:
        yield f"    {sign} and {counted(len(group['files']) - MAX_FILES, 'file')} more"


def _relative(path: str, root: Path | None) -> str:
    if root is not None:
        path = path.removeprefix(os.path.join(root, ""))
    return printable(path)
