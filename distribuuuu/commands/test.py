"""The command test: evaluate a run, a checkpoint or published weights."""

from argparse import Namespace

from distribuuuu.commands.arguments import build_parser, run_on_config
from distribuuuu.config import Config

_DESCRIPTION = """Evaluate a run by its OUT_DIR or a checkpoint below it; or MODEL.WEIGHTS, or
published weights (MODEL.PRETRAINED True).

  %(prog)s exp/r50
  %(prog)s --cfg imagenet/resnet50 MODEL.WEIGHTS resnet50.pth
"""


def test(prog: str, args: list[str]) -> int:
    """Check the model, then evaluate it; return the exit status."""
    return run_on_config(build_parser(_DESCRIPTION, prog, train=False), args, _start, train=False)


def _start(cfg: Config, flags: Namespace) -> None:
    from distribuuuu.models import check_model
    from distribuuuu.trainer import evaluate_weights

    check_model(cfg)
    evaluate_weights(cfg)
