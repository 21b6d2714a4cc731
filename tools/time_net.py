#!/usr/bin/env python3
"""Measure the parts of a training step: python tools/time_net.py --cfg FILE [--nproc N] [KEY VALUE ...].

Measures the model, the loader and both together for about a minute, and suggests how to make training faster. It reads
and writes no checkpoint; the measurements are written to OUT_DIR/timing.json.
"""

import signal
import sys


def time_net(cfg) -> None:
    """Check the model, then measure it."""
    from distribuuuu.cli.time_net import time_model
    from distribuuuu.models import check_model

    check_model(cfg)
    time_model(cfg)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for a Ctrl-C during imports
    from distribuuuu.cli.main import run_tool

    sys.exit(run_tool(__doc__, time_net, train=True))
