"""The command embed: features of image files, by a trained model, as .npz or .parquet."""

import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from distribuuuu.commands.flag_hints import CommandParser, at_least
from distribuuuu.commands.output import BROKEN_IMAGES, check_one_process, stop_with
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.config.run_files import RUN_KINDS
from distribuuuu.files.untrusted import printable
from distribuuuu.inference.locate_run import locate_run
from distribuuuu.launch.detect import detect_launch
from distribuuuu.launch.host import count_cores, tune_malloc
from distribuuuu.launch.nproc import run_processes
from distribuuuu.launch.signals import handled_by

_DESCRIPTION = """Write the features of images: the input of the last layer of a trained model.
PATHS are files, folders, patterns, and lists of paths (.txt), as for predict.

  %(prog)s exp/r50 my_images --out features.npz
  %(prog)s timm/resnet50 'album/*.jpg' --out features.parquet

The file has the columns path, label (the name of the folder of the image) and
features, and describes the weights and the preprocessing. Rerun the same
command to resume it after a stop. The exit status is 3 if images are broken.
"""


def embed(prog: str, args: list[str]) -> int:
    """Read the command line, then write the features; return the exit status."""
    flags, launch = build_parser(prog).parse_args(args), detect_launch()
    is_part = launch.launcher == "--nproc"  # one of the processes that this command has started
    if not is_part:
        check_one_process("start it without a launcher; --nproc N computes in several processes")
    from distribuuuu.commands.scan.journal import check_output_file

    out = Path(flags.out)
    check_output_file(out, ".npz", ".parquet")
    if out.suffix == ".parquet" and not find_spec("pyarrow"):
        fix = "pip install 'distribuuuu[parquet]', or name a .npz file"
        raise ConfigError(f"--out: got {out}, which needs pyarrow; fix: {fix}")
    locate_run(flags.run)
    from distribuuuu.inference.image_arguments import list_images

    files = list_images(flags.paths)
    command = [sys.executable, "-m", "distribuuuu", "embed", *args]
    if flags.nproc > 1 and not is_part and (status := run_processes(flags.nproc, command)):
        return status
    tune_malloc()
    from distribuuuu.commands.finetune.decisions import explaining_disk
    from distribuuuu.commands.finetune.feature_file import compute_features, describe, write_features
    from distribuuuu.distributed.process_group import pick_device
    from distribuuuu.inference.load_run import find_run
    from distribuuuu.records.run_log import progress

    run = replace(find_run(flags.run, flags.cfg, flags.overrides), given_device=pick_device(launch.local_rank))
    part = (launch.rank, flags.nproc) if is_part else (0, 1)
    if not is_part:
        print(printable(run.describe()), file=sys.stderr)
    with handled_by(stop_with("finished images are kept: rerun the same command to resume")), explaining_disk(out):
        with progress(None, "embed", None if is_part else len(files), unit="image") as bar:
            rows, broken = compute_features(run, files, out, flags.workers, bar, part=part)
        if is_part:
            return 0
        write_features(out, files, [Path(file).parent.name for file in files], rows, broken, describe(run))
        shutil.rmtree(out.with_name(f"{out.name}.partial"))
    for path, cause in broken.items():
        print(printable(f"broken image: {path}: {cause}"), file=sys.stderr)
    print(printable(f"{out}: {rows.shape[1]:,} features of {counted(len(files) - len(broken), 'image')}"))
    return BROKEN_IMAGES if broken else 0


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the arguments."""
    usage = "%(prog)s RUN PATHS --out FILE [flags] [KEY VALUE ...]"
    parser = CommandParser(prog, description=_DESCRIPTION, usage=usage)
    add = parser.add_argument
    add("run", metavar="RUN", help=RUN_KINDS)
    add("paths", metavar="PATHS", nargs="+", help="files, folders, patterns, and lists of paths")
    add("--out", metavar="FILE", required=True, help="output file, .npz or .parquet")
    add("--nproc", metavar="N", type=at_least(1), default=1, help="processes that compute features, one per GPU (1)")
    add("--workers", metavar="N", type=at_least(0), default=count_cores(), help="threads that load images (cores)")
    add("--cfg", metavar="FILE", help="config for weights that contain none")
    return parser
