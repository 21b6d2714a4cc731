"""The run's side of its mirror: a child process that uploads, so that the training has no thread and no connection."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.config.run_files import url_of
from distribuuuu.data.packed.store import read_answer, start_python
from distribuuuu.mirror.states import is_mirrored

# Seconds that the end of a finished run waits for its uploads, and that of a run that is stopped.
END_S, STOP_S = 1800.0, 20.0


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
            ConfigError: on every process: it cannot be restored, or is in use.
        """
        from distribuuuu.distributed import comm as dist

        def begin() -> None:
            self._process = _start(self._folder, "OUT_DIR")

        dist.on_main(begin)

    def __enter__(self) -> "MirrorClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if (process := self._process) is None:
            return
        try:
            said, _ = process.communicate(b"end\n", STOP_S if kind else END_S)
        except subprocess.TimeoutExpired:
            said = b'{"problem": "the store does not answer in time"}'
        process.kill()
        process.wait()
        answer = json.loads(said or '{"problem": "the process that uses the store has ended"}')
        if not answer["problem"]:
            size = f"{counted(answer['files'], 'file')}, {answer['bytes'] / 1e6:,.1f} MB"
            print(f"mirror {self._url} is complete: {size}", file=sys.stderr)
            return
        problem = f"mirror {self._url} is NOT complete: {answer['problem']}; all files are in {self._folder}; fix: run "
        problem += "the same command again, which uploads the rest"
        if kind is None:
            raise MirrorIncomplete(problem)
        print(problem, file=sys.stderr)


def restore(folder: str | os.PathLike, key: str = "OUT_DIR", wanted: str = "all") -> None:
    """Download the run at the URL of a folder unless the folder is as new; `wanted` "run": all but its checkpoints.

    Raises:
        ConfigError: that fails; of the option or argument `key`.
    """
    with _start(folder, key, wanted):
        pass  # it ends by itself


def fetch(folder: Path) -> str:
    """Download the run of a path of `local_folder` without its checkpoints; return the path."""
    if ".pth" in folder.name:
        raise ConfigError(f"RUN: {url_of(folder)}: got a file; expected the URL of an OUT_DIR; fix: copy the file")
    restore(folder, "RUN", "run")
    if not any(map(is_mirrored, os.listdir(folder))):
        raise ConfigError(f"RUN: {url_of(folder)}: there is no such run; fix: check the URL")
    print(f"{url_of(folder)}: the local copy is {folder}", file=sys.stderr)
    return str(folder)


def _start(folder: str | os.PathLike, key: str, *wanted: str) -> subprocess.Popen:
    """Start the child process; raise ConfigError, of the option or argument `key`, if the folder is not restored."""
    process = start_python("-m", f"{__package__}.sync", str(folder), *wanted)
    if problem := read_answer(process)["problem"]:
        raise ConfigError(f"{key}: {problem}")
    return process
