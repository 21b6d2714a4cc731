"""Plug-ins: Python code outside of the package, named by PLUGINS and imported once per process.

A plug-in is code. It is imported if the user names it: on the command line, in a file of --cfg, or in Python. The
config in the folder of a run may be of others: of its plug-ins, only those are imported that this user has named
before, which the user's cache folder records. A checkpoint, an export or a pack never causes an import. The plug-ins of
the shipped recipes are part of this installation and need no such permission, also if a run names those of another one.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from distribuuuu.config.errors import ConfigError, Problem, did_you_mean
from distribuuuu.config.locate import RECIPE_PLUGINS, shipped_file
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.untrusted import read_regular

_PREFIX = "distribuuuu_plugin_"


def resolve_plugins(entries: Iterable[str], folder: str | os.PathLike = "") -> tuple[str, ...]:
    """Return the entries of PLUGINS with absolute paths; relative ones refer to a folder (default: the current one)."""
    paths = {entry: os.path.expanduser(os.path.expandvars(entry)) for entry in entries if names_file(entry)}
    return tuple(_find_own(os.path.join(folder, paths[entry])) if entry in paths else entry for entry in entries)


def _find_own(path: str) -> str:
    """Return the absolute path of a plug-in; if it is missing, of the one that this installation ships in its place."""
    path = os.path.abspath(path)
    own = shipped_file("configs") / path.rpartition("/configs/")[2]
    return path if os.path.exists(path) or not is_shipped(str(own)) else str(own)


def is_shipped(entry: str) -> bool:
    """Tell whether an entry of PLUGINS is the plug-in of a recipe of this installation."""
    real = os.path.realpath(entry)
    return any(real == os.path.realpath(shipped_file("configs") / file) for file in RECIPE_PLUGINS)


def names_file(entry: str) -> bool:
    """Tell whether an entry of PLUGINS is the path of a file; else it is the name of a module."""
    return entry.endswith(".py")


def import_plugins(entries: Sequence[str], found_in: str = "") -> None:
    """Import the plug-ins, absolute paths of files and names of modules, that this process has not imported yet.

    The ConfigError has each plug-in that is missing, that fails, or that is not known to be the user's, if the config
    in the folder of a run (`found_in`), not the user, names it.
    """
    waiting = [entry for entry in dict.fromkeys(entries) if not _is_imported(entry)]
    unknown = [entry for entry in waiting if found_in and not _is_known(entry)]
    if unknown:
        text = json.dumps([*entries]) if any("," in entry for entry in entries) else ",".join(entries)
        run, words = shlex.quote(os.path.dirname(found_in) or "."), shlex.quote(text)
        message = f"got {', '.join(unknown)}, which is code; expected plug-ins that you have named yourself before"
        fix = f"fix: if you trust this code, run once: distribuuuu test {run} PLUGINS {words}"
        raise ConfigError(Problem("PLUGINS", f"{message}; {fix}"))
    problems = [Problem("PLUGINS", problem) for entry in waiting if (problem := _import(entry))]
    if problems:
        raise ConfigError(problems)
    for entry in entries:
        if not (found_in or _is_known(entry)):
            _record(entry)


def hash_plugins(entries: Sequence[str]) -> dict[str, str | None]:
    """Return by the name of its file or module the SHA-256 of each imported plug-in; None: its file cannot be read."""
    hashes: dict[str, str | None] = {}
    for entry in entries:
        path = entry if names_file(entry) else getattr(sys.modules.get(entry), "__file__", None)
        name = os.path.basename(entry)
        hashes[name] = None
        with contextlib.suppress(OSError):
            hashes[name] = hashlib.sha256(Path(path or "").read_bytes()).hexdigest()
    return hashes


class ImportedPlugins:
    """The files of plug-ins in this process: a process that unpickles it imports them, with the names used here."""

    def __reduce__(self):
        files = (module.__file__ for name, module in list(sys.modules.items()) if name.startswith(_PREFIX))
        return import_plugins, (tuple(file for file in files if file),)


def _import(entry: str) -> str | None:
    """Import a plug-in; return why this fails, None if it does not."""
    if names_file(entry) and not os.path.isfile(entry):
        beside = [path.name for path in Path(entry).parent.glob("*.py") if path.is_file()]
        return f"no such file: {entry}{did_you_mean(os.path.basename(entry), beside)}"
    try:
        if names_file(entry):
            _import_file(entry)
        else:
            importlib.import_module(entry)
    except (Exception, SystemExit) as error:
        return f"{entry} fails: {type(error).__name__}: {' '.join(str(error).split())}{_find_line(error)}"
    return None


def _import_file(entry: str) -> None:
    name = _module_name(entry)
    spec = importlib.util.spec_from_file_location(name, os.path.realpath(entry))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # the classes of the module can be pickled
    try:
        spec.loader.exec_module(module)
    except BaseException:  # also Ctrl-C: the next import must not find half of a module
        del sys.modules[name]
        raise


def _module_name(path: str) -> str:
    """Return a name for the module of a file: the same for the same file, another one for each other file."""
    real = os.path.realpath(path)
    return f"{_PREFIX}{re.sub(r'[^0-9A-Za-z]', '_', Path(real).stem)}_{_hash(real)[:8]}"


def _is_imported(entry: str) -> bool:
    """Tell whether a plug-in is in this process; a script that names itself is."""
    if not names_file(entry):
        return entry in sys.modules
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    is_script = script is not None and os.path.realpath(script) == os.path.realpath(entry)
    return is_script or _module_name(entry) in sys.modules


def _find_line(error: BaseException) -> str:
    """Return ' (FILE:LINE)' of the innermost line of a module that an error comes from; a syntax error has its own."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
    is_shown = frames and not isinstance(error, SyntaxError)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if is_shown else ""


# ------------------------------------------------------------------------- plug-ins that the user has named


def _record(entry: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # without a record, it must be named each time
        path, content = _record_of(entry)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, "wb") as file:
            file.write(content)


def _is_known(entry: str) -> bool:
    """Tell whether this user has named a plug-in before, and it was imported; those of shipped recipes are known."""
    if is_shipped(entry):
        return True
    try:
        path, content = _record_of(entry)
        # The cache folder may be shared with others.
        return os.lstat(path).st_uid == os.getuid() and read_regular(path, len(content)) == content
    except (OSError, ValueError):
        return False


def _record_of(entry: str) -> tuple[Path, bytes]:
    """Return the file that records a plug-in, and its content: the file, or the module and where it is found."""
    text = os.path.realpath(entry)
    if not names_file(entry):
        spec = importlib.util.find_spec(entry.partition(".")[0])  # of a package within, it would import the outer one
        text = f"{entry}\n{spec and (spec.origin or list(spec.submodule_search_locations or ()))}"
    return cache_folder() / "plugins" / f"{_hash(f'{os.getuid()}{text}')[:32]}.txt", os.fsencode(f"{text}\n")


def _hash(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()
