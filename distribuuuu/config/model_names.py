"""Cached names of models and optimizers, so that a wrong name is reported without importing torch.

The names in timm and torchvision are known only after an import that takes seconds. A process that has imported them
writes them to the user's cache folder, where later processes read them. The name of the cache file depends on the
source files of the package; an unreadable file counts as missing.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.cache_folder import cache_folder

# Packages with models, in the order in which a name is looked up.
SOURCES = ("distribuuuu", "timm", "torchvision")
# The package and its folder of source files on which each list depends.
_ORIGINS = {**{source: (source, "models") for source in SOURCES}, "optimizers": ("timm", "optim")}


def load_names(source: str) -> list[str]:
    """Return the cached names of a source (of SOURCES, or "optimizers"); empty if there is no valid cache."""
    try:
        names = json.loads(_file_of(source).read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError, ImportError):
        return []
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def keep_names(source: str, list_names: Callable[[], Sequence[str]]) -> None:
    """Write the names that a function lists to the cache, unless they are there."""
    if load_names(source):
        return
    with contextlib.suppress(OSError, RuntimeError, ImportError):
        file = _file_of(source)
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, "w", encoding="utf-8") as cache:
            json.dump([*list_names()], cache)


def _file_of(source: str) -> Path:
    """Return the cache file of a source.

    Raises:
        ImportError: the package is not installed.
        OSError, RuntimeError: its source files, or the user's home, do not exist.
    """
    package, folder = _ORIGINS[source]
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(package)
    root = Path(spec.submodule_search_locations[0]) / folder
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in root.glob("*.py"))
    identity = json.dumps([source, os.fspath(root), files])
    return cache_folder() / "names" / f"{source}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def find_model_problem(arch: str) -> str | None:
    """Return the message for an unknown model; None for a known one, or if the names of a source are not cached."""
    prefix, _, name = arch.rpartition("/")
    found: dict[str, list[str]] = {}
    for source in [source for source in SOURCES if prefix in ("", source)] or SOURCES:
        found[source] = load_names(source)
        if not found[source] or (name in found[source] and prefix in ("", source)):
            return None
    from distribuuuu.hints.words import describe_unknown_model

    return describe_unknown_model(arch, found, SOURCES)
