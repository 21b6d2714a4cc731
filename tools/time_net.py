#!/usr/bin/env python3
"""Measure the parts of a training step: python tools/time_net.py --cfg FILE [--nproc N] [KEY VALUE ...].

The same as `distribuuuu time`.
"""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for a Ctrl-C during imports
    from distribuuuu.commands.main import start_command

    sys.exit(start_command("time", "time_net.py", sys.argv[1:]))
