#!/usr/bin/env python3
"""Train a model: python tools/train_net.py --cfg FILE [KEY VALUE ...], or the same under torchrun or srun."""

import signal
import sys


def train(cfg) -> None:
    """Check the model, then train it."""
    from distribuuuu.models import check_model
    from distribuuuu.trainer import train_model

    check_model(cfg)
    train_model(cfg)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for a Ctrl-C during imports
    from distribuuuu.cli.main import run_tool

    sys.exit(run_tool(__doc__, train, train=True))
