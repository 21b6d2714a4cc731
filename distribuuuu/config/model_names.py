"""Names of models and optimizers, kept in the user's cache folder: a wrong one is reported without importing torch.

The names of timm and torchvision are known only after an import that takes seconds. A process that has imported them
keeps them in a file, which later processes read. The file's name follows from the versions of the packages and the
times of their source files; a file that cannot be read or written is as good as none.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distribuuuu.config.atomic_file import replacing
from distribuuuu.config.errors import did_you_mean, near_matches

# Who knows models, in the order in which they are asked.
SOURCES = ("distribuuuu", "timm", "torchvision")
# The package and its folder whose source files say what a table holds.
_ORIGINS = {**{source: (source, "models") for source in SOURCES}, "optimizers": ("timm", "optim")}

# Keywords that have a key of their own.
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
        names: each name with the parameters of its function, parameter -> whether it has a default; None: not known.
        unlisted: names that work but are not to be proposed, such as deprecated ones.
    """

    names: dict[str, dict[str, bool] | None]
    unlisted: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        return name in self.names or name in self.unlisted


def cache_folder(chosen: str = "") -> Path:
    """Return DATA.CACHE_DIR, or the user's cache folder when it is empty."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(chosen or f"{base}/distribuuuu").expanduser()


def load_table(source: str) -> NameTable | None:
    """Return the table of a source (of SOURCES, or "optimizers"); None if it was not kept."""
    try:
        content = json.loads(_file_of(source).read_text(encoding="utf-8"))
        table = NameTable(dict(content["names"]), tuple(content["unlisted"]))
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, ImportError):
        return None
    is_sound = all(parameters is None or isinstance(parameters, dict) for parameters in table.names.values())
    return table if is_sound and table.names else None


def keep_table(source: str, make: Callable[[], NameTable]) -> None:
    """Keep the table of a source, which `make` returns, unless it is kept already."""
    if load_table(source) is not None:
        return
    with contextlib.suppress(OSError, RuntimeError, ImportError):
        file = _file_of(source)
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, "w", encoding="utf-8") as table:
            json.dump(asdict(make()), table)


def _file_of(source: str) -> Path:
    """Return the file of a table.

    Raises:
        ImportError: the package is not installed.
        OSError, RuntimeError: its source files, or the user's home, are not there.
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
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def find_model_problems(arch_key: str, arch: str, kwargs_key: str, kwargs: Mapping) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for an unknown model, and for unknown keywords of one of our own, as far as names are kept.

    Args:
        arch_key, arch: the option that names the model, and its value.
        kwargs_key, kwargs: the section of the constructor's arguments, and the arguments.
    """
    prefix, _, name = arch.rpartition("/")
    tables = {}
    for source in [source for source in SOURCES if prefix in ("", source)] or SOURCES:
        tables[source] = table = load_table(source)
        if table is None:
            return
        if name in table and prefix in ("", source):
            parameters = table.names.get(name)
            for keyword in kwargs if parameters else ():
                allowed = [parameter for parameter, has_default in parameters.items() if has_default]
                if what := find_objection(keyword, name, parameters, allowed):
                    yield f"{kwargs_key}.{keyword}", what
            return
    yield arch_key, describe_unknown(arch, {source: table.names for source, table in tables.items()})


def find_objection(name: str, model: str, known: Collection[str], allowed: Collection[str]) -> str | None:
    """Return what is wrong with a keyword for a model's constructor; None: nothing.

    Args:
        name: the keyword.
        model: the name of the model.
        known: the keywords that the constructor takes.
        allowed: those to propose.
    """
    if name in OWN_KEYS:
        return f"set {OWN_KEYS[name]} instead"
    if name in known:
        return None
    allowed = sorted(set(allowed) - OWN_KEYS.keys())
    return f"{model} takes no such keyword{did_you_mean(name, allowed)}; it takes {', '.join(allowed) or 'none'}"


def describe_unknown(arch: str, names: Mapping[str, Collection[Any]]) -> str:
    """Return the message for a model that no source knows, with near names, or where was looked.

    Args:
        arch: what was asked for.
        names: the names of each source that was asked; of all sources if the prefix is none of them.
    """
    prefix, _, name = arch.rpartition("/")
    near = near_matches(name, {known for source in names.values() for known in source})
    what = f"unknown model {arch!r}"
    if prefix and prefix not in SOURCES:
        forms = " or ".join(f"{source}/NAME" for source in SOURCES)
        return f"{what}; a prefix must be one of {forms}" + (f"; did you mean {', '.join(near)}?" if near else "")
    if near:
        return f"{what}; did you mean {', '.join(f'{prefix}/{known}' if prefix else known for known in near)}?"
    return f"{what}; nothing near it in {', '.join(names)}"
