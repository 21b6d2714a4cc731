"""The command compare: what differs between runs, and whether one is better."""

import json
from pathlib import Path

from distribuuuu.commands.flag_hints import CommandParser
from distribuuuu.commands.output import FORMATS, print_report
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted, did_you_mean
from distribuuuu.config.run_files import local_run
from distribuuuu.inference.locate_run import locate_run

_DESCRIPTION = """Compare two or more finished runs on the same evaluation images: difference of
accuracy with its significance. JSON has the images whose answer changed.

  %(prog)s exp/baseline exp/mixup
  %(prog)s 'exp/baseline/seed_*' 'exp/mixup/seed_*' --format json

A pattern stands for the runs of one side, e.g. its seeds. The runs need
predictions.npz, which a training run writes with its last evaluation.
"""
_MAX_SIDES = 8


def compare(prog: str, args: list[str]) -> int:
    """Print the result of a comparison; return the exit status."""
    flags = build_parser(prog).parse_args(args)
    sides = find_sides(flags.runs)
    for folder in (folder for folders in sides.values() for folder in folders):
        locate_run(str(folder))
    from distribuuuu.commands.report.comparison import compare_runs

    found = compare_runs(sides)
    print_report(json.dumps(found, indent=2) if flags.format == "json" else "\n".join(found["sentences"]))
    return 0


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser(prog=prog, description=_DESCRIPTION)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="OUT_DIR of a run, or a pattern for several seeds")
    parser.add_argument("--format", choices=FORMATS, default="text", help="output on standard output (text)")
    return parser


def find_sides(patterns: list[str]) -> dict[str, list[Path]]:
    """Return the runs of each side, by a short name of the side.

    Raises:
        ConfigError: a pattern matches no run, there are fewer than two sides, or a run is named twice.
    """
    patterns, problems, sides = [local_run(pattern) for pattern in patterns], [], {}
    for pattern in patterns:
        start = Path("/") if pattern.startswith("/") else Path()
        folders = [Path(pattern)] if Path(pattern).is_dir() else sorted(start.glob(pattern.lstrip("/")))
        folders = [folder for folder in folders if folder.is_dir()]
        if not folders:
            parent = Path(pattern).parent
            names = [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
            problems.append(f"RUN: no such folder: {pattern}{did_you_mean(Path(pattern).name, names)}")
        sides[str(Path(pattern))] = folders
    if not problems and len(sides) < 2:
        problems.append(f"RUN: got {counted(len(sides), 'different run')}; expected two or more")
    if len(sides) > _MAX_SIDES:
        problems.append(f"RUN: got {len(sides)} runs; expected {_MAX_SIDES} or fewer")
    resolved = [folder.resolve() for folders in sides.values() for folder in folders]
    if repeated := [str(folder) for folder in resolved if resolved.count(folder) > 1]:
        problems.append(f"RUN: got {repeated[0]} twice; expected different runs; fix: name it once")
    if problems:
        raise ConfigError(problems)
    return dict(zip(_short_names(list(sides)), sides.values(), strict=True))


def _short_names(patterns: list[str]) -> list[str]:
    """Return the patterns without the folders that all of them begin or end with."""
    parts = [Path(pattern).parts for pattern in patterns]
    for side in (0, -1):
        while all(len(own) > 1 and own[side] == parts[0][side] for own in parts):
            parts = [own[1:] if side == 0 else own[:-1] for own in parts]
    return [str(Path(*own)) for own in parts]
