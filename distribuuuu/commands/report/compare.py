"""The command compare: is one of two runs better?"""

import json
from pathlib import Path

from distribuuuu.commands.flag_hints import CommandParser
from distribuuuu.commands.output import FORMATS, print_report
from distribuuuu.config import ConfigError
from distribuuuu.config.run_files import local_run
from distribuuuu.inference.locate_run import locate_run

_DESCRIPTION = """Compare two finished runs on the same evaluation images: the difference of
their accuracy with its significance. JSON has the images whose answer changed.

  %(prog)s exp/baseline exp/mixup
  %(prog)s exp/baseline exp/mixup --format json

The runs need predictions.npz, which a training run writes with its last
evaluation. distribuuuu table has the intervals of several seeds.
"""


def compare(prog: str, args: list[str]) -> int:
    """Print the result of a comparison; return the exit status."""
    flags = build_parser(prog).parse_args(args)
    folders = [Path(locate_run(local_run(run)).name) for run in (flags.run_a, flags.run_b)]
    if folders[0].resolve() == folders[1].resolve():
        raise ConfigError(f"RUN: got {folders[0]} twice; expected different runs")
    from distribuuuu.commands.report.comparison import compare_runs

    found = compare_runs(*folders)
    print_report(json.dumps(found, indent=2) if flags.format == "json" else found["sentence"])
    return 0


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser(prog=prog, description=_DESCRIPTION)
    for name in ("run_a", "run_b"):
        parser.add_argument(name, metavar="RUN", help="the OUT_DIR of a run")
    parser.add_argument("--format", choices=FORMATS, default="text", help="output on standard output (text)")
    return parser
