"""The child process of a mirrored run: `python -m distribuuuu.mirror.sync FOLDER`, or `FOLDER run` or `all`.

It restores the folder at the start, answers, and uploads until a line in its input requests the end. With `run`, it
only restores what is no checkpoint, with `all` everything.
"""

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from distribuuuu.config import ConfigError
from distribuuuu.config.run_files import CHECKPOINTS, TRAIN_LOG, url_of
from distribuuuu.data.packed.store import LostObjectError, RemoteError, set_up_child, write_answer
from distribuuuu.files.atomic_file import make_folder, open_for_writing, replacing
from distribuuuu.files.locks import lock_file, take_turn
from distribuuuu.files.untrusted import printable
from distribuuuu.mirror.states import Entry, MirrorError, State, StateLog, is_mirrored

# Private files of the mirror in the folder of a run. The identifier of the folder exists while the folder is whole.
PRIVATE, IDENTIFIER = ".mirror", "id"
# Seconds between two uploads, unless there are other checkpoints than at the last one.
EVERY_S = 30.0
# Seconds between two scans of the folder; after a failure, also at the end; and of waiting for the child of a training
# that has just ended.
SCAN_S, PAUSE_S, END_PAUSE_S, LOCK_S = 1.0, 20.0, 2.0, 10.0


class Mirror:
    """The folder of a run and the log at a URL.

    Attributes:
        newest: the newest known state at the URL.
        id: the identifier of the folder in its states; empty if it is new, or was restored in part.
    """

    def __init__(self, folder: Path, url: str):
        self.folder, self.log, self.newest, self.id = folder, StateLog(url), State(0, "", {}), ""
        self._file = folder / PRIVATE / IDENTIFIER
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            self.id = self._file.read_text("ascii", "replace")
        self._stored = set[str]()  # objects that are there
        self._hashed: dict[str, tuple[tuple[int, int, int], Entry]] = {}  # with size, time and inode of the file
        self._uploaded_at = float("-inf")

    def warn(self, problem: str) -> None:
        """Write a warning to the terminal and to the log of the run."""
        text = f"WARNING: OUT_DIR: mirror {self.log.url}: {printable(problem)}\n"
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}")
        with contextlib.suppress(OSError), open_for_writing(self.folder / TRAIN_LOG, "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%m-%d %H:%M:%S')} {text}")

    def reconcile(self) -> None:
        """Restore the folder unless its newest checkpoint is as new as that of the store, or newer.

        The first state has no files: a first upload that is killed is known by it.

        Raises:
            MirrorError: the newest state is damaged, or the store does not keep its promises.
        """
        found = self.fetch()
        if not self.id:
            self.id = os.urandom(32).hex()
            with replacing(self._file, "w") as file:
                file.write(self.id)
        if not found:
            self._append({})
            if self.log.create(self.newest._replace(id="")) != self.newest:
                problem = "the store replaces objects that it should only create"
                raise MirrorError(f"{self.log.url}: {problem}; fix: use a store with conditional writes")

    def _is_as_new_as(self, state: State) -> bool:
        """Tell whether the folder is whole, and its newest checkpoint as new as that of a state, or newer."""
        own = find_newest(self.list_files())
        return bool(self.id and own) and _position(own) >= _position(find_newest(state.files))

    def fetch(self, with_checkpoints: bool = True) -> State | None:
        """Restore the folder, with or without its checkpoints, unless it is as new; return the newest state."""
        if found := self.log.find_newest():
            self.newest, self._stored = found, found.objects
            if found.files and not self._is_as_new_as(found):
                self.restore(found, with_checkpoints)
        return found

    def restore(self, state: State, with_checkpoints: bool = True) -> None:
        """Download the files of a state. Damaged ones are skipped with a warning.

        Raises:
            MirrorError: it names checkpoints, but all are damaged.
        """
        self.id = ""
        self._file.unlink(missing_ok=True)
        names = [name for name in state.files if with_checkpoints or not is_checkpoint(name)]
        damaged = {name for name in names if not self._download(name, state.files[name])}
        checkpoints = {*filter(is_checkpoint, names)}
        if checkpoints and checkpoints <= damaged:
            raise MirrorError(f"{self.log.url}: all checkpoints are damaged; fix: set another OUT_DIR")
        self._stored -= {state.files[name].sha256 for name in damaged}

    def _download(self, name: str, entry: Entry) -> bool:
        """Download a file unless it is there; return False after a warning if it is damaged."""
        path = self.folder / name
        try:
            make_folder(self.folder, *Path(name).parent.parts)
            if not path.is_file() or path.stat().st_size != entry.size or self._entry(name) != entry:
                with replacing(path) as file:
                    self.log.download(entry, file.write)
        except LostObjectError as error:
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

    def upload_changes(self, is_last: bool = False) -> bool:
        """Upload what has changed, then the state; return whether anything was written.

        Raises:
            MirrorError: another machine has created this state.
            OSError, RemoteError: the store cannot be written to.
        """
        names, before, files = self.list_files(), self.newest.files, dict[str, Entry]()
        is_new = {*filter(is_checkpoint, names)} != {*filter(is_checkpoint, before)}
        if not (is_new or is_last or time.monotonic() - self._uploaded_at >= EVERY_S):
            return False
        for name in names:
            # Open, its content remains although the run replaces or deletes it.
            with contextlib.suppress(FileNotFoundError), open(self.folder / name, "rb") as file:
                files[name] = entry = self._entry(name, file)
                if entry.sha256 not in self._stored:
                    self.log.upload(file, entry)
                    self._stored.add(entry.sha256)
        self._uploaded_at = time.monotonic()
        if files != before:
            self._append(files)
        return files != before

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
        state = State(self.newest.number + 1, self.id, files)
        while (found := self.log.create(state)) != state:
            if found.id != self.id:
                raise MirrorError(f"{self.log.url}: another machine has continued this run; the folder {self.folder} "
                                  "keeps this one; fix: set another OUT_DIR")  # fmt: skip
            state = state._replace(number=found.number + 1)  # an earlier request of this folder has arrived late
        self.newest = state
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


def listen(end: threading.Event) -> None:
    """Wait for the line that requests the end."""
    if not sys.stdin.readline():
        os._exit(1)  # the run was killed
    end.set()


def work(mirror: Mirror, end: threading.Event) -> None:
    """Upload changes until the end is requested and everything is there, or another run has taken over."""
    while True:
        is_last, pause_s = end.is_set(), SCAN_S
        try:
            mirror.upload_changes(is_last)
            if is_last:
                entries = mirror.newest.files.values()
                return write_answer(problem="", files=len(entries), bytes=sum(entry.size for entry in entries))
        except MirrorError as error:
            mirror.warn(f"{error}; nothing more is uploaded")
            end.wait()
            return write_answer(problem=str(error))
        except (OSError, ConfigError) as error:
            pause_s = END_PAUSE_S if is_last else PAUSE_S
            mirror.warn(f"{error}; the run is not affected, and it is tried again")
        time.sleep(pause_s) if is_last else end.wait(pause_s)


def main(folder: Path, wanted: str = "") -> None:
    """Mirror a run to its end or, with `wanted`, restore the files of a "run" without checkpoints, or "all"."""
    set_up_child()
    mirror, problem = Mirror(folder, url_of(folder) or ""), ""
    with open_for_writing(folder / PRIVATE / "lock", "ab") as lock:
        with take_turn(folder / PRIVATE / "restore"):  # each process of a training restores the folder first
            if lock_file(lock.fileno(), 0.0 if wanted else LOCK_S):
                try:
                    mirror.fetch(wanted == "all") if wanted else mirror.reconcile()
                except (MirrorError, RemoteError) as error:
                    problem = str(error)
                except OSError as error:
                    problem = f"{mirror.log.url} cannot be reached: {error}; fix: check the network and the URL"
            elif not wanted:  # others use its files, which are the newest ones
                problem = f"{folder} is in use by another training of this machine; fix: wait for its end"
        write_answer(problem=problem)
        if not problem and not wanted:
            end = threading.Event()
            threading.Thread(target=listen, args=(end,), daemon=True).start()
            work(mirror, end)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), *sys.argv[2:])
    finally:
        os._exit(1 if sys.exc_info()[0] else 0)  # not waiting for a request that hangs
