#!/usr/bin/env python3
"""Make a Markdown table of runs: python tools/make_table.py RUN... [--by config|arch] [--readme FILE --name NAME].

The same as `distribuuuu table`.
"""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for a Ctrl-C during imports
    from distribuuuu.commands.main import start_command

    sys.exit(start_command("table", "make_table.py", sys.argv[1:]))
