"""A headless Chromium, driven by its DevTools protocol over two pipes."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
         "--remote-debugging-pipe")  # fmt: skip
# Limit that catches a hang, in seconds: a page takes one or two.
LOAD_S = 120


def find_browser() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Browser:
    """A browser with one page; a context manager."""

    def __init__(self, program: str, width: int):
        self._folder = tempfile.mkdtemp()
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs_in, theirs_out)]
        actions = [(os.POSIX_SPAWN_DUP2, high[0], 3), (os.POSIX_SPAWN_DUP2, high[1], 4)]
        actions += [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
        command = [program, *FLAGS, f"--window-size={width},900", f"--user-data-dir={self._folder}", "about:blank"]
        self._pid = os.posix_spawn(program, command, os.environ, file_actions=actions)
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        self._buffer, self._number, self._session = b"", 0, {}

    def __enter__(self) -> "Browser":
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        return self

    def __exit__(self, *error) -> None:
        os.kill(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _receive(self) -> dict:
        while b"\0" not in self._buffer:
            if not (data := os.read(self._in, 1 << 16)):
                raise ConnectionError("the browser has ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **params: Any) -> dict:
        """Call a method of the protocol; return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while (answer := self._receive()).get("id") != self._number:
            pass  # an event
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, url: str) -> None:
        """Load a page, with all that it requests."""
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + LOAD_S
        found = None
        while found != [url, "complete"]:
            assert time.monotonic() < deadline, url
            time.sleep(0.05)
            with contextlib.suppress(RuntimeError):  # the page is being replaced
                found = self.evaluate("[document.URL, document.readyState]")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"]["value"]
