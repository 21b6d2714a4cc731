"""The commands train, test, time, pack and table, which the scripts in tools/ start too."""

from distribuuuu.cli.main import run_on_config
from distribuuuu.config import Config

_TRAIN = """Train a model, or resume the run in OUT_DIR: the same command does both, alone
or under torchrun and srun.

  %(prog)s --cfg shapes/resnet14
  %(prog)s --cfg imagenet/resnet50 --nproc 8 OUT_DIR exp/r50
  %(prog)s TRAIN.DATASET my_images MODEL.ARCH resnet50
"""
_TEST = """Evaluate MODEL.WEIGHTS, else the best weights of the run in OUT_DIR, else
published weights (MODEL.PRETRAINED True).

  %(prog)s OUT_DIR exp/r50
  %(prog)s --cfg imagenet/resnet50 MODEL.WEIGHTS resnet50.pth
"""
_TIME = """Measure the model, the loader and both together for about a minute, and name
the bottleneck and its remedies. It reads and writes no checkpoint; the
measurements are written to OUT_DIR/timing.json.

  %(prog)s --cfg imagenet/resnet50
"""
_PACK = """Pack a data set into a few large files. DATA.NAME packed TRAIN.DATASET OUT reads
OUT/train and OUT/val. Rerun the same command to resume it after a stop.
--verify reads every byte and reports each corrupt image.

  %(prog)s OUT TRAIN.DATASET my_images
  %(prog)s --verify OUT
"""
_TABLE = """Make a table of runs, in Markdown unless it is for a terminal. Each config
has one row: the mean and standard deviation over its seeds, beside published
results. Unfinished runs are omitted.

  %(prog)s exp
  %(prog)s 'exp/*/resnet*' --epoch best
  %(prog)s exp --readme README.md --name small
"""


def train(prog: str, args: list[str]) -> int:
    """Check the model, then train it."""

    def start(cfg: Config, stop_epoch: int | None = None) -> None:
        from distribuuuu.models import check_model
        from distribuuuu.trainer import train_model

        check_model(cfg)
        train_model(cfg, stop_epoch)

    return run_on_config(prog, args, _TRAIN, start, train=True)


def test(prog: str, args: list[str]) -> int:
    """Check the model, then evaluate it."""

    def start(cfg: Config) -> None:
        from distribuuuu.models import check_model
        from distribuuuu.trainer import test_model

        check_model(cfg)
        test_model(cfg)

    return run_on_config(prog, args, _TEST, start, train=False)


def time(prog: str, args: list[str]) -> int:
    """Check the model, then measure it."""

    def start(cfg: Config) -> None:
        from distribuuuu.cli.time_net import time_model
        from distribuuuu.models import check_model

        check_model(cfg)
        time_model(cfg)

    return run_on_config(prog, args, _TIME, start, train=True)


def pack(prog: str, args: list[str]) -> int:
    """Pack a data set, or verify a packed one."""
    from distribuuuu.cli.pack_dataset import run_packer

    return run_packer(_PACK, args, prog)


def table(prog: str, args: list[str]) -> int:
    """Print a table of runs, or write it to a file."""
    from distribuuuu.cli.make_table import run_table_tool
    from distribuuuu.config.locate import shipped_file

    return run_table_tool(_TABLE, shipped_file("benchmarks/reported.yaml"), args, prog)
