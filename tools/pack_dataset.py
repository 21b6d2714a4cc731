#!/usr/bin/env python3
"""Pack a data set into a few large files: python tools/pack_dataset.py OUT [--cfg FILE] [flags] [KEY VALUE ...].

DATA.NAME packed TRAIN.DATASET OUT reads OUT/train and OUT/val. Rerun the same command to resume it after a stop.
python tools/pack_dataset.py --verify OUT reads every byte and reports each corrupt image.
"""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for a Ctrl-C during imports
    from distribuuuu.cli.pack_dataset import run_packer

    sys.exit(run_packer(__doc__))
