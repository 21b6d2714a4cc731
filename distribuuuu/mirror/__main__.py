"""The child process of a mirrored run: `python -m distribuuuu.mirror FOLDER`, or `FOLDER run` or `all`, see `restore`.

It answers when the folder is restored, and at the end of a run, which a line in its input requests.
"""

import os
import sys
import threading
import time
from pathlib import Path

from distribuuuu.config import ConfigError
from distribuuuu.config.run_files import url_of
from distribuuuu.data.packed.store import RemoteError, set_up_child, write_answer
from distribuuuu.files.atomic_file import open_for_writing
from distribuuuu.files.locks import lock_file, take_turn
from distribuuuu.mirror.states import MirrorError
from distribuuuu.mirror.sync import PRIVATE, Mirror

# Seconds between two scans of the folder; after a failure, also at the end; and of waiting for the child of a training
# that has just ended.
SCAN_S, PAUSE_S, END_PAUSE_S, LOCK_S = 1.0, 20.0, 2.0, 10.0


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
