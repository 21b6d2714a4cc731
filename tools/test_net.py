#!/usr/bin/env python3
"""Evaluate MODEL.WEIGHTS or the run's best: python tools/test_net.py --cfg FILE [KEY VALUE ...]."""

import signal
import sys


def test(cfg) -> None:
    """Check what needs torch to be checked, then evaluate."""
    from distribuuuu.models import check_model
    from distribuuuu.trainer import test_model

    check_model(cfg)
    test_model(cfg)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C in an import needs no traceback
    from distribuuuu.cli.main import run_tool

    sys.exit(run_tool(__doc__, test, train=False))
