#!/usr/bin/env python3
"""Pack a data set into a few large files: python tools/pack_dataset.py OUT [--cfg FILE] [flags] [KEY VALUE ...].

OUT/train and OUT/val are read by DATA.NAME packed TRAIN.DATASET OUT. Rerun a stopped command to resume
it. python tools/pack_dataset.py --verify OUT reads every byte and reports each damaged image.
"""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for a Ctrl-C during imports
    from distribuuuu.cli.pack_dataset import run_packer

    sys.exit(run_packer(__doc__))
