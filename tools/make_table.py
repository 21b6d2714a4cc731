#!/usr/bin/env python3
"""Make a Markdown table of runs: python tools/make_table.py RUN... [--by config|arch] [--readme FILE --name NAME].

There is one row for each config: the mean and the deviation over its seeds, beside what others reported
(benchmarks/reported.yaml). Unfinished runs are left out. No number of a README's table is written by hand:

  python tools/make_table.py exp                          every run in a folder
  python tools/make_table.py 'exp/*/resnet*' --epoch best
  python tools/make_table.py benchmarks/results --readme docs/MODEL_ZOO.md --name small
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C in an import needs no traceback
    from distribuuuu.cli.make_table import run_table_tool

    sys.exit(run_table_tool(__doc__, Path(__file__).parents[1] / "benchmarks" / "reported.yaml"))
