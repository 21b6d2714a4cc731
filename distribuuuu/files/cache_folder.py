"""The user's cache folder, and values in it that may be deleted at any time."""

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from distribuuuu.files.atomic_file import replacing


def cache_folder(chosen: str = "") -> Path:
    """Return DATA.CACHE_DIR, or the user's cache folder if it is empty; without a home, one of the temporary folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if base.startswith("~"):  # no HOME, and the user is not in the system's table
        base = os.path.join(tempfile.gettempdir(), f"cache-{os.getuid()}")
    return Path(chosen or os.path.join(base, "distribuuuu")).expanduser()


def load_cached(name: str, identity: object) -> Any:
    """Return the value that `keep_cached` has written under a name for an identity; None if it cannot be read."""
    try:
        return json.loads(_cache_file(name, identity).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def keep_cached(name: str, identity: object, value: Any) -> None:
    """Write a value, e.g. of a slow measurement, to the cache, unless that fails: it is then computed again."""
    file = _cache_file(name, identity)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, "w", encoding="utf-8") as cache:
            json.dump(value, cache)


def _cache_file(name: str, identity: object) -> Path:
    digest = hashlib.sha256(repr(identity).encode(errors="surrogateescape")).hexdigest()
    return cache_folder() / f"{name}-{digest[:32]}.json"
