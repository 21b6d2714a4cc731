"""The child process of a mirrored run: `python -m distribuuuu.mirror FOLDER train|restore|fetch [NAME]`.

It writes a JSON line when the folder is restored, and another one at the end, which a line in its input requests.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from distribuuuu.config import ConfigError
from distribuuuu.config.run_files import url_of
from distribuuuu.data.packed.store import RemoteError, limit_memory
from distribuuuu.files.atomic_file import open_for_writing
from distribuuuu.files.locks import lock_file, take_turn
from distribuuuu.launch.processes import die_with_parent, has_lost_launcher
from distribuuuu.launch.signals import ignore_signals
from distribuuuu.mirror.states import MirrorError, StateLog
from distribuuuu.mirror.sync import PRIVATE, Mirror

# Seconds between two scans of the folder; of the longest pause after a failure; between two warnings; and of waiting
# for the child of a training that has just ended.
SCAN_S, LONGEST_PAUSE_S, WARN_S, LOCK_S = 1.0, 20.0, 30.0, 10.0


def say(problem: str = "", **content: int) -> None:
    """Write a line to the run."""
    print(json.dumps({"problem": problem, **content}), flush=True)


def listen(log: StateLog, end: threading.Event) -> None:
    """Wait for the line that requests the end: seconds of waiting without progress, and in all; exit after them."""
    if not (line := sys.stdin.readline()):
        os._exit(1)  # the run was killed
    idle_s, most_s = map(float, line.split())
    begin = time.monotonic()
    end.set()
    while time.monotonic() < min(begin + most_s, max(begin, log.moved_at) + idle_s):
        time.sleep(0.2)
    say("the store does not answer in time")
    os._exit(1)


def work(mirror: Mirror, end: threading.Event) -> None:
    """Upload changes until the end is requested and everything is there, or another run has taken over."""
    pause_s, warned_at = SCAN_S, float("-inf")
    while True:
        is_last = end.is_set()
        try:
            mirror.upload_changes(is_last)
            pause_s = SCAN_S
            if is_last:
                entries = mirror.newest.files.values()
                return say(files=len(entries), bytes=sum(entry.size for entry in entries))
        except MirrorError as error:
            mirror.warn(f"{error}; nothing more is uploaded")
            end.wait()
            return say(str(error))
        except (OSError, ConfigError) as error:
            pause_s = 2.0 if is_last else min(2 * pause_s, LONGEST_PAUSE_S)
            if time.monotonic() - warned_at >= WARN_S:
                warned_at = time.monotonic()
                mirror.warn(f"{error}; the run is not affected, and it is tried again")
        time.sleep(pause_s) if is_last else end.wait(pause_s)


def prepare(mirror: Mirror, mode: str, name: str) -> str:
    """Restore the folder, or what a command reads of it; return why that failed, or ""."""
    try:
        mirror.fetch(name) if mode == "fetch" else mirror.reconcile(creates=mode == "train")
    except (MirrorError, RemoteError) as error:
        return str(error)
    except OSError as error:
        return f"{mirror.log.url} cannot be reached: {error}; fix: check the network and the URL"
    return ""


def main(folder: Path, mode: str, name: str = "") -> None:
    """Serve one run."""
    ignore_signals()
    limit_memory()
    die_with_parent(signal.SIGKILL)
    if has_lost_launcher():
        return
    mirror, end, problem = Mirror(folder, url_of(folder) or ""), threading.Event(), ""
    with open_for_writing(folder / PRIVATE / "lock", "ab") as lock:
        with take_turn(folder / PRIVATE / "restore"):  # each process of a training restores the folder first
            if lock_file(lock.fileno(), LOCK_S if mode == "train" else 0.0):
                problem = prepare(mirror, mode, name)
            elif mode == "train":  # other modes use its files, which are the newest ones
                problem = f"{folder} is in use by another training of this machine; fix: wait for its end"
        say(problem)
        if not problem and mode == "train":
            threading.Thread(target=listen, args=(mirror.log, end), daemon=True).start()
            work(mirror, end)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), *sys.argv[2:])
    finally:
        os._exit(1 if sys.exc_info()[0] else 0)  # not waiting for a request that hangs
