"""Synchronization of a run's folder with its mirror: restoring at the start, and uploading."""

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from distribuuuu.config.run_files import CHECKPOINTS, METRICS, TENSORBOARD, TEST_LOG, TRAIN_LOG
from distribuuuu.files.atomic_file import open_for_writing, replacing
from distribuuuu.files.untrusted import MAX_JSON, parse_json, printable, read_regular
from distribuuuu.mirror.states import Entry, MirrorError, State, StateLog, is_mirrored

# Private files of the mirror in the folder of the run, and what they hold: the last state of this folder.
PRIVATE, KNOWN = ".mirror", "state.json"
# Seconds between two uploads of files that only grow, unless another file is new.
LOGS_EVERY_S = 30.0
_GROWING = (TRAIN_LOG, TEST_LOG, METRICS)


class Mirror:
    """The folder of a run and the log at a URL.

    Attributes:
        newest: the newest known state at the URL.
        known: of this folder: number, id and files (name -> SHA-256) of its last state; ids of states that may still
            arrive; and whether it is being restored.
    """

    def __init__(self, folder: Path, url: str):
        self.folder, self.log, self.newest = folder, StateLog(url), State(0, "", {})
        (folder / PRIVATE).mkdir(parents=True, exist_ok=True)
        self.known: dict[str, Any] = {"number": 0, "id": "", "files": {}, "sent": [], "is_restoring": False}
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
            found = parse_json(read_regular(folder / PRIVATE / KNOWN, MAX_JSON))
            found = {"number": 0, "id": "", "sent": found.get("ids"), **found}  # earlier versions had ids only
            self.known = {key: type(value)(found[key]) for key, value in self.known.items()}
        self._stored = set[str]()  # objects that are there
        self._hashed: dict[str, tuple[tuple[int, int, int], Entry]] = {}  # with size, time and inode of the file
        self._logs_at = float("-inf")

    def warn(self, problem: str) -> None:
        """Write a warning to the terminal and to the log of the run."""
        text = f"WARNING: OUT_DIR: mirror {self.log.url}: {printable(problem)}\n"
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}")
        with contextlib.suppress(OSError), open_for_writing(self.folder / TRAIN_LOG, "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%m-%d %H:%M:%S')} {text}")

    def _note(self, state: State | None = None, **changes: Any) -> None:
        """Change what is known and write it to the folder; `state` is the last one of this folder."""
        if state:
            changes |= {"number": state.number, "id": state.id}
            changes["files"] = {name: entry.sha256 for name, entry in state.files.items()}
        self.known |= changes
        with replacing(self.folder / PRIVATE / KNOWN, "w", encoding="utf-8") as file:
            json.dump(self.known, file)

    def is_own(self, state: State) -> bool:
        """Tell whether a state is that of this folder, which may have newer files."""
        return state.id in (self.known["id"], *self.known["sent"]) and not self.known["is_restoring"]

    def reconcile(self) -> None:
        """Restore the folder if the mirror is newer; the folder wins if it is the mirror's, with or without new steps.

        Raises:
            MirrorError: both have changed, or the newest state is damaged, or older than the last one of this folder.
        """
        if (found := self.log.find_newest()) is None:
            self._note(is_restoring=False)
            self._append({})  # only after a state, here one without files, can a first upload be continued
            if self.log.create(State(self.newest.number, "", {})).id != self.newest.id:
                problem = "the store replaces objects that it should only create"
                raise MirrorError(f"{self.log.url}: {problem}; fix: use a store with conditional writes")
            return None
        self.newest, self._stored = found, found.objects
        own, remote = find_newest(self.list_files()), find_newest(found.files)
        is_own, what = self.is_own(found), ""
        if not found.files or is_own and _position(own) >= _position(remote):
            return self._note(found, is_restoring=False)
        if found.number < self.known["number"]:
            what = f"its newest state, {found.number}, is older than {self.known['number']}, that of {self.folder}"
        elif own and not (is_own or self.known["is_restoring"]) and self._is_ahead_of(remote):
            what = f"it was continued by another machine, and {self.folder} has other checkpoints"
        if what:
            fix = f"delete {self.folder} to continue the run of the URL, or set another OUT_DIR"
            raise MirrorError(f"{self.log.url}: {what}; fix: {fix}")
        self.restore(found)
        return None

    def _is_ahead_of(self, remote: str) -> bool:
        """Tell whether the folder has a newer checkpoint, or one that its last state does not name."""
        names, known = [name for name in self.list_files() if is_checkpoint(name)], self.known["files"]
        is_newer = _position(find_newest(names)) > _position(remote)
        return is_newer or any(self._entry(name).sha256 != known.get(name) for name in names)

    def fetch(self, name: str) -> None:
        """Download what the commands need: all but checkpoints, and the file of a name."""
        state = self.log.find_newest()
        if state is None or not state.files:
            raise MirrorError(f"{self.log.url}: no run is there; fix: check the URL")
        if name and name not in state.files:
            raise MirrorError(f"{self.log.url}/{name}: no such file; it has {', '.join(state.files)[:400]}")
        if find_newest(self.list_files()) and not self.known["is_restoring"]:
            return None if self.is_own(state) and not name else self.reconcile()
        while self.restore(state, lambda other: other == name or not is_checkpoint(other)):
            if (newer := self.log.find_newest()) is None or newer.id == state.id:
                break
            state = newer  # the run has deleted objects meanwhile
        return None

    def restore(self, state: State, is_wanted: Callable[[str], bool] = lambda name: True) -> set[str]:
        """Download the files of a state, the newest checkpoint first; return the damaged ones, which are skipped.

        Raises:
            MirrorError: it names checkpoints, but all are damaged.
        """
        self._note(state, is_restoring=True)
        names = sorted(filter(is_wanted, state.files), key=lambda name: (is_checkpoint(name), _position(name)))
        damaged = {name for name in reversed(names) if not self._download(name, state.files[name])}
        checkpoints = {*filter(is_checkpoint, names)}
        if checkpoints and checkpoints <= damaged:
            raise MirrorError(f"{self.log.url}: all checkpoints are damaged; fix: set another OUT_DIR")
        self._stored -= {state.files[name].sha256 for name in damaged}
        if {*names} == {*state.files}:
            self._note(is_restoring=False)
        return damaged

    def _download(self, name: str, entry: Entry) -> bool:
        """Download a file unless it is there; return False after a warning if it is damaged."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if not path.resolve().is_relative_to(self.folder.resolve()):
                raise MirrorError("its folder is a link")
            if not path.is_file() or path.stat().st_size != entry.size or self._entry(name) != entry:
                with replacing(path) as file:
                    self.log.download(entry, file.write)
        except MirrorError as error:
            self.warn(f"{name} is damaged in the mirror and was skipped: {error}")
            return False
        return True

    def list_files(self) -> list[str]:
        """Return the names of the files to mirror: the newest checkpoint first, so that no other file is older."""
        found = []
        for root, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            relative = Path(root).relative_to(self.folder)
            found += [(relative / name).as_posix() for name in names if not (Path(root) / name).is_symlink()]
        return sorted(filter(is_mirrored, found), key=lambda name: (is_checkpoint(name), _position(name)), reverse=True)

    def upload_changes(self, with_logs: bool = False) -> bool:
        """Upload what has changed, then the state; return whether anything was written.

        Raises:
            MirrorError: another machine has created this state.
            OSError, RemoteError: the store cannot be written to.
        """
        names, before = self.list_files(), self.newest.files
        files = self._upload(name for name in names if not _is_growing(name))
        is_new = files != {name: entry for name, entry in before.items() if not _is_growing(name)}
        if not (is_new or with_logs or time.monotonic() - self._logs_at >= LOGS_EVERY_S):
            return False
        files |= self._upload(filter(_is_growing, names))
        self._logs_at = time.monotonic()
        if files == before:
            return False
        self._append(files)
        return True

    def _upload(self, names: Iterable[str]) -> dict[str, Entry]:
        """Upload the files that the store lacks; return the content of all that exist."""
        found = {}
        for name in names:
            # Open, its content remains although the run replaces or deletes it.
            with contextlib.suppress(FileNotFoundError), open(self.folder / name, "rb") as file:
                entry = self._entry(name, file)
                if entry.sha256 not in self._stored:
                    self.log.upload(file, entry)
                    self._stored.add(entry.sha256)
                found[name] = entry
        return found

    def _entry(self, name: str, file: IO[bytes] | None = None) -> Entry:
        """Return the hash of a file, which is computed again if it has changed."""
        with contextlib.nullcontext(file) if file else open(self.folder / name, "rb") as opened:
            status = os.fstat(opened.fileno())
            version = (status.st_size, status.st_mtime_ns, status.st_ino)
            if self._hashed.get(name, (None,))[0] != version:
                hashed, size = hashlib.sha256(), 0
                while data := opened.read(1 << 20):
                    hashed.update(data)
                    size += len(data)
                self._hashed[name] = version, Entry(hashed.hexdigest(), size)
        return self._hashed[name][1]

    def _append(self, files: dict[str, Entry]) -> None:
        """Create the next state."""
        state = State(self.newest.number + 1, os.urandom(32).hex(), files)
        self._note(sent=[*self.known["sent"], state.id][-1000:])  # it may arrive although its answer is late
        while (found := self.log.create(state)).id != state.id:
            if found.id not in self.known["sent"]:
                raise MirrorError(f"{self.log.url}: another machine has continued this run; the folder {self.folder} "
                                  "keeps this one; fix: set another OUT_DIR")  # fmt: skip
            state = state._replace(number=found.number + 1)  # the number has an earlier state of this folder
        self.newest = state
        self._note(state, sent=[])  # none of them can get its number any more
        with contextlib.suppress(MirrorError):  # an old state is damaged: nothing is deleted
            self.log.prune(state)
        self._stored &= state.objects


def is_checkpoint(name: str) -> bool:
    """Tell whether the name of a file is that of a checkpoint to resume from."""
    return name.startswith(f"{CHECKPOINTS}/")


def find_newest(names: Iterable[str]) -> str:
    """Return the name of the newest checkpoint; empty if there is none."""
    return max(filter(is_checkpoint, names), key=_position, default="")


def _position(name: str) -> tuple[int, ...]:
    """Return the numbers in the name of a checkpoint: its epoch and step; (0,) for other files."""
    parts = name.rpartition("/")[2].partition(".")[0].split("_")
    return tuple(int(part) for part in parts if part.isdecimal() and len(part) < 19) or (0,)


def _is_growing(name: str) -> bool:
    return name in _GROWING or name.startswith(f"{TENSORBOARD}/")
