"""Objects at URLs through obstore: http(s)://, s3://, gs://, az:// and file:///; hf:// is read by its HTTPS address.

Servers are not trusted: the time for a range and the bytes that are kept of an answer are limited. The threads of
obstore do not survive a fork, and it reads the text of an error whole: `fetch` reads in a child process with limited
memory, which serves this process and all forks of it.
"""

import contextlib
import datetime
import functools
import logging
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import distribuuuu
from distribuuuu.config.errors import DataError
from distribuuuu.files.untrusted import printable
from distribuuuu.launch.processes import start_child
from distribuuuu.launch.signals import ignore_signals

logger = logging.getLogger(__name__)

READABLE = ("https", "http", "s3", "gs", "az", "hf")
# Seconds without a byte after which a connection counts as cut; a request that has lasted this long and is slower than
# SLOWEST bytes per second is made again.
STALL_S, SLOWEST = 30.0, 100_000
# Seconds of the first pause between two attempts, which doubles up to the longest one; of failures that are not logged.
FIRST_PAUSE_S, LONGEST_PAUSE_S, QUIET_S = 0.1, 10.0, 3.0
# Seconds of the pauses between retries of obstore, which are random numbers of this range.
RETRY_PAUSES_S = 2.0, 5.0
# Bytes of memory of a process that uses obstore; of the stack of each of its threads, one for a connection.
MAX_MEMORY, STACK_BYTES = 8 << 30, 1 << 20
# Attempts after which wrong bytes are not an accident of the network.
MAX_WRONG = 4
# What retries cannot help: patterns of an error of obstore, its name with the status of the answer or its text.
_MISSING = "no such object; fix: check the URL"
_PERMANENT = {
    "FileNotFound|status (404|410)": _MISSING,
    # S3 answers an expired token with 400; without credentials, obstore asks the machine's server for them.
    r"status (400|401|403|407)|169\.254\.|metadata\.google|redential":
        "access denied ({}): no credentials, or they have expired; fix: renew them, or make the data readable",
    r"NotSupported|Requested .* got|CONTENT_RANGE|Content-Length|status [34](?!08|25|29)|redirect":
        "the server does not send the requested bytes ({}); fix: check the URL and the file, or use another server",
}  # fmt: skip


class RemoteError(DataError):
    """Remote data that cannot be read, or is not what it was; the message names the URL."""


class MissingObjectError(RemoteError):
    """An object that does not exist in its object store."""


class Part(NamedTuple):
    """A byte range of an object, with the object's size in bytes and version (ETag or time)."""

    data: bytes
    size: int
    version: str


@functools.cache
def open_store(url: str, timeout_s: float, num_retries: int = 0) -> Any:
    """Return the store of obstore at a URL; credentials are those of the environment.

    Args:
        timeout_s: seconds for a request, and for its retries together.

    Raises:
        RemoteError: the URL is invalid, or obstore is not installed.
    """
    try:
        from obstore import store
    except ImportError as error:
        fix = "pip install 'distribuuuu[remote]'"
        raise RemoteError(f"{url} needs obstore, which is not installed; fix: {fix}") from error
    seconds = (timeout_s, min(timeout_s, STALL_S), *RETRY_PAUSES_S)
    limit, stall, least, most = (datetime.timedelta(seconds=each) for each in seconds)
    client: dict[str, Any] = {"allow_http": True, "timeout": limit, "read_timeout": stall}
    backoff = {"init_backoff": least, "max_backoff": most}
    retries = {"max_retries": num_retries, "retry_timeout": limit, "backoff": backoff}
    options: Any = {"client_options": client, "retry_config": retries}
    protocol = url.partition(":")[0]
    try:
        if protocol == "file":
            return store.LocalStore(unquote(urlsplit(url).path), mkdir=True)
        if protocol == "hf":
            if token := os.environ.get("HF_TOKEN"):
                client["default_headers"] = {"Authorization": f"Bearer {token}"}
            return store.HTTPStore(_address_on_hub(url), **options)
        if protocol in ("http", "https"):
            return store.HTTPStore(url, **options)
        return store.from_url(url, **options)
    except Exception as error:  # those of obstore, ValueError, OSError
        reason = shorten(str(error).partition("\n\n")[0])
        raise RemoteError(f"{printable(url)} is no valid URL ({reason}); fix: check the URL and its port") from error


def _address_on_hub(url: str) -> str:
    found = re.fullmatch(r"hf://(datasets/[^/@]+/[^/@]+)(?:@([^/]+))?(/.*)?", url)
    if not found:
        raise ValueError("expected hf://datasets/OWNER/NAME/FOLDER")
    host = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    return f"{host}/{found[1]}/resolve/{found[2] or 'main'}{found[3] or ''}"


def explain(error: Exception, url: str) -> Exception:
    """Return the RemoteError for an error of obstore that retries cannot help; OSError for other failures.

    FileExistsError: an object that should only be created.
    """
    if type(error).__name__ == "AlreadyExistsError":
        return FileExistsError(url)
    text, _, details = re.sub("(://[^/ ]+)/[^ ]*", r"\1", str(error)).partition("\n\nDebug source")  # without paths
    reason = re.sub(
        ".*Error performing [A-Z]+ .*? in [^ ]+( after .*?)? - (Server returned non-2xx status code: )?", "", text
    )
    status = re.search("status code: ([0-9]{3})", text)
    reason = shorten(f"HTTP {reason}" if status else reason).rstrip(":")
    found = f"{type(error).__name__} {f'status {status[1]}' if status else text}"
    for pattern, message in _PERMANENT.items():
        if re.search(pattern, found):
            kind = MissingObjectError if message is _MISSING else RemoteError
            return kind(f"{url}: {message.format(reason)}")
    causes = re.findall(r"\b(TimedOut|Timeout|Connect[A-Z]\w+|dns error)", details)
    return OSError(f"{reason} ({causes[-1]})" if causes else reason)


def shorten(text: str) -> str:
    """Return text of a server as it may be logged: one line of at most 200 characters, without control characters."""
    return printable(" ".join(text.split())[:200])


def read_range(folder: str, name: str, start: int, end: int, timeout_s: float, num_retries: int = 0) -> Part:
    """Return the bytes from `start` to `end` of an object, or to its end; for the other arguments see `open_store`.

    Raises:
        RemoteError, OSError: as `explain` returns them.
    """
    store, data, url = open_store(folder, timeout_s, num_retries), bytearray(), f"{folder}/{name}"
    try:
        answer = store.get(name, options={"range": (start, end)})
        for chunk in answer.stream(min_chunk_size=1 << 20):
            data += chunk
            if len(data) > end - start:
                break
        meta = answer.meta
    except Exception as error:
        raise explain(error, url) from error
    if len(data) > end - start:
        raise RemoteError(f"{url}: the server sends more than the bytes {start} to {end - 1}; fix: use another server")
    return Part(bytes(data), meta["size"], shorten(str(meta["e_tag"] or meta["last_modified"])))


def fetch(
    url: str,
    start: int,
    end: int,
    timeout_s: float,
    check: Callable[[Part], str] = lambda part: "",
    retry_s: float | None = None,
) -> Part:
    """Return the bytes from `start` to `end` of an object, or to its end; failures are retried with growing pauses.

    Args:
        timeout_s: seconds for all attempts together.
        check: returns what is wrong with the bytes, or "".
        retry_s: seconds after which no other attempt begins; None: timeout_s.

    Raises:
        RemoteError: after `timeout_s`, after `retry_s` of failures, after MAX_WRONG wrong answers, and at once for what
            retries cannot help.
    """
    if (protocol := url.partition("://")[0]) not in READABLE:
        raise RemoteError(f"{printable(url)}: got the protocol {protocol}; expected one of {', '.join(READABLE)}")
    begin, pause_s, num_wrong, is_logged = time.monotonic(), FIRST_PAUSE_S, 0, False
    limit_s = timeout_s if retry_s is None else min(retry_s, timeout_s)
    while True:
        try:
            wait_s = min(begin + timeout_s - time.monotonic(), STALL_S + (end - start) / SLOWEST)
            part = _read_in_child((*url.rsplit("/", 1), start, end, timeout_s), wait_s)
            if len(part.data) < min(end, part.size) - start:
                raise OSError("the answer is cut")
            if not (reason := check(part)):
                return part
            num_wrong += 1
        except OSError as error:
            reason = str(error)
        waited_s = time.monotonic() - begin
        if num_wrong == MAX_WRONG:
            raise RemoteError(f"{url}: {reason}, {num_wrong} times; fix: upload this file again")
        if waited_s + pause_s >= limit_s:
            fix = "check the URL and the network, or raise DATA.TIMEOUT_S"
            raise RemoteError(f"{url} cannot be read for {waited_s:.0f} s: {reason}; fix: {fix}")
        if waited_s >= QUIET_S and not is_logged:
            is_logged = True
            logger.warning("%s cannot be read: %s; it is retried for up to %.0f s", url, reason, limit_s)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


# The child process that reads, the variables with which it was started, and its address.
_reader: tuple[subprocess.Popen, dict[str, str], str] | None = None


def _read_in_child(request: tuple[Any, ...], wait_s: float) -> Part:
    """Return what `read_range` does; raise OSError after `wait_s`, or if the child process has ended."""
    global _reader
    reader = _reader  # another thread may replace it
    if reader is None or reader[1] != os.environ:  # credentials may be set later
        if reader and reader[0].stdin:
            reader[0].stdin.close()
        process = start_python("-c", f"from {__name__} import serve; serve()")
        assert process.stdout, "it is a pipe"
        reader = _reader = process, {**os.environ}, process.stdout.readline().decode().strip()
    try:
        with Client(reader[2]) as connection:
            connection.send(request)
            answer = connection.recv() if connection.poll(max(0.0, wait_s)) else TimeoutError("no answer in time")
    except (OSError, EOFError) as error:
        _reader = None if _reader is reader else _reader
        raise OSError(f"the reading process has ended: {error}") from error
    if isinstance(answer, Exception):
        raise answer
    return answer


def start_python(*words: str) -> subprocess.Popen:
    """Start Python, which finds this package, with pipes as its input and output."""
    root = str(Path(distribuuuu.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env = {"PYTHONPATH": paths, "RUST_BACKTRACE": "0"}
    return start_child([sys.executable, *words], "store", env, bufsize=0, **streams)


def limit_memory() -> None:
    """End this process when a server makes it use more than MAX_MEMORY."""
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = MAX_MEMORY if most == resource.RLIM_INFINITY else min(MAX_MEMORY, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def serve() -> None:
    """Read for other processes, with a connection for each request, until all that hold the input have ended."""
    ignore_signals()
    limit_memory()
    threading.stack_size(STACK_BYTES)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the path of a socket has at most 100 characters
        listener = Listener(f"{folder}/reader", backlog=128)
        print(listener.address, flush=True)
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        sys.stdin.read()
    os._exit(0)


def _accept(listener: Listener) -> None:
    while True:
        try:
            threading.Thread(target=_answer, args=(listener.accept(),), daemon=True).start()
        except (OSError, RuntimeError):  # no descriptor or thread is left until another request has been answered
            time.sleep(0.1)


def _answer(connection: Connection) -> None:
    with contextlib.suppress(EOFError, OSError), connection:
        request = connection.recv()
        try:
            answer: Part | Exception = read_range(*request)
        except (RemoteError, OSError) as error:
            answer = type(error)(str(error))
        connection.send(answer)
