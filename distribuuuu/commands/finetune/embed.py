"""The command embed: features of image files, by a trained model, as a .npz file."""

import sys
from pathlib import Path

from distribuuuu.commands.flag_hints import CommandParser, at_least
from distribuuuu.commands.output import check_one_process, stop_with
from distribuuuu.config.errors import counted
from distribuuuu.config.run_files import RUN_KINDS
from distribuuuu.files.untrusted import printable
from distribuuuu.inference.locate_run import locate_run
from distribuuuu.launch.host import count_cores, tune_malloc
from distribuuuu.launch.signals import handled_by

# Exit status if images are broken.
BROKEN_IMAGES = 3

_DESCRIPTION = """Write the features of images: the input of the last layer of a trained model.
PATHS are files, folders, patterns, and lists of paths (.txt), as for predict.

  %(prog)s exp/r50 my_images --out features.npz
  %(prog)s timm/resnet50 'album/*.jpg' --out features.npz

The file has the arrays path, label (the name of the folder of the image) and
features, and describes the weights and the preprocessing. Rerun the same
command to resume it after a stop. It is one process, on all cores or one GPU.
The exit status is 3 if images are broken.
"""


def embed(prog: str, args: list[str]) -> int:
    """Read the command line, then write the features; return the exit status."""
    flags = build_parser(prog).parse_args(args)
    check_one_process("start it without a launcher: it is one process, which uses all cores or one GPU")
    from distribuuuu.commands.scan.journal import check_output_file

    out = Path(flags.out)
    check_output_file(out, ".npz")
    locate_run(flags.run)
    from distribuuuu.inference.image_arguments import list_images

    files = list_images(flags.paths)
    tune_malloc()
    from distribuuuu.commands.finetune.decisions import explaining_disk
    from distribuuuu.commands.finetune.feature_file import compute_features, describe, write_features
    from distribuuuu.inference.load_run import find_run
    from distribuuuu.records.run_log import progress

    run = find_run(flags.run, flags.cfg, flags.overrides)
    print(printable(run.describe()), file=sys.stderr)
    left = "finished images are kept: rerun the same command to resume"
    with handled_by(stop_with(left)), explaining_disk(out):
        with progress(None, "embed", len(files), unit="image") as bar:
            rows, broken = compute_features(run, files, out, flags.workers, bar)
        write_features(out, files, rows, broken, describe(run))
        out.with_name(f"{out.name}.partial").unlink(missing_ok=True)
    for path, cause in broken.items():
        print(printable(f"broken image: {path}: {cause}"), file=sys.stderr)
    num = len(files) - len(broken)
    print(printable(f"{out}: {rows.shape[1]:,} features of {counted(num, 'image')}"))
    return BROKEN_IMAGES if broken else 0


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the arguments."""
    usage = "%(prog)s RUN PATHS --out FILE [flags] [KEY VALUE ...]"
    parser = CommandParser(prog, description=_DESCRIPTION, usage=usage)
    add = parser.add_argument
    add("run", metavar="RUN", help=RUN_KINDS)
    add("paths", metavar="PATHS", nargs="+", help="files, folders, patterns, and lists of paths")
    add("--out", metavar="FILE", required=True, help="output file, .npz")
    add("--workers", metavar="N", type=at_least(0), default=count_cores(), help="threads that load images (cores)")
    add("--cfg", metavar="FILE", help="config for weights that contain none")
    return parser
