#!/usr/bin/env python3
"""Evaluate MODEL.WEIGHTS or the best weights of a run: python tools/test_net.py --cfg FILE [KEY VALUE ...]."""

import signal
import sys


def test(cfg) -> None:
    """Check the model, then evaluate it."""
    from distribuuuu.models import check_model
    from distribuuuu.trainer import test_model

    check_model(cfg)
    test_model(cfg)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for a Ctrl-C during imports
    from distribuuuu.cli.main import run_tool

    sys.exit(run_tool(__doc__, test, train=False))
