#!/usr/bin/env python3
"""Evaluate MODEL.WEIGHTS or the best weights of a run: python tools/test_net.py --cfg FILE [KEY VALUE ...].

The same as `distribuuuu test`.
"""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for a Ctrl-C during imports
    from distribuuuu.commands.main import start_command

    sys.exit(start_command("test", "test_net.py", sys.argv[1:]))
