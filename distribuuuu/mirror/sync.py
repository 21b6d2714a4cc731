"""Synchronization of a run's folder with its mirror: restoring at the start, and uploading."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from distribuuuu.config.errors import counted
from distribuuuu.config.run_files import CHECKPOINTS, METRICS, TENSORBOARD, TEST_LOG, TRAIN_LOG
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.untrusted import MAX_JSON, parse_json, read_regular
from distribuuuu.mirror.store import (
    INDEX,
    OBJECTS,
    Entry,
    Index,
    MirrorError,
    Store,
    hash_file,
    is_mirrored,
    parse_index,
)

# Private files of the mirror in the folder of the run, and what they hold: the last index of this folder.
PRIVATE, STATE = ".mirror", "state.json"
# Seconds between two uploads of files that only grow, unless another file is new.
LOGS_EVERY_S = 30.0
_GROWING = (TRAIN_LOG, TEST_LOG, METRICS)


class Mirror:
    """The folder of a run and the store of its URL; `warn` gets the problems that do not end the mirror."""

    def __init__(self, folder: Path, store: Store, warn: Callable[[str], None]):
        self.folder, self.store, self._warn = folder, store, warn
        self._private = folder / PRIVATE
        self.state: dict[str, Any] = {"ids": [], "is_restoring": False, "files": {}}
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
            found = parse_json(read_regular(self._private / STATE, MAX_JSON))
            self.state = {key: type(value)(found[key]) for key, value in self.state.items()}
        # The newest known index, the objects that are there, and (size, time, inode) of hashed files.
        self.index, self._stored = Index("", 0, {}), set[str]()
        self._hashed: dict[str, tuple[tuple[int, int, int], Entry]] = {}
        self._logs_at = float("-inf")

    def save_state(self, **changes: Any) -> None:
        """Change the state and write it to the folder."""
        self.state = {**self.state, **changes}
        with replacing(self._private / STATE, "w", encoding="utf-8") as file:
            json.dump(self.state, file)

    def read_index(self) -> Index | None:
        """Return the index at the URL; None if there is none; raises MirrorError, OSError or RemoteError."""
        try:
            data = self.store.read(INDEX)
            return None if data is None else parse_index(data)
        except MirrorError as error:
            raise MirrorError(f"{self.store.url}: {error}; fix: set another OUT_DIR") from error

    def find_index(self) -> Index | None:
        """Return the index as `read_index` does; raises MirrorError if it is missing although there are objects."""
        index = self.read_index()
        if index is None and (objects := self.store.list_objects()):
            what = f"{INDEX} is missing, but {OBJECTS}/ has {counted(len(objects), 'object')}"
            fix = f"restore {INDEX}, delete {OBJECTS}/ if no run is to be kept, or set another OUT_DIR"
            raise MirrorError(f"{self.store.url}: {what}; fix: {fix}")
        return index

    def reconcile(self) -> None:
        """Restore the folder if the mirror is newer; the folder wins if it is the mirror's, with or without new steps.

        Raises:
            MirrorError: both have changed, or the index is damaged, or missing although there are objects.
        """
        if (found := self.find_index()) is None:
            self.save_state(is_restoring=False)
            self._write_index({})  # only with an index, here one without files, can a first upload be continued
            return
        self.index, self._stored = found, {entry.sha256 for entry in found.files.values()}
        if not found.files:  # the first upload has not ended
            self.save_state(is_restoring=False, ids=[*self.state["ids"], found.id])
            return
        own, remote = find_newest(self.list_files()), find_newest(found.files)
        is_known = found.id in self.state["ids"] and not self.state["is_restoring"]
        if is_known and _position(own) >= _position(remote):
            return
        what = ""
        if _position(own) > _position(remote):
            what = f"its {INDEX} is older than {self.folder}, which has {own}"
        elif not is_known and not self.state["is_restoring"] and own and self._has_changed():
            what = f"it was continued by another machine, and {self.folder} has other checkpoints"
        if what:
            fix = f"delete {self.folder} to continue the run of the URL, or set another OUT_DIR"
            raise MirrorError(f"{self.store.url}: {what}; fix: {fix}")
        self.restore(found)

    def _has_changed(self) -> bool:
        """Tell whether the folder has a checkpoint that the last known index does not name."""
        known, names = self.state["files"], [name for name in self.list_files() if is_checkpoint(name)]
        return any(known.get(name) != hash_file(self.folder / name).sha256 for name in names)

    def restore(self, index: Index, is_wanted: Callable[[str], bool] = lambda name: True) -> set[str]:
        """Download the files of an index, the newest checkpoint first; return the damaged ones, which are skipped.

        Raises:
            MirrorError: it names checkpoints, but all are damaged.
        """
        self.save_state(is_restoring=True, ids=[index.id])
        older = [name for name in self.list_files()
                 if is_checkpoint(name) and name not in index.files and name in self.state["files"]]  # fmt: skip
        names = sorted(filter(is_wanted, index.files), key=lambda name: (is_checkpoint(name), _position(name)))
        missing = [name for name in reversed(names) if not self._has(name, index.files[name])]
        damaged = {name for name in missing if not self._download(name, index.files[name])}
        checkpoints = {*filter(is_checkpoint, names)}
        if checkpoints and checkpoints <= damaged:
            raise MirrorError(f"{self.store.url}: all checkpoints are damaged; fix: set another OUT_DIR")
        self._stored -= {index.files[name].sha256 for name in damaged}
        for name in older if checkpoints - damaged else ():  # of an older state of the mirror
            (self.folder / name).unlink(missing_ok=True)
        if {*names} == {*index.files}:
            files = {name: entry.sha256 for name, entry in index.files.items()}
            self.save_state(is_restoring=False, files=files)
        return damaged

    def _has(self, name: str, entry: Entry) -> bool:
        path = self.folder / name
        return path.is_file() and path.stat().st_size == entry.size and hash_file(path) == entry

    def _download(self, name: str, entry: Entry) -> bool:
        """Download a file; return False after a warning if it is damaged."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if not path.resolve().is_relative_to(self.folder.resolve()):
                raise MirrorError("its folder is a link")
            with replacing(path) as file:
                self.store.download(entry, file.write)
        except MirrorError as error:
            self._warn(f"{name} is damaged in the mirror and was skipped: {error}")
            return False
        return True

    def list_files(self) -> list[str]:
        """Return the names of the files to mirror: checkpoints first, so that no other file is older than they are."""
        found = []
        for root, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            relative = Path(root).relative_to(self.folder)
            found += [(relative / name).as_posix() for name in names if not (Path(root) / name).is_symlink()]
        return sorted(filter(is_mirrored, found), key=lambda name: (not is_checkpoint(name), name))

    def upload_changes(self, with_logs: bool = False) -> bool:
        """Upload what has changed, then the index; return whether anything was written.

        Raises:
            MirrorError: another machine has written the index.
            OSError, RemoteError: the store cannot be written to.
        """
        copies = self._copy_changes()
        try:
            new = {name: copy[1] for name, copy in copies.items()}
            replaced = {name: entry for name, entry in new.items() if not _is_growing(name)}
            is_new = replaced != {name: entry for name, entry in self.index.files.items() if not _is_growing(name)}
            is_due = with_logs or time.monotonic() - self._logs_at >= LOGS_EVERY_S
            if new == self.index.files or not (is_new or is_due):
                return False
            for path, entry in copies.values():
                if entry.sha256 not in self._stored:
                    self.store.upload(path, entry)
                    self._stored.add(entry.sha256)
            self._write_index(new)
            self._logs_at = time.monotonic()
        finally:
            for path, _ in copies.values():
                if path.parent == self._private:
                    path.unlink(missing_ok=True)
        return True

    def _copy_changes(self) -> dict[str, tuple[Path, Entry]]:
        """Return a file with unchanging content, and its hash, for each name; links are made before any is hashed."""
        copies: dict[str, tuple[Path, tuple[int, int, int] | None]] = {}
        for left in self._private.glob("*.copy"):  # of an upload that was killed or failed
            left.unlink(missing_ok=True)
        for name in self.list_files():
            source, copy = self.folder / name, self._private / f"{os.urandom(8).hex()}.copy"
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                status = source.stat()
                known = (status.st_size, status.st_mtime_ns, status.st_ino)
                if name in self._hashed and self._hashed[name][0] == known:
                    copies[name] = (source, None)
                    if self._hashed[name][1].sha256 in self._stored:
                        continue
                _copy(source, copy, status.st_size if _is_growing(name) else None)
                copies[name] = (copy, known)
        found = {}
        for name, (path, version) in copies.items():
            if version is not None:
                self._hashed[name] = (version, hash_file(path))
            found[name] = (path, self._hashed[name][1])
        return found

    def _write_index(self, files: dict[str, Entry]) -> None:
        remote = self.read_index()
        if remote and remote.id not in {self.index.id, *self.state["ids"]}:
            raise MirrorError(f"{self.store.url}: another machine has continued this run; the folder {self.folder} "
                                "keeps this one; fix: set another OUT_DIR")  # fmt: skip
        index = Index(os.urandom(32).hex(), self.index.generation + 1, files)
        self.save_state(ids=[self.index.id, index.id])  # a kill in between: this folder has written either
        entries = {name: entry._asdict() for name, entry in files.items()}
        self.store.write(INDEX, json.dumps({"format": 1, **index._asdict(), "files": entries}).encode())
        self.index = index
        self.save_state(ids=[index.id], files={name: entry.sha256 for name, entry in files.items()})
        self.store.delete_others(named := {entry.sha256 for entry in files.values()})
        self._stored &= named


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


def _copy(source: Path, copy: Path, size: int | None) -> None:
    """Link a file that is replaced atomically; copy up to `size` bytes of one that grows, of a log whole lines."""
    if size is not None:
        with open(source, "rb") as file:
            data = file.read(size)
        copy.write_bytes(data[: data.rfind(b"\n") + 1] if source.name in _GROWING else data)
        return
    try:
        os.link(source, copy)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copyfile(source, copy)
