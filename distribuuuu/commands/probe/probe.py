"""The command probe: top-1 of k-NN and of a linear classifier on the features of a run."""

import itertools
import json
import os
import sys
from pathlib import Path

from distribuuuu.commands.flag_hints import CommandParser
from distribuuuu.commands.output import check_out_file, print_report
from distribuuuu.config.run_files import RUN_KINDS
from distribuuuu.files.untrusted import printable
from distribuuuu.inference.locate_run import locate_run
from distribuuuu.launch.host import tune_malloc

_DESCRIPTION = """Measure the features of a trained model without training it: classify the
evaluation images by their nearest training images, and by a linear classifier
that is fitted to the training images.

  %(prog)s exp/r50
  %(prog)s timm/resnet50 TRAIN.DATASET flowers TEST.DATASET flowers
"""


def probe(prog: str, args: list[str]) -> int:
    """Read the command line, then print and write the result."""
    flags = build_parser(prog).parse_args(args)
    is_published = locate_run(flags.run).is_published
    tune_malloc()
    from distribuuuu.commands.html.page import write_page
    from distribuuuu.commands.probe.feature_probe import probe_run
    from distribuuuu.engine.fast_mode import AUTO_MODE
    from distribuuuu.inference.load_run import find_run

    # Published weights have no mode of their own. A run is measured in its mode, as its evaluations are.
    auto = itertools.chain(*AUTO_MODE.items()) if is_published else ()
    run = find_run(flags.run, flags.cfg, [*auto, *flags.overrides])
    folder = run.cfg.OUT_DIR if os.path.isdir(run.cfg.OUT_DIR) else "."  # of published weights
    print(printable(run.describe()), file=sys.stderr)
    out = Path(flags.out or Path(folder, "probe.json"))
    check_out_file(out)
    result = probe_run(run)
    text = json.dumps(result, indent=1) + "\n"
    counts = "{features:,} features per image; {num_train:,} training and {num_test:,} evaluation images"
    lines = [counts.format(**result)]
    for name, (low, high) in result["interval"].items():
        lines.append(f"{name:<12}  top-1 {result['top1'][name]:6.2f}   95 % interval {low:.2f} to {high:.2f}")
    print_report(text.rstrip() if flags.format == "json" else "\n".join(lines))
    write_page(out, text)
    return 0


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser(prog, description=_DESCRIPTION, usage="%(prog)s RUN [flags] [KEY VALUE ...]")
    add = parser.add_argument
    add("run", metavar="RUN", help=RUN_KINDS)
    add("--out", metavar="FILE", help="the file to write (default: probe.json beside the weights)")
    add("--format", choices=("text", "json"), default="text", help="text (default) or json")
    add("--cfg", metavar="FILE", help="config for weights that contain none")
    return parser
