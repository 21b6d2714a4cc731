"""The commands train and test: train a model, or resume a run; evaluate a run, a checkpoint or published weights."""

from argparse import Namespace

from distribuuuu.commands.arguments import build_parser, run_on_config
from distribuuuu.commands.flag_hints import CommandParser, at_least
from distribuuuu.config import Config

_TRAIN = """Train a model, or resume the run in OUT_DIR: the same command does both, alone
or under torchrun and srun.

  %(prog)s --cfg shapes/resnet14
  %(prog)s --cfg imagenet/resnet50 --nproc 8 OUT_DIR exp/r50
  %(prog)s TRAIN.DATASET my_images MODEL.ARCH resnet50
"""
_TEST = """Evaluate a run by its OUT_DIR or a checkpoint below it; or MODEL.WEIGHTS, or
published weights (MODEL.PRETRAINED True).

  %(prog)s exp/r50
  %(prog)s --cfg imagenet/resnet50 MODEL.WEIGHTS resnet50.pth
"""


def train(prog: str, args: list[str]) -> int:
    """Train a model; return the exit status."""
    return run_on_config(build_train_parser(prog), args, _train, train=True)


def build_train_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of a training."""
    parser = build_parser(_TRAIN, prog)
    stop = "end after epoch N with a checkpoint; the same command without this flag continues"
    parser.add_argument("--stop-epoch", metavar="N", type=at_least(1), help=stop)
    trace = "write a trace of N steps to OUT_DIR/profile, and list the longest operations"
    parser.add_argument("--profile", metavar="N", type=at_least(1), default=0, help=trace)
    return parser


def test(prog: str, args: list[str]) -> int:
    """Evaluate a model; return the exit status."""
    return run_on_config(build_parser(_TEST, prog, train=False), args, _test, train=False)


def _train(cfg: Config, flags: Namespace) -> None:
    from distribuuuu.trainer import train_model

    train_model(cfg, flags.stop_epoch, flags.profile)


def _test(cfg: Config, flags: Namespace) -> None:
    from distribuuuu.trainer import evaluate_weights

    evaluate_weights(cfg)
