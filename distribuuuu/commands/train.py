"""The command train: train a model, or resume a run."""

from argparse import Namespace

from distribuuuu.commands.arguments import build_parser, run_on_config
from distribuuuu.commands.flag_hints import at_least
from distribuuuu.config import Config
from distribuuuu.config.declaration import AUTO

_DESCRIPTION = """Train a model, or resume the run in OUT_DIR: the same command does both, alone
or under torchrun and srun.

  %(prog)s --cfg shapes/resnet14
  %(prog)s --cfg imagenet/resnet50 --nproc 8 OUT_DIR exp/r50
  %(prog)s TRAIN.DATASET my_images MODEL.ARCH resnet50
"""


def train(prog: str, args: list[str]) -> int:
    """Check the model, then train it; return the exit status."""
    parser = build_parser(_DESCRIPTION, prog)
    stop = "end after epoch N with a checkpoint; the same command without this flag continues"
    parser.add_argument("--stop-epoch", metavar="N", type=at_least(1), help=stop)
    return run_on_config(parser, args, _start, train=True)


def _start(cfg: Config, flags: Namespace) -> None:
    from distribuuuu.models import check_model
    from distribuuuu.trainer import take_step, train_model

    check_model(cfg)
    if cfg.TRAIN.BATCH_SIZE == AUTO:
        from distribuuuu.engine.auto_batch_size import resolve_batch_size

        cfg = resolve_batch_size(cfg, take_step)
    train_model(cfg, flags.stop_epoch)
