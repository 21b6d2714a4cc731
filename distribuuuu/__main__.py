"""Entry point of `python -m distribuuuu`."""

import sys

from distribuuuu.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
