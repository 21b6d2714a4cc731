#!/usr/bin/env python3
"""Pack a data set into a few large files: python tools/pack_dataset.py OUT [--cfg FILE] [flags] [KEY VALUE ...].

The same as `distribuuuu pack`.
"""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for a Ctrl-C during imports
    from distribuuuu.commands.main import start_command

    sys.exit(start_command("pack", "pack_dataset.py", sys.argv[1:]))
