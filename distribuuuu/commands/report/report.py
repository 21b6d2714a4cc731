"""The command report: an HTML page about a run."""

import json
from pathlib import Path

from distribuuuu.commands.flag_hints import CommandParser
from distribuuuu.commands.output import check_out_file, print_report
from distribuuuu.config import ConfigError
from distribuuuu.config.run_files import local_run
from distribuuuu.inference.locate_run import locate_run

_DESCRIPTION = """Make a report of a run: one HTML file with its curves, the figures of each
class, the confusion matrix and the most confident mistakes.
RUN is its OUT_DIR with predictions.npz, which distribuuuu test RUN makes.

  %(prog)s exp/r50                    writes exp/r50/report.html
  %(prog)s exp/r50 --out r50.html
  %(prog)s exp/r50 --format json      prints all figures
"""


def report(prog: str, args: list[str]) -> int:
    """Read the command line, then write the report."""
    flags = build_parser(prog).parse_args(args)
    locate_run(flags.run)
    if not 0 < flags.precision < 1:
        raise ConfigError(f"--precision: got {flags.precision:g}; expected a value above 0 and below 1")
    flags.run = local_run(flags.run)
    out = Path(flags.out).expanduser() if flags.out else Path(flags.run) / f"report.{flags.format}"
    if flags.out:
        check_out_file(out)
    from distribuuuu.launch.host import tune_malloc

    tune_malloc()
    from distribuuuu.commands.html.page import write_page
    from distribuuuu.commands.report.run_report import build_report, describe_accuracy, read_run
    from distribuuuu.records.results import replace_nonfinite

    run = read_run(flags.run, flags.predictions, flags.precision)
    if run.calibration:
        run.content.temperature = run.calibration.temperature
    if flags.format == "html":
        write_page(out, build_report(run))
        print_report("\n".join(describe_accuracy(run)))
    else:
        text = json.dumps(replace_nonfinite(run.figures), indent=1, allow_nan=False, default=str) + "\n"
        if not flags.out:
            print_report(text.rstrip())
            return 0
        write_page(out, text)
    print_report(str(out))
    return 0


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser(prog, description=_DESCRIPTION)
    add = parser.add_argument
    add("run", metavar="RUN", help="the OUT_DIR of a run")
    add("--out", metavar="FILE", help="the file to write (default: report.html in RUN; JSON: standard output)")
    add("--predictions", metavar="FILE", default="", help="the predictions of one evaluated set (default: the latest)")
    add("--precision", metavar="P", type=float, default=0.95, help="show the threshold for right answers (0.95)")
    add("--format", choices=("html", "json"), default="html", help="html (default) or json")
    return parser
