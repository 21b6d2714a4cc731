"""The command predict: classes of image files, by a trained model."""

import os
import sys
from pathlib import Path

from distribuuuu.commands.flag_hints import CommandParser, at_least
from distribuuuu.commands.output import BROKEN_IMAGES, stop_with
from distribuuuu.config.run_files import RUN_KINDS
from distribuuuu.files.untrusted import printable
from distribuuuu.inference.locate_run import locate_run
from distribuuuu.launch.host import count_cores, tune_malloc
from distribuuuu.launch.signals import handled_by

_DESCRIPTION = """Predict the classes of images with a trained model. RUN is the OUT_DIR of a run,
a checkpoint, an exported folder, or the name of published weights (timm/NAME).
PATHS are files, folders, quoted patterns, and text files (.txt) with a path per
line; - reads the paths from standard input.

  %(prog)s exp/r50 photos --out photos.csv
  %(prog)s timm/resnet50 photo.jpg 'album/**/*.png' --topk 3
  %(prog)s exp/r50 photos --precision 0.95     no answer where it is not sure

Rerun the same command to resume it after a stop. The exit status is 3 if images
are broken; they are listed with their cause.
"""


def predict(prog: str, args: list[str]) -> int:
    """Read the command line, then predict."""
    flags = build_parser(prog).parse_args(args)
    from distribuuuu.commands.scan.journal import check_output_file
    from distribuuuu.inference.image_arguments import describe_left_out, list_images

    flags.out = Path(flags.out) if flags.out else None
    if flags.out:
        check_output_file(flags.out, ".csv")
    locate_run(flags.run)
    flags.files = list_images(flags.paths)
    if flags.batch_size:
        flags.overrides += ["TEST.BATCH_SIZE", str(flags.batch_size)]
    for path in filter(os.path.isdir, flags.paths):
        if text := describe_left_out(path):
            print(printable(f"{path}{text}"), file=sys.stderr)
    tune_malloc()
    from distribuuuu.commands.predict.prediction import predict_files

    left = "finished images are kept: rerun the same command to resume" if flags.out else "nothing is kept"
    with handled_by(stop_with(left)):
        num_broken = predict_files(flags)
    return BROKEN_IMAGES if num_broken and not flags.skip_bad else 0


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the arguments."""
    usage = "%(prog)s RUN PATHS [flags] [KEY VALUE ...]"
    parser = CommandParser(prog, description=_DESCRIPTION, usage=usage)
    add = parser.add_argument
    add("run", metavar="RUN", help=RUN_KINDS)
    add("paths", metavar="PATHS", nargs="+", help="files, folders, patterns, and lists of paths")
    add("--out", metavar="FILE", help="output file, .csv (default: standard output)")
    add("--topk", metavar="K", type=at_least(1), help="number of classes per image (5)")
    add("--threshold", metavar="P", type=float, help="minimum probability of a label (multi-label only; default 0.5)")
    promise = "no answer where the model is not sure; the share P of the answers is right, see calibrate"
    add("--precision", metavar="P", type=float, help=promise)
    add("--skip-bad", action="store_true", help="exit with 0 even if images are broken")
    add("--workers", metavar="N", type=at_least(0), default=count_cores(), help="loader workers (one per core)")
    add("--batch-size", metavar="N", type=at_least(1), help="images of a forward pass (TEST.BATCH_SIZE)")
    add("--cfg", metavar="FILE", help="config for weights that contain none")
    return parser
