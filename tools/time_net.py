#!/usr/bin/env python3
"""Say where the time of a training step goes: python tools/time_net.py --cfg FILE [--nproc N] [KEY VALUE ...].

Measures the model, the loader and both together for about a minute, and names what would make training faster. It
reads and writes no checkpoint; the numbers are left in OUT_DIR/timing.json.
"""

import signal
import sys


def time_net(cfg) -> None:
    """Check what needs torch to be checked, then measure."""
    from distribuuuu.cli.time_net import time_model
    from distribuuuu.models import check_model

    check_model(cfg)
    time_model(cfg)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C in an import needs no traceback
    from distribuuuu.cli.main import run_tool

    sys.exit(run_tool(__doc__, time_net, train=True))
