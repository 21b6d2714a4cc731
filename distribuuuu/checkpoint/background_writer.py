"""Thread that writes files while training continues, with retries."""

import logging
import threading
import time
from collections.abc import Callable

from distribuuuu.launch.signals import WRITER_NAME

logger = logging.getLogger(__name__)

# Seconds between two attempts.
RETRY_S = 5.0
# The writer waits at its start: the training thread waits for it there, and would then wait for the interpreter's lock.
YIELD_S = 5e-3
# Seconds between two warnings about failed attempts.
WARN_EVERY_S = 30.0


class BackgroundWriter:
    """Thread that runs one job at a time. A job that fails with OSError is retried until a newer one replaces it.

    It keeps the text of an error: the error's traceback would keep the content of the checkpoint.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self._bug: BaseException | None = None
        self._is_replaced = threading.Event()
        self._warned_at = float("-inf")

    def start(self, job: Callable[[], None], name: str) -> None:
        """Start a job after the previous one has ended; `name` is used in log lines."""
        self.join()
        self._is_replaced.clear()
        self._thread = threading.Thread(target=self._work, args=(job, name), name=WRITER_NAME)
        self._thread.start()

    def join(self, retries_s: float = 0.0) -> str | None:
        """Return when the last job is done, or abandon it if it has failed for some time; return its last error."""
        thread = self._thread
        if thread is None:
            return None
        deadline = time.monotonic() + retries_s
        while thread.is_alive() and not (self._error and time.monotonic() > deadline):
            thread.join(0.02 if self._error else 0.1)
        self._is_replaced.set()
        thread.join()
        self._thread = None
        if self._bug:
            bug, self._bug = self._bug, None
            raise bug
        return self._error

    def _work(self, job: Callable[[], None], name: str) -> None:
        self._error = None
        time.sleep(YIELD_S)
        while True:
            try:
                job()
                if self._error:
                    logger.info("%s saved after retrying", name)
                self._error = None
                return
            except OSError as error:
                if time.monotonic() - self._warned_at >= WARN_EVERY_S:
                    self._warned_at = time.monotonic()
                    logger.warning("%s CANNOT BE WRITTEN: %s; training continues, and it is retried", name, str(error))
                self._error = str(error)
            except BaseException as error:  # a bug: raised again by the training thread
                self._bug = error
                return
            if self._is_replaced.wait(RETRY_S):
                return
