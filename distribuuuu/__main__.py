"""Entry point of `python -m distribuuuu`."""

import sys

from distribuuuu.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
