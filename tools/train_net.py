#!/usr/bin/env python3
"""Train a model: python tools/train_net.py --cfg FILE [KEY VALUE ...], or the same under torchrun or srun.

The same as `distribuuuu train`.
"""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for a Ctrl-C during imports
    from distribuuuu.commands.main import start_command

    sys.exit(start_command("train", "train_net.py", sys.argv[1:]))
