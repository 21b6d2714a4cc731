"""The child process of a mirrored run: `python -m distribuuuu.mirror FOLDER train|fetch [NAME]`.

It writes JSON lines to its output: first `ready` or `problem`, after `end` on its input the progress, and `done`.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distribuuuu.config import ConfigError
from distribuuuu.config.run_files import TRAIN_LOG, url_of
from distribuuuu.data.packed.transport import RemoteError
from distribuuuu.files.atomic_file import open_for_writing
from distribuuuu.files.locks import lock_file
from distribuuuu.files.untrusted import printable
from distribuuuu.launch.processes import die_with_parent, has_lost_launcher
from distribuuuu.launch.signals import ignore_signals
from distribuuuu.mirror.store import MirrorError, Store
from distribuuuu.mirror.sync import PRIVATE, Mirror, find_newest, is_checkpoint

# Seconds between two scans of the folder; of the longest pause after a failure; of the attempts at the start; between
# two warnings; and of waiting for the child of a training that has just ended.
SCAN_S, LONGEST_PAUSE_S, START_S, WARN_S, LOCK_S = 1.0, 20.0, 30.0, 30.0, 10.0


class _Child:
    """The mirror of one folder, an OUT_DIR, with its messages to the run."""

    def __init__(self, folder: Path):
        self.folder, self.end, self._warned_at = folder, threading.Event(), float("-inf")
        self._output = threading.Lock()
        (folder / PRIVATE).mkdir(parents=True, exist_ok=True)
        self.mirror = Mirror(folder, Store(url_of(folder) or "", folder / PRIVATE, self._progress), self.warn)

    def say(self, **content: Any) -> None:
        """Write a line to the run."""
        with self._output:
            print(json.dumps(content), flush=True)

    def _progress(self, size: int) -> None:
        if self.end.is_set():  # before, nobody reads
            self.say(progress=size)

    def warn(self, problem: str) -> None:
        """Write a warning to the terminal and to the log of the run."""
        text = f"WARNING: OUT_DIR: mirror {self.mirror.store.url}: {printable(problem)}"
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
        try:
            with open_for_writing(self.folder / TRAIN_LOG, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%m-%d %H:%M:%S')} {text}\n")
        except OSError:  # a full disk
            pass

    def retry(self, function: Callable[[], Any], limit_s: float) -> str:
        """Call a function until it succeeds; return the last failure after a time."""
        begin, pause_s = time.monotonic(), 0.5
        while True:
            try:
                function()
                return ""
            except RemoteError as error:
                return str(error)
            except OSError as error:
                if time.monotonic() - begin > limit_s:
                    return f"{self.mirror.store.url} cannot be reached: {error}; fix: check the network and the URL"
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)

    def fetch(self, name: str) -> None:
        """Download what the commands need: all but checkpoints, and the one of a name."""
        if (index := self.mirror.find_index()) is None or not index.files:
            raise MirrorError(f"{self.mirror.store.url}: no run is there; fix: check the URL")
        if name and name not in index.files:
            raise MirrorError(f"{self.mirror.store.url}/{name}: no such file; it has {', '.join(index.files)[:400]}")
        if index.id in self.mirror.state["ids"] and not self.mirror.state["is_restoring"] and not name:
            return  # the folder has the run that it mirrors, or its newer files
        if find_newest(self.mirror.list_files()) and not self.mirror.state["is_restoring"]:
            self.mirror.reconcile()
        else:
            while self.mirror.restore(index, lambda other: other == name or not is_checkpoint(other)):
                if (newer := self.mirror.read_index()) is None or newer.id == index.id:
                    break
                index = newer  # the run has replaced files meanwhile

    def listen(self) -> None:
        """Note the end that the run requests; if the run ends otherwise, this process ends too."""
        if not sys.stdin.readline():
            os._exit(1)
        self.end.set()

    def work(self) -> None:
        """Upload changes until the end is requested and everything is there, or another run has taken over."""
        pause_s = SCAN_S
        while True:
            is_last = self.end.is_set()
            try:
                self.mirror.upload_changes(with_logs=is_last)
                pause_s = SCAN_S
                if is_last:
                    files = self.mirror.index.files
                    return self.say(done=True, files=len(files), bytes=sum(entry.size for entry in files.values()))
            except MirrorError as error:
                self.warn(f"{error}; nothing more is uploaded")
                self.end.wait()
                return self.say(done=False, reason=str(error))
            except (OSError, ConfigError) as error:
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S if not is_last else 2.0)
                if time.monotonic() - self._warned_at >= WARN_S:
                    self._warned_at = time.monotonic()
                    self.warn(f"{error}; the run is not affected, and it is tried again")
            if not is_last:
                self.end.wait(pause_s)
            elif pause_s > SCAN_S:
                time.sleep(pause_s)


def main(folder: Path, mode: str, name: str = "") -> None:
    """Serve one run."""
    ignore_signals()
    die_with_parent(signal.SIGKILL)
    if has_lost_launcher():
        return None
    child = _Child(folder)
    with open_for_writing(folder / PRIVATE / "lock", "ab") as lock:
        if not lock_file(lock.fileno(), LOCK_S if mode == "train" else 0.0):
            if mode == "fetch":  # a training here has the newest files
                return child.say(ready=True)
            return child.say(problem=f"{folder} is in use by another training of this machine; fix: wait for its end")
        try:
            problem = child.retry(child.mirror.reconcile if mode == "train" else lambda: child.fetch(name), START_S)
        except MirrorError as error:
            problem = str(error)
        if problem or mode == "fetch":
            return child.say(problem=problem) if problem else child.say(ready=True)
        child.say(ready=True)
        threading.Thread(target=child.listen, daemon=True).start()
        return child.work()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), *sys.argv[2:])
    finally:
        os._exit(1 if sys.exc_info()[0] else 0)  # not waiting for a request that hangs
