"""The user's cache folder."""

import os
import tempfile
from pathlib import Path


def cache_folder(chosen: str = "") -> Path:
    """Return DATA.CACHE_DIR, or the user's cache folder if it is empty; without a home, one of the temporary folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if base.startswith("~"):  # no HOME, and the user is not in the system's table
        base = os.path.join(tempfile.gettempdir(), f"cache-{os.getuid()}")
    return Path(chosen or os.path.join(base, "distribuuuu")).expanduser()
