"""Config files by name: those that a path that is not there may mean, and that of a finished run."""

import os
from collections.abc import Sequence
from difflib import SequenceMatcher

from distribuuuu.config.defaults import _C
from distribuuuu.config.errors import did_you_mean, near_matches


def similar_files(path: str) -> str:
    """Return '; did you mean FILE?' for a config file that is not there, or an empty string.

    The folder of the path is searched (the path itself, if it is a folder), then ./configs, or this project's.
    """
    folder, name = os.path.split(os.path.normpath(path))
    stem = os.path.splitext(name)[0]
    own = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "configs")
    root = next((root for root in ("configs", own) if os.path.isdir(root)), "")
    inside = [os.path.join(path, name) for name in _list(path) if name.endswith(".yaml")]
    if inside:
        return _ask(inside)
    files = [os.path.join(folder, name) for name in _list(folder or ".") if name.endswith(".yaml")]
    files += [os.path.join(parent, name) for parent, _, names in os.walk(root) for name in sorted(names)]
    same = [file for file in dict.fromkeys(files) if _stem_of(file) == stem]
    if same:
        parent = os.path.basename(folder)
        return _ask([file for file in same if _parent_of(file) == parent] or _by_likeness(path, same))
    near = did_you_mean(name, _list(folder or "."))
    stems = near_matches(stem, map(_stem_of, files))
    return near or _ask(_by_likeness(path, [file for file in files if _stem_of(file) in stems]))


def find_run_config(words: Sequence[str]) -> str | None:
    """Return the config file that a run left in the OUT_DIR of KEY VALUE words; None if there is none.

    Without OUT_DIR, words that name other weights are not about the run in the default folder.
    """
    given = dict(zip(words[::2], words[1::2], strict=False))
    if "OUT_DIR" not in given and given.keys() & {"MODEL.WEIGHTS", "MODEL.PRETRAINED"}:
        return None
    path = os.path.join(given.get("OUT_DIR", _C.OUT_DIR), given.get("CFG_DEST", _C.CFG_DEST))
    return path if os.path.isfile(path) else None


def _ask(files: Sequence[str], num: int = 4) -> str:
    return f"; did you mean {', '.join(files[:num])}?" if files else ""


def _list(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _stem_of(file: str) -> str:
    return os.path.splitext(os.path.basename(file))[0]


def _parent_of(file: str) -> str:
    return os.path.basename(os.path.dirname(file))


def _by_likeness(path: str, files: Sequence[str]) -> list[str]:
    return sorted(files, key=lambda file: -SequenceMatcher(None, path, file).ratio())
