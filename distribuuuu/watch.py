"""The watch over the processes of a run: when one dies, fails or hangs, the others know within seconds and end.

Without it they would wait in a collective for one that never comes, until a time-out. Process 0 keeps the hub
(watch_hub.py); every process, itself included, holds one TCP connection to it and says each second where it is. A
connection that breaks, or stays silent, is a death. The hub then tells everybody how to end: one says which process it
was, its host and its last position; whoever raised an exception prints it last. Imports no torch.
"""

import contextlib
import faulthandler
import logging
import os
import selectors
import socket
import threading
import time
from pathlib import Path

from distribuuuu.watch_hub import BEAT_S, CAUSE_S, FAREWELL_S, LAST_STEP, SILENCE, Lines

logger = logging.getLogger(__name__)

# Seconds that a checkpoint which is being written gets when the process has to end; less than FAREWELL_S.
SAVE_S = 2.0


class Watch(threading.Thread):
    """A process's own part: it says where the process is, and ends it when the hub says so or has died.

    Args:
        rank: the number of this process.
        address: host name and port of the hub.
        token: what the hub wants to be shown.
        report_dir: the folder that gets `stacks/rank_N.txt` on a time-out.
    """

    def __init__(self, rank: int, address: tuple[str, int], token: str, report_dir: str | os.PathLike):
        super().__init__(name="watch", daemon=True)
        self.rank = rank
        self._report_dir = Path(report_dir)
        self._lines = Lines(socket.create_connection(address, timeout=30))
        self._lines.connection.settimeout(None)
        self._lines.send({"token": token, "rank": rank, "host": socket.gethostname()})
        self._position, self._marked_at = "its start", time.monotonic()
        self._hosts: dict[str, str] = {}
        self._is_leaving = False
        self._is_culprit = False
        self._may_raise = threading.Event()

    def mark(self, position: str) -> None:
        """Note that the process has come to a position, e.g. 'epoch 2, step 14'."""
        self._position, self._marked_at = position, time.monotonic()

    def fail(self, status: int, known: bool, consequence: bool) -> None:
        """Tell the others that this process has an exception; return when it is this process's turn to print it.

        Args:
            status: what all are to exit with.
            known: the exception says all there is to say.
            consequence: it may come from another process's end; if so, this one ends here without a word.
        """
        self._is_culprit = not consequence
        failed = {"status": status, "known": known, "consequence": consequence}
        self._lines.send({"failed": failed, "at": self._position})
        self._may_raise.wait(CAUSE_S + FAREWELL_S + 5)

    def close(self) -> None:
        """Leave in peace."""
        self._is_leaving = True
        self._lines.send({"leaves": True})
        with contextlib.suppress(OSError):
            self._lines.connection.shutdown(socket.SHUT_RDWR)
        self.join()
        self._lines.connection.close()

    def run(self) -> None:
        """Beat and listen until the run is over."""
        silent = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self._lines.connection, selectors.EVENT_READ)
            while True:
                self._lines.send({"at": self._position, "age_s": time.monotonic() - self._marked_at})
                silent += 1
                beat_at = time.monotonic() + BEAT_S
                while (left := beat_at - time.monotonic()) > 0:
                    if not selector.select(timeout=left):
                        continue
                    messages, silent = self._lines.receive(), 0
                    if self._is_leaving or (messages and any("over" in message for message in messages)):
                        return
                    if messages is None:
                        self._end_without_hub("died")
                        return
                    for message in messages:
                        self._heed(message)
                if silent > SILENCE:
                    self._end_without_hub(f"has been silent for {SILENCE} s")
                    return

    def _heed(self, message: dict) -> None:
        if "end" in message:
            self._end(**message["end"])
        elif "stacks" in message:
            self._write_stacks()
            self._lines.send({"wrote": True})
        else:
            self._hosts = message["hosts"]

    def _end_without_hub(self, what: str) -> None:
        if self._is_culprit:
            self._may_raise.set()
            return
        host = self._hosts.get("0", "?")
        elsewhere = [int(rank) for rank, name in self._hosts.items() if name != host]
        message = f"process 0 on {host} {what} after {LAST_STEP}; the others stop"
        self._end(1, message, stacks=False, says=self.rank == min(elsewhere, default=1))

    def _end(self, status: int, message: str | None, stacks: bool, says: bool, raises: bool = False) -> None:
        if raises:
            self._may_raise.set()
            return
        if stacks:
            message = f"{message}; every process wrote its stacks to {self._stacks_file.parent}"
        if says and message:
            logger.error("%s", message.replace(LAST_STEP, self._position))
        for thread in threading.enumerate():  # as Python itself would: a checkpoint that is being written is still good
            if not thread.daemon and thread is not threading.main_thread():
                thread.join(SAVE_S)
        os._exit(status)

    @property
    def _stacks_file(self) -> Path:
        return self._report_dir / "stacks" / f"rank_{self.rank}.txt"

    def _write_stacks(self) -> None:
        path = self._stacks_file
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"process {self.rank} on {socket.gethostname()}, pid {os.getpid()}, after {self._position},")
                file.write(f" {time.monotonic() - self._marked_at:.0f} s ago\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
