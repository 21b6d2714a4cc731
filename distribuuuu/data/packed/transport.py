"""Byte ranges of remote objects: HTTP by urllib, other protocols through fsspec.

A server is not trusted: the time for a range and the bytes that are read are limited.
"""

import functools
import http.client
import logging
import os
import random
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import DataError
from distribuuuu.files.untrusted import printable

logger = logging.getLogger(__name__)

# Protocols of fsspec with their package; the extra of setup.py has the name of the protocol.
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}
# Seconds without a byte after which a connection counts as cut; a request that has lasted this long and is slower than
# SLOWEST bytes per second is made again, since the packages of fsspec wait for minutes.
STALL_S, SLOWEST = 30.0, 100_000
# Seconds of the first pause between two attempts, which doubles up to the longest one.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
# Seconds of failures that are not logged.
QUIET_S = 3.0
# Attempts after which wrong bytes are not an accident of the network.
MAX_WRONG = 4
DENIED = "access denied ({}): no credentials, or they have expired; fix: renew them, or make the data readable"
MISSING = "no such object; fix: check the URL"
_TEMPORARY = (408, 425, 429)
_PERMANENT = {
    200: "the server ignores byte ranges; fix: use one that supports them, e.g. nginx",
    **{status: DENIED.format(f"HTTP {status}") for status in (401, 403, 407)},
    **{404: MISSING, 410: MISSING},
    416: "it ends before the bytes that the index names: it was truncated or replaced; fix: upload it again",
}
_pauses = random.Random()  # the global generator belongs to the samples


class RemoteError(DataError):
    """Remote data that cannot be read, or is not what it was; the message names the URL."""


class MissingObjectError(RemoteError):
    """An object that does not exist in its object store."""


class Part(NamedTuple):
    """A byte range of an object, with the object's size in bytes and version (ETag or time); 0 and "": unknown."""

    data: bytes
    size: int = 0
    version: str = ""


def fetch(
    url: str,
    start: int,
    end: int,
    timeout_s: float,
    check: Callable[[Part], str] = lambda part: "",
    info: bool = False,
    retry_s: float | None = None,
) -> Part:
    """Return the bytes from `start` to `end` of an object, or to its end; failures are retried with growing pauses.

    Args:
        timeout_s: seconds for all attempts together.
        check: returns what is wrong with the bytes, or "".
        info: whether the size and the version must be known.
        retry_s: seconds after which no other attempt begins; None: timeout_s.

    Raises:
        RemoteError: after `timeout_s`, after `retry_s` of failures, after MAX_WRONG wrong answers, and at once for what
            retries cannot help.
    """
    read_range = _reader_of(url)
    begin, pause_s, num_wrong, is_logged = time.monotonic(), FIRST_PAUSE_S, 0, False
    limit_s = timeout_s if retry_s is None else min(retry_s, timeout_s)
    while True:
        try:
            attempt_end = time.monotonic() + STALL_S + (end - start) / SLOWEST
            part = _wait_for(functools.partial(read_range, url, start, end, info), min(begin + timeout_s, attempt_end))
            if missing := (min(end, part.size) if part.size else end) - start - len(part.data):
                raise http.client.IncompleteRead(b"", missing)
            if not (reason := check(part)):
                break
            num_wrong += 1
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            reason = _describe(error)
        waited_s = time.monotonic() - begin
        if num_wrong == MAX_WRONG:
            raise RemoteError(f"{url}: {reason}, {num_wrong} times; fix: upload this file again")
        if waited_s >= limit_s:
            fix = "check the URL and the network, or raise DATA.TIMEOUT_S"
            raise RemoteError(f"{url} cannot be read for {waited_s:.0f} s: {reason}; fix: {fix}")
        if waited_s >= QUIET_S and not is_logged:
            is_logged = True
            logger.warning("%s cannot be read: %s; it is retried for up to %.0f s", url, reason, limit_s)
        time.sleep(min(pause_s * _pauses.uniform(0.5, 1.5), max(0.01, limit_s - waited_s)))
        pause_s, info = min(2 * pause_s, LONGEST_PAUSE_S), True  # shows whether the object was replaced
    if is_logged:
        logger.warning("%s can be read again after %.0f s", url, time.monotonic() - begin)
    return part


def _reader_of(url: str) -> Callable[..., Part]:
    """Return the function that reads ranges of a URL."""
    try:
        parts = urlsplit(url)
        is_valid = bool(parts.hostname) and " " not in parts.netloc and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise RemoteError(f"{printable(url)} is no valid URL; fix: check the host and the port")
    if parts.scheme not in (known := ("https", "http", *PACKAGES)):
        raise RemoteError(f"{url}: got the protocol {parts.scheme}; expected one of {', '.join(known)}")
    return _read_fsspec if parts.scheme in PACKAGES else _read_http


def _describe(error: Exception) -> str:
    return _shorten(f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}")


def _shorten(text: str) -> str:
    """Return text of a server as it may be logged: one line of at most 200 characters, without control characters."""
    return printable(text[:200])


def _wait_for(function: Callable[[], Any], deadline: float) -> Any:
    """Return the result of a function that has no limit in time of its own: a request, or a package of fsspec.

    TimeoutError is raised at the deadline; the thread that is still waiting does not keep the process alive.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="remote read", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors.pop()
    if not results:
        raise TimeoutError("no complete answer in time")
    return results.pop()


def _read_http(url: str, start: int, end: int, info: bool) -> Part:
    headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=STALL_S) as answer:
            status, found, body = answer.status, answer.headers, b""
            if status == 206 and "Transfer-Encoding" not in found:  # chunks may declare any size
                body = answer.read(end - start + 1)
    except urllib.error.HTTPError as error:
        error.close()
        status, found, body = error.code, error.headers, b""
    if status in _TEMPORARY or status >= 500:
        raise http.client.HTTPException(f"HTTP {status}")
    if status != 206:
        answer = f"the server answers HTTP {status} to a request for bytes; fix: check the URL"
        raise RemoteError(f"{url}: {_PERMANENT.get(status, answer)}")
    ranged = re.fullmatch("bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18})", found["Content-Range"] or "")
    if ranged is None or int(ranged[1]) != start or len(body) > end - start or not body:
        expected = f"expected the bytes {start} to {end - 1} with their length"
        raise RemoteError(f"{url}: the server sends other bytes; {expected}; fix: use another server")
    return Part(body, int(ranged[2]), _shorten(found["ETag"] or found["Last-Modified"] or ""))


def _read_fsspec(url: str, start: int, end: int, info: bool) -> Part:
    size, version = call_filesystem(url, "info") if info else (0, "")
    stop = min(end, size) if info else end
    data = call_filesystem(url, "cat_file", start=start, end=stop)
    if not isinstance(data, (bytes, bytearray)) or len(data) > stop - start:
        raise RemoteError(f"{url}: the server sends more than the bytes {start} to {stop - 1}; fix: use another server")
    return Part(bytes(data), size, version)


def call_filesystem(url: str, method: str, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a method of the fsspec file system of a URL; of `info`, the size and the version.

    RemoteError is raised for what retries cannot help, OSError for other failures.
    """
    protocol, _, rest = url.partition("://")
    root = f"{protocol}://" if protocol in (*PACKAGES, "file") else f"{protocol}://{rest.partition('/')[0]}/"
    try:
        filesystem = _open_filesystem(root, os.getpid())
        kwargs |= {"refresh": True} if method == "info" and protocol == "hf" else {}  # it has a cache nevertheless
        paths = [filesystem._strip_protocol(arg) if "://" in str(arg) else arg for arg in (*args, url)]
        found = getattr(filesystem, method)(*paths, **kwargs)
    except FileNotFoundError as error:
        raise MissingObjectError(f"{url}: {MISSING}") from error
    except ConfigError:
        raise
    except Exception as error:  # each package has errors of its own
        status = _find_status(error)
        # S3 answers an expired token with 400.
        if isinstance(error, PermissionError) or "Credentials" in type(error).__name__ or status in (400, 401, 403):
            raise RemoteError(f"{url}: {DENIED.format(_describe(error))}") from error
        if status == 416:
            raise RemoteError(f"{url}: {_PERMANENT[416]}") from error
        raise OSError(_describe(error)) from error
    if method != "info":
        return found
    size = found.get("size") if isinstance(found, dict) else None
    if type(size) is not int or size < 0:
        raise RemoteError(f"{url}: the server does not tell its size; fix: check the URL")
    versions = [found.get(key) for key in ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "mtime")]
    return size, str(next(filter(None, versions), ""))


def _find_status(error: Exception) -> int:
    """Return the HTTP status of an error of a package, which botocore keeps in the cause; 0 if it is unknown."""
    answer = getattr(error.__cause__, "response", None)
    own = answer["ResponseMetadata"].get("HTTPStatusCode") if isinstance(answer, dict) else 0
    status = str(getattr(error, "code", getattr(error, "status", own)))
    return int(status) if status.isdigit() and not isinstance(error, TimeoutError) else 0


@functools.cache
def _open_filesystem(root: str, pid: int) -> Any:
    """Return the file system of a process: its event loop does not survive a fork."""
    protocol = root.partition("://")[0]
    try:
        import fsspec

        return fsspec.url_to_fs(root, skip_instance_cache=True, use_listings_cache=False)[0]
    except ImportError as error:
        fix = f"pip install 'distribuuuu[{protocol}]'" if protocol in PACKAGES else _shorten(str(error))
        package = PACKAGES.get(protocol, "a package")
        raise RemoteError(f"{protocol}:// needs {package}, which is not installed; fix: {fix}") from error
