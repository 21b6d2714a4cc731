"""The mirror of a run: the side of the run, and the child process that restores its folder and uploads.

The training itself has no thread and no connection for it.
"""

import contextlib
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from distribuuuu.config.errors import ConfigError, counted
from distribuuuu.config.run_files import CHECKPOINTS, TRAIN_LOG, url_of
from distribuuuu.data.packed.store import LostObjectError, RemoteError, read_answer, start
from distribuuuu.files.atomic_file import make_folder, open_for_writing, replacing
from distribuuuu.files.locks import lock_file, take_turn
from distribuuuu.files.untrusted import printable
from distribuuuu.mirror.states import OBJECTS, Entry, MirrorError, State, StateLog, hash_file, is_mirrored

# Seconds that the end of a finished run waits for its uploads, and that of a stopped one: less than nproc.GRACE_S.
END_S, STOP_S = 1800.0, 12.0
# Private files of the mirror in the folder of a run. The identifier of the folder exists while the folder is whole.
PRIVATE, IDENTIFIER = ".mirror", "id"
# Seconds between two uploads, unless there are other checkpoints than at the last one.
EVERY_S = 30.0
# Seconds between two scans; after a failure, also at the end; and for the child of a training that has just ended.
SCAN_S, PAUSE_S, END_PAUSE_S, LOCK_S = 1.0, 20.0, 2.0, 10.0


class MirrorClient(contextlib.AbstractContextManager):
    """The mirror of an OUT_DIR, open for the length of a block, whose end waits for the uploads; on every process."""

    def __init__(self, folder: str):
        self._folder = folder
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start, on the main process, the child process; raise ConfigError if it cannot restore the locked folder."""
        self._process = _start(self._folder)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if (process := self._process) is None:
            return
        url = url_of(self._folder) or ""
        try:
            said, _ = process.communicate(b"end\n", STOP_S if kind else END_S)
            print(f"mirror {url} is complete: {read_answer(said, url)}", file=sys.stderr)
            return
        except subprocess.TimeoutExpired:
            problem = "the store does not answer in time"
        except (RemoteError, OSError) as wrong:
            problem = str(wrong)
        process.kill()
        problem = f"mirror {url} is NOT complete: {problem}; all files are in {self._folder}; fix: rerun the command"
        if kind is None:
            raise MirrorError(problem)
        print(problem, file=sys.stderr)


def restore(folder: str) -> None:
    """Download the run at the URL of a folder unless the folder is as new; raise ConfigError if that fails."""
    _start(folder, "all").communicate()


def fetch(folder: str) -> str:
    """Download the run of a path of `local_folder` without its checkpoints; return the path."""
    _start(folder, "run", "RUN").communicate()
    if not any(map(is_mirrored, os.listdir(folder))):
        raise ConfigError(f"RUN: {url_of(folder)}: there is no run; expected the URL of an OUT_DIR; fix: check it")
    print(f"{url_of(folder)}: the local copy is {folder}", file=sys.stderr)
    return folder


def _start(folder: str, wanted: str = "", key: str = "OUT_DIR") -> subprocess.Popen:
    """Start the child process; raise ConfigError, of the option or argument `key`, if it cannot restore the folder."""
    url = url_of(folder) or ""
    process = start(__name__, url, folder, wanted)
    assert process.stdout, "it is a pipe"
    try:
        read_answer(process.stdout.readline(), url)
    except (RemoteError, OSError) as error:
        raise ConfigError(f"{key}: {error}") from error
    return process


# ---------------------------------------------------------------------------------- the child process


def main(url: str, folder: str, wanted: str) -> Iterator[str]:
    """Restore a folder: the files of the "run" without checkpoints, or "all"; else mirror a run to its end.

    Yields:
        a text when the folder is restored, and one when everything is uploaded.
    """
    mirror = Mirror(Path(folder), url)
    with open_for_writing(mirror.folder / PRIVATE / "lock", "ab") as lock:
        with take_turn(mirror.folder / PRIVATE / "restore"):  # each process of a training restores the folder first
            if lock_file(lock.fileno(), 0.0 if wanted else LOCK_S):
                mirror.fetch(wanted == "all") if wanted else mirror.reconcile()
            elif not wanted:  # others use its files, which are the newest ones
                raise MirrorError(f"{folder} is in use by another training of this machine; fix: wait for its end")
        yield "restored"
        if not wanted:
            yield work(mirror)


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
        self._stored = set[Entry]()  # those whose objects are there
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
            MirrorError: as `fetch`, or the store does not keep its promises.
        """
        self.fetch()
        if not self.id:
            self.id = os.urandom(32).hex()
            with replacing(self._file, "w") as file:
                file.write(self.id)
        if not self.newest.number:
            self._append({})
            if self.log.create(self.newest._replace(id="")) != self.newest:
                problem = "the store replaces objects that it should only create"
                raise MirrorError(f"{self.log.url}: {problem}; fix: use a store with conditional writes")

    def fetch(self, with_checkpoints: bool = True) -> None:
        """Restore the folder, with or without its checkpoints, unless it is as new.

        What is there is not downloaded. Damaged files are skipped with a warning.

        Raises:
            MirrorError: the newest state is damaged, or all of its checkpoints are.
        """
        self.newest, own = self.log.find_newest(), find_position(self.list_files())
        files = self.newest.files
        self._stored = {*files.values()}
        if not files or self.id and own and own >= find_position(files):
            return
        seen, now = self._file.with_name("copied"), f"{self.newest.number} {self.newest.id}"
        if not with_checkpoints and seen.is_file() and seen.read_text() == now:  # what other commands wrote there stays
            return
        self.id = ""
        self._file.unlink(missing_ok=True)
        wanted, restored = [name for name in files if with_checkpoints or not is_checkpoint(name)], set[str]()
        for name in wanted:
            entry, folder = files[name], make_folder(self.folder, *Path(name).parent.parts)
            try:
                self.log.download(f"{OBJECTS}/{entry.sha256}", entry.size, folder / Path(name).name, entry.check)
                restored.add(name)
            except LostObjectError as error:
                self.warn(f"{name} is damaged in the mirror and was skipped: {error}")
                self._stored.discard(entry)
        if any(map(is_checkpoint, wanted)) and not any(map(is_checkpoint, restored)):
            raise MirrorError(f"{self.log.url}: all checkpoints are damaged; fix: set another OUT_DIR")
        if not with_checkpoints and len(restored) == len(wanted):
            seen.write_text(now)

    def list_files(self) -> list[str]:
        """Return the names of the files to mirror: the newest checkpoint first, so that no other file is older."""
        paths = (Path(root, name) for root, _, names in os.walk(self.folder) for name in names)
        found = (path.relative_to(self.folder).as_posix() for path in paths if not path.is_symlink())
        return sorted(filter(is_mirrored, found), key=lambda name: find_position([name]), reverse=True)

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
                status = os.fstat(file.fileno())
                version = (status.st_size, status.st_mtime_ns, status.st_ino)
                if self._hashed.get(name, (None,))[0] != version:
                    self._hashed[name] = version, hash_file(file)
                files[name] = entry = self._hashed[name][1]
                if entry not in self._stored:
                    self.log.upload(file, entry)
                    self._stored.add(entry)
        self._uploaded_at = time.monotonic()
        if files != before:
            self._append(files)
        return files != before

    def _append(self, files: dict[str, Entry]) -> None:
        """Create the next state."""
        state = State(self.newest.number + 1, self.id, files)
        while (found := self.log.create(state)) != state:
            if found.id != self.id:
                raise MirrorError(f"{self.log.url}: another machine has continued this run; the folder {self.folder} "
                                  "keeps this one; fix: set another OUT_DIR")  # fmt: skip
            state = state._replace(number=found.number + 1)  # an earlier request of this folder has arrived late
        self.newest = state
        self._stored &= {*files.values()}
        with contextlib.suppress(MirrorError):  # an old state is damaged: nothing is deleted
            self.log.prune(state)


def is_checkpoint(name: str) -> bool:
    """Tell whether the name of a file is that of a checkpoint to resume from."""
    return name.startswith(f"{CHECKPOINTS}/")


def find_position(names: Iterable[str]) -> tuple[int, ...]:
    """Return the numbers in the name of the newest checkpoint, its epoch and step; () if there is none."""
    stems = [name.rpartition("/")[2].partition(".")[0] for name in filter(is_checkpoint, names)]
    return max((tuple(map(int, re.findall("[0-9]+", stem))) or (0,) for stem in stems), default=())


def is_end_requested(timeout_s: float | None = None) -> bool:
    """Wait for the line that requests the end, and tell whether it came; exit if the run was killed."""
    is_readable = bool(select.select([sys.stdin], [], [], timeout_s)[0])
    if is_readable and not sys.stdin.readline():
        os._exit(1)
    return is_readable


def work(mirror: Mirror) -> str:
    """Upload changes until the end is requested and everything is there; return the number of files and their size.

    Raises:
        MirrorError: another run has taken over; raised at the end.
    """
    is_last, pause_s = False, 0.0
    while True:
        is_last = is_last or is_end_requested(pause_s)
        pause_s = SCAN_S
        try:
            mirror.upload_changes(is_last)
            if is_last:
                sizes = [entry.size for entry in mirror.newest.files.values()]
                return f"{counted(len(sizes), 'file')}, {sum(sizes) / 1e6:,.1f} MB"
        except MirrorError as error:
            mirror.warn(f"{error}; nothing more is uploaded")
            if not is_last:
                is_end_requested()
            raise
        except (OSError, RemoteError) as error:
            pause_s = PAUSE_S
            mirror.warn(f"{error}; the run is not affected, and it is tried again")
            if is_last:
                time.sleep(END_PAUSE_S)
