"""The watch over the processes of a run: when one dies, fails or hangs, the others know within seconds and end.

Without it they would wait in a collective for one that never comes, until a time-out. Process 0 keeps the hub
(watch_hub.py); every process, itself included, holds one TCP connection to it and says each second where it is. A
connection that breaks is a death; one that makes no progress for too long is stuck. The hub then tells everybody how to
end: one says which process it was, its host and its last position; whoever raised an exception prints it last. Imports
no torch.
"""

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from pathlib import Path

from distribuuuu.distributed.watchdog_server import BEAT_S, CAUSE_S, FAREWELL_S, LAST_STEP, UNREACHABLE_S, Lines
from distribuuuu.launch.signals import end_process, write_stacks

logger = logging.getLogger(__name__)

# Times that a process knocks before it goes without the watch, a beat apart.
MOST_KNOCKS = 30


class WatchdogClient(threading.Thread):
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
        self._address, self._token = address, token
        self._stacks_file = Path(report_dir) / "stacks" / f"rank_{rank}.txt"
        self._lines = self._knock()
        self._position, self._num_marks, self._is_starting = "its start", 0, True
        self._beat_s, self._limit_s, self._main_host = BEAT_S, float("inf"), ""
        self._speaks = self._is_leaving = self._is_culprit = False
        self._may_raise = threading.Event()

    def mark(self, position: str) -> None:
        """Note that the process has come to a position, e.g. 'epoch 2, step 14'."""
        self._position, self._is_starting = position, False
        self._num_marks += 1

    def begin_start_up(self) -> None:
        """Note that the way to the next position may take long, e.g. because a model is compiled."""
        self._is_starting = True
        self._num_marks += 1

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
        self.join(FAREWELL_S)
        self._lines.connection.close()

    def run(self) -> None:
        """Beat and listen until the run is over."""
        try:
            self._watch()
        except Exception as error:  # a bug of the watch must not end a run that is sound
            logger.warning("nobody watches this process any more: %s in its watch", repr(error), exc_info=True)
            self._lines.send({"leaves": True})
        finally:
            self._may_raise.set()

    def _knock(self) -> Lines:
        connection = socket.create_connection(self._address, timeout=30)
        connection.sendall(self._token.encode() + b"\n")
        lines = Lines(connection)
        lines.send({"rank": self.rank, "host": socket.gethostname()})
        return lines

    def _watch(self) -> None:
        # Counted in beats, not timed: a process that was suspended has not missed anything.
        silent, still, num_marks, num_knocks = 0, 0, -1, 1
        while True:
            self._lines.send({"at": self._position, "marks": self._num_marks, "starting": self._is_starting})
            silent, still = silent + 1, (still + 1 if num_marks == self._num_marks else 0)
            num_marks, beat_at = self._num_marks, time.monotonic() + self._beat_s
            for messages in self._messages_until(beat_at):
                if self._is_leaving or (messages and any("over" in message for message in messages)):
                    return
                silent = 0
                for message in messages or ():
                    self._heed(message)
                if messages is None and self._main_host:
                    gone = f"could not be reached for {UNREACHABLE_S} s" if self._lines.is_unreachable else "died"
                    self._end_without_hub(gone)
                    return
                if messages is None:  # not let in, because too many others were there first
                    time.sleep(self._beat_s)
                    num_knocks += 1
                    if num_knocks > MOST_KNOCKS:
                        raise ConnectionError(f"process 0 did not let it in {MOST_KNOCKS} times")
                    self._lines = self._knock()
                    break
            if min(silent, still) * self._beat_s > self._limit_s + UNREACHABLE_S:
                self._write_stacks()
                self._end_without_hub(f"has been silent for {silent * self._beat_s:.0f} s")
                return

    def _messages_until(self, deadline: float):
        """Yield what the hub says until then, None when its connection is broken."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._lines.connection, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                if selector.select(timeout=left):
                    yield self._lines.receive()

    def _heed(self, message: dict) -> None:
        if "end" in message:
            self._end(**message["end"])
        elif "stacks" in message:
            self._write_stacks()
            self._lines.send({"wrote": True})
        self._beat_s = message.get("beat_s", self._beat_s)
        self._limit_s = message.get("limit_s", self._limit_s)
        self._main_host = message.get("main", self._main_host)
        self._speaks = message.get("speaks", self._speaks)

    def _end_without_hub(self, what: str) -> None:
        if self._is_culprit:
            self._may_raise.set()
            return
        message = f"process 0 on {self._main_host} {what} after {LAST_STEP}; the others stop"
        self._end(1, message, stacks=False, says=self._speaks)

    def _end(self, status: int, message: str | None, stacks: bool, says: bool, raises: bool = False) -> None:
        if raises:
            self._may_raise.set()
            return
        if stacks:
            message = f"{message}; every process wrote its stacks to {self._stacks_file.parent}"
        if says and message:
            logger.error("%s", message.replace(LAST_STEP, self._position))
        end_process(status)

    def _write_stacks(self) -> None:
        write_stacks(self._stacks_file, f"process {self.rank}, after {self._position}")
