#!/usr/bin/env python3
"""Make a Markdown table of runs: python tools/make_table.py RUN... [--by config|arch] [--readme FILE --name NAME].

Each config has one row: the mean and standard deviation over its seeds, beside published results
(benchmarks/reported.yaml). Unfinished runs are omitted. Examples:

  python tools/make_table.py exp                          every run in a folder
  python tools/make_table.py 'exp/*/resnet*' --epoch best
  python tools/make_table.py benchmarks/results --readme docs/MODEL_ZOO.md --name small
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for a Ctrl-C during imports
    from distribuuuu.cli.make_table import run_table_tool

    sys.exit(run_table_tool(__doc__, Path(__file__).parents[1] / "benchmarks" / "reported.yaml"))
