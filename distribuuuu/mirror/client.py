"""The run's side of its mirror: a child process that uploads, so that the training has no thread and no connection."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.config.run_files import CHECKPOINTS, LOCK, url_of
from distribuuuu.data.packed.store import read_answer, start_python
from distribuuuu.mirror.states import is_mirrored

# Seconds without progress after which the end of a run no longer waits, and seconds of a run that is stopped in all.
NO_PROGRESS_S, STOP_S = 600.0, 20.0
# Seconds in which a new file appears on other nodes, and between two looks at it.
APPEARS_S, POLL_S = 10.0, 0.2


class MirrorIncomplete(ConfigError):
    """The run has finished, and its mirror lacks files that OUT_DIR has."""

    one_process = True
    status = 74  # EX_IOERR of sysexits.h


class MirrorClient:
    """The mirror of an OUT_DIR, open for the length of a block, whose end waits for the uploads; on every process."""

    def __init__(self, folder: str | os.PathLike):
        self._folder, self._url = Path(folder), url_of(folder)
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start, on the main process, the child process, which restores the folder; the run has locked it.

        Raises:
            ConfigError: on every process: it cannot be restored, is in use, or is not the same folder on all nodes.
        """
        from distribuuuu.distributed import comm as dist

        problem = ""
        if dist.is_main():
            process = _start(self._folder)
            problem = read_answer(process)["problem"]
            self._process = None if problem else process
        problem = dist.broadcast_object(problem)
        if not problem and not is_shared(self._folder):
            problem = f"got {self._url}, whose local folder {self._folder} is not the same one on all nodes"
            problem += "; fix: set XDG_CACHE_HOME to a folder that they share"
        if problem:
            error = ConfigError(f"OUT_DIR: {problem}")
            error.on_all_processes = True
            raise error

    def __enter__(self) -> "MirrorClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if (process := self._process) is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.write(f"{NO_PROGRESS_S} {STOP_S if kind else 'inf'}\n".encode())  # type: ignore[union-attr]
        answer = read_answer(process)
        process.kill()
        process.wait()
        if not answer["problem"]:
            size = f"{counted(answer['files'], 'file')}, {answer['bytes'] / 1e6:,.1f} MB"
            print(f"mirror {self._url} is complete: {size}", file=sys.stderr)
            return
        problem = f"mirror {self._url} is NOT complete: {answer['problem']}; all files are in {self._folder}; fix: run "
        problem += "the same command again, which uploads the rest"
        if kind is None:
            raise MirrorIncomplete(problem)
        print(problem, file=sys.stderr)


def is_shared(out_dir: str | os.PathLike) -> bool:
    """Tell whether every process sees the lock of the main process, and so its checkpoints. All must call it."""
    from distribuuuu.distributed import comm as dist

    # Not opened: the kernel releases the lock when its holder closes any descriptor of the file.
    path, deadline = Path(out_dir, LOCK), time.monotonic() + APPEARS_S
    expected = dist.broadcast_object(path.exists() and path.stat().st_mtime_ns)
    while not (is_seen := path.exists() and path.stat().st_mtime_ns == expected) and time.monotonic() < deadline:
        time.sleep(POLL_S)  # on network file systems this takes seconds
    return all(dist.gather_objects(is_seen))


def restore(folder: str | os.PathLike) -> None:
    """Download the run at the URL of a folder unless the folder is as new; raise ConfigError if that fails."""
    _fetch(Path(folder), f"{CHECKPOINTS}/", "OUT_DIR")


def fetch(path: Path) -> str:
    """Download the run of a path of `local_folder`, or of a checkpoint or weights below it; return the local path."""
    folder = path.parent.parent if path.parent.name == CHECKPOINTS else path.parent if ".pth" in path.name else path
    _fetch(folder, path.relative_to(folder).as_posix(), "RUN")
    if not any(map(is_mirrored, os.listdir(folder))) or not path.exists():
        raise ConfigError(f"RUN: {url_of(path)}: there is no such run or file; fix: check the URL")
    print(f"{url_of(folder)}: the local copy is {path}", file=sys.stderr)
    return str(path)


def _fetch(folder: Path, wanted: str, key: str) -> None:
    """Download a run but its checkpoints, and those whose names begin with a text; raise ConfigError for the key."""
    with _start(folder, wanted) as process:
        if problem := read_answer(process)["problem"]:
            raise ConfigError(f"{key}: {problem}")


def _start(folder: Path, *wanted: str) -> subprocess.Popen:
    return start_python("-m", __package__, str(folder), *wanted)
