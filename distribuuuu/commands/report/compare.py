"""The command compare: is one of two runs better?"""

import glob
import json
import os
from pathlib import Path

from distribuuuu.commands.flag_hints import CommandParser
from distribuuuu.commands.output import FORMATS, print_report
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.config.run_files import local_run
from distribuuuu.inference.locate_run import locate_run

_DESCRIPTION = """Compare two finished runs on the same evaluation images: the difference of
their accuracy with its significance. JSON has the images whose answer changed.

  %(prog)s exp/baseline exp/mixup
  %(prog)s 'exp/baseline/seed_*' 'exp/mixup/seed_*' --format json

A pattern stands for the runs of one side, e.g. its seeds. The runs need
predictions.npz, which a training run writes with its last evaluation.
"""


def compare(prog: str, args: list[str]) -> int:
    """Print the result of a comparison; return the exit status."""
    flags = build_parser(prog).parse_args(args)
    sides = find_sides(flags.runs)
    from distribuuuu.commands.report.comparison import compare_runs

    found = compare_runs(sides)
    print_report(json.dumps(found, indent=2) if flags.format == "json" else found["sentence"])
    return 0


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser(prog=prog, description=_DESCRIPTION)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="OUT_DIR of a run, or a pattern for several seeds")
    parser.add_argument("--format", choices=FORMATS, default="text", help="output on standard output (text)")
    return parser


def find_sides(patterns: list[str]) -> dict[str, list[Path]]:
    """Return the runs of each side by its pattern.

    Raises:
        ConfigError: a pattern matches no run, there are other than two sides, or a run is named twice.
    """
    sides = {}
    for pattern in map(local_run, patterns):
        found = [] if os.path.isdir(pattern) else [path for path in sorted(glob.glob(pattern)) if os.path.isdir(path)]
        sides[str(Path(pattern))] = [Path(locate_run(folder).name) for folder in found or [pattern]]
    if len(sides) != 2:
        raise ConfigError(
            f"RUN: got {counted(len(sides), 'different run')}; expected two; several seeds are one pattern"
        )
    resolved = [folder.resolve() for folders in sides.values() for folder in folders]
    if repeated := [str(folder) for folder in resolved if resolved.count(folder) > 1]:
        raise ConfigError(f"RUN: got {repeated[0]} twice; expected different runs; fix: name it once")
    return sides
