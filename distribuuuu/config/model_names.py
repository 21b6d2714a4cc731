"""Cached names of models and optimizers, so that a wrong name is reported without importing torch.

The names in timm and torchvision are known only after an import that takes seconds. A process that has imported them
writes them to the user's cache folder, where later processes read them. The file name depends on the versions of the
packages and the modification times of their source files; an unreadable file counts as missing.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from distribuuuu.config.errors import did_you_mean
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.cache_folder import cache_folder

# Packages with models, in the order in which a name is looked up.
SOURCES = ("distribuuuu", "timm", "torchvision")
# The package and its folder of source files on which each table depends.
_ORIGINS = {**{source: (source, "models") for source in SOURCES}, "optimizers": ("timm", "optim")}

# Keyword arguments that have an option of their own.
OWN_KEYS = {
    "num_classes": "MODEL.NUM_CLASSES",
    "pretrained": "MODEL.PRETRAINED",
    "weights": "MODEL.PRETRAINED or MODEL.WEIGHTS",
    "checkpoint_path": "MODEL.WEIGHTS",
}


@dataclass(frozen=True)
class NameTable:
    """The names that a source knows.

    Attributes:
        names: each name with the parameters of its function (parameter -> whether it has a default); None: unknown.
        unlisted: valid names that are not suggested, such as deprecated ones.
    """

    names: dict[str, dict[str, bool] | None]
    unlisted: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        return name in self.names or name in self.unlisted


def load_table(source: str) -> NameTable | None:
    """Return the cached table of a source (of SOURCES, or "optimizers"); None if there is no valid one."""
    try:
        content = json.loads(_file_of(source).read_text(encoding="utf-8"))
        table = NameTable(dict(content["names"]), tuple(content["unlisted"]))
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, ImportError):
        return None
    is_valid = all(parameters is None or isinstance(parameters, dict) for parameters in table.names.values())
    return table if is_valid and table.names else None


def keep_table(source: str, make: Callable[[], NameTable]) -> None:
    """Write the table that `make` returns to the cache, unless it is there."""
    if load_table(source) is not None:
        return
    with contextlib.suppress(OSError, RuntimeError, ImportError):
        file = _file_of(source)
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, "w", encoding="utf-8") as table:
            json.dump(asdict(make()), table)


def _file_of(source: str) -> Path:
    """Return the cache file of a table.

    Raises:
        ImportError: the package is not installed.
        OSError, RuntimeError: its source files, or the user's home, do not exist.
    """
    package, folder = _ORIGINS[source]
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(package)
    root = Path(spec.submodule_search_locations[0]) / folder
    with os.scandir(root) as entries:
        times = sorted(entry.stat().st_mtime_ns for entry in entries if entry.name.endswith(".py"))
    versions = [_version_of(name) for name in ("timm", "torchvision")]
    identity = json.dumps([source, str(root), versions, times])
    return cache_folder() / "names" / f"{source}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def _version_of(package: str) -> str | None:
    """Return the text of a package's version.py, which is read sooner than its metadata; None if there is none."""
    spec = find_spec(package)
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    return file.read_text(encoding="utf-8") if file and file.is_file() else None


def find_model_problems(arch_key: str, arch: str, kwargs_key: str, kwargs: Mapping) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for an unknown model, and for unknown keywords of a model of this package.

    Args:
        arch_key, arch: the option with the model's name, and the name.
        kwargs_key, kwargs: the section of the constructor's arguments, and the arguments.
    """
    prefix, _, name = arch.rpartition("/")
    tables: dict[str, NameTable] = {}
    for source in [source for source in SOURCES if prefix in ("", source)] or SOURCES:
        table = load_table(source)
        if table is None:
            return
        tables[source] = table
        if name in table and prefix in ("", source):
            parameters = table.names.get(name) or {}
            allowed = [parameter for parameter, has_default in parameters.items() if has_default]
            for keyword in kwargs if parameters else ():
                if message := find_objection(keyword, name, parameters, allowed):
                    yield f"{kwargs_key}.{keyword}", message
            return
    from distribuuuu.hints.words import describe_unknown_model

    yield arch_key, describe_unknown_model(arch, {source: table.names for source, table in tables.items()}, SOURCES)


def find_objection(name: str, model: str, known: Collection[str], allowed: Collection[str]) -> str | None:
    """Return why a model's constructor cannot be called with a keyword; None if it can.

    Args:
        name: the keyword.
        model: the name of the model.
        known: the parameters of the constructor.
        allowed: those that may be suggested.
    """
    if name in OWN_KEYS:
        return f"set {OWN_KEYS[name]} instead"
    if name in known:
        return None
    allowed = sorted(set(allowed) - OWN_KEYS.keys())
    return f"{model} has no such parameter{did_you_mean(name, allowed)}; it has {', '.join(allowed) or 'none'}"
