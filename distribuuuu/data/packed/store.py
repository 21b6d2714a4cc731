"""Objects at URLs through obstore: http(s)://, s3://, gs://, az:// and file:///; hf:// is read by its HTTPS address.

Servers are not trusted: the time for a range and the bytes that are kept of an answer are limited. obstore is used in
child processes with limited memory: its threads do not survive a fork, and it reads the text of an error whole.
"""

import datetime
import functools
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import distribuuuu
from distribuuuu.config.errors import DataError
from distribuuuu.files.untrusted import printable
from distribuuuu.launch.processes import die_with_parent, has_lost_launcher, start_child
from distribuuuu.launch.signals import ignore_signals

READABLE = ("https", "http", "s3", "gs", "az", "hf")
# Seconds without a byte after which a connection counts as cut.
STALL_S = 30.0
# Seconds of the first pause between two attempts, which are random numbers that grow, and of the longest one.
RETRY_PAUSES_S = 0.1, 10.0
MAX_RETRIES = 1000
# Bytes of memory of a process that uses obstore, and of a part of an object.
MAX_MEMORY, PART = 8 << 30, 8 << 20
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


class LostObjectError(RemoteError):
    """An object that does not exist in its store, or has another content than it should have."""


class UnreachableError(OSError):
    """A store that does not answer, or asks for later attempts."""


class Part(NamedTuple):
    """A byte range of an object, with the object's size in bytes and version (ETag or time)."""

    data: bytes
    size: int
    version: str


@functools.cache
def open_store(url: str, request_s: float, retry_s: float) -> Any:
    """Return the store of obstore at a URL; credentials are those of the environment.

    Args:
        request_s: seconds after which a request has failed.
        retry_s: seconds of failures after which no other attempt begins.

    Raises:
        RemoteError: the URL is invalid, or obstore is not installed.
    """
    try:
        from obstore import store
    except ImportError as error:
        fix = "pip install 'distribuuuu[remote]'"
        raise RemoteError(f"{url} needs obstore, which is not installed; fix: {fix}") from error
    seconds = (request_s, min(request_s, STALL_S), retry_s, *RETRY_PAUSES_S)
    limit, stall, retry, least, most = (datetime.timedelta(seconds=each) for each in seconds)
    client: dict[str, Any] = {"allow_http": True, "timeout": limit, "read_timeout": stall}
    backoff = {"init_backoff": least, "max_backoff": most}
    retries = {"max_retries": MAX_RETRIES, "retry_timeout": retry, "backoff": backoff}
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
    """Return the RemoteError for an error of obstore that retries cannot help; UnreachableError for other failures.

    FileExistsError: an object that should only be created.
    """
    if isinstance(error, RemoteError):
        return error
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
            kind = LostObjectError if message is _MISSING else RemoteError
            return kind(f"{url}: {message.format(reason)}")
    causes = re.findall(r"\b(TimedOut|Timeout|Connect[A-Z]\w+|dns error)", details)
    return UnreachableError(f"{reason} ({causes[-1]})" if causes else reason)


def shorten(text: str) -> str:
    """Return text of a server as it may be logged: one line of at most 200 characters, without control characters."""
    return printable(" ".join(text.split())[:200])


def read_range(folder: str, name: str, start: int, end: int, request_s: float, retry_s: float) -> Part:
    """Return the bytes from `start` to `end` of an object, or to its end; for the other arguments see `open_store`.

    Raises:
        RemoteError, UnreachableError: as `explain` returns them.
    """
    data, url = bytearray(), f"{folder}/{name}"
    try:
        store = open_store(folder, request_s, retry_s)
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


def read_parts(folder: str, name: str, size: int, request_s: float, retry_s: float) -> Iterator[bytes]:
    """Yield an object in parts; raise LostObjectError if its size is not `size`, else errors as `read_range`."""
    for start in range(0, size, PART):
        part = read_range(folder, name, start, min(start + PART, size), request_s, retry_s)
        if part.size != size:
            sizes = f"it has {part.size:,} bytes, expected {size:,}: it was truncated or replaced"
            raise LostObjectError(f"{folder}/{name}: {sizes}; fix: restore it, or upload it again")
        yield part.data


# ---------------------------------------------------------------------------------- child processes


def start_python(*words: str) -> subprocess.Popen:
    """Start Python, which finds this package, with pipes as its input and output."""
    root = str(Path(distribuuuu.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env = {"PYTHONPATH": paths, "RUST_BACKTRACE": "0"}
    return start_child([sys.executable, *words], "store", env, bufsize=0, **streams)


def read_answer(process: subprocess.Popen) -> dict[str, Any]:
    """Return the next answer of a process, or a problem if it has ended."""
    assert process.stdout, "it is a pipe"
    line = process.stdout.readline()
    return json.loads(line) if line else {"problem": "the process that uses the store has ended; fix: start again"}


def write_answer(**content: Any) -> None:
    """Write an answer to the parent of this process."""
    print(json.dumps(content), flush=True)


def set_up_child() -> None:
    """Let this process ignore the signals to a run, end with its parent, and use at most MAX_MEMORY."""
    ignore_signals()
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = MAX_MEMORY if most == resource.RLIM_INFINITY else min(MAX_MEMORY, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    die_with_parent()
    if has_lost_launcher():
        os._exit(1)
