"""Byte ranges of remote objects: HTTP by connections that are kept alive, other protocols through fsspec.

A server is not trusted: the time for a range, the bytes that are read and the redirects are limited.
"""

import functools
import http.client
import io
import logging
import os
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import DataError
from distribuuuu.files.untrusted import printable

logger = logging.getLogger(__name__)

# Protocols of fsspec with their package; the extra of setup.py has the name of the protocol.
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}
# Seconds without a byte after which a connection counts as cut; not more than the timeout.
STALL_S = 30.0
# Seconds of the first pause between two attempts, which doubles up to the longest one.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
# Seconds of failures that are not logged, and between two log lines of a process about a host.
QUIET_S, LOG_EVERY_S = 3.0, 60.0
# Attempts after which wrong bytes are not an accident of the network.
MAX_WRONG = 4
DENIED = "access denied ({}): no credentials, or they have expired; fix: renew them, or make the data readable"
MISSING = "no such object; fix: check the URL"
# Bytes of an answer besides twice the requested range: headers and the sizes of chunks.
_OVERHEAD = 1 << 20
# Connections that a thread keeps open: redirects may lead to many hosts.
_MAX_OPEN = 8
_TEMPORARY, _REDIRECTS, _MAX_REDIRECTS = (408, 425, 429), (301, 302, 303, 307, 308), 5
_PERMANENT = {
    200: "the server ignores byte ranges; fix: use one that supports them, e.g. nginx",
    **{status: DENIED.format(f"HTTP {status}") for status in (401, 403, 407)},
    **{404: MISSING, 410: MISSING},
    416: "it ends before the bytes that the index names: it was truncated or replaced; fix: upload it again",
}
_connections = threading.local()
_pauses = random.Random()  # the global generator belongs to the samples
_logged_at: dict[str, float] = {}


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
        url: the object.
        start, end: the range in bytes.
        timeout_s: seconds for all attempts together.
        check: returns what is wrong with the bytes, or "".
        info: whether the size and the version must be known.
        retry_s: seconds after which no other attempt begins; None: timeout_s.

    Raises:
        RemoteError: after `timeout_s`, after `retry_s` of failures, after MAX_WRONG wrong answers, and at once for what
            retries cannot help.
    """
    read_range, host = _reader_of(url), urlsplit(url).netloc
    begin, pause_s, num_wrong, is_logged = time.monotonic(), FIRST_PAUSE_S, 0, False
    limit_s = timeout_s if retry_s is None else min(retry_s, timeout_s)
    while True:
        try:
            part = read_range(url, start, end, info, begin + timeout_s)
            if missing := (min(end, part.size) if part.size else end) - start - len(part.data):
                raise http.client.IncompleteRead(b"", missing)
            if not (reason := check(part)):
                break
            num_wrong += 1
        except (OSError, http.client.HTTPException) as error:
            reason = _describe(error)
        waited_s = time.monotonic() - begin
        if num_wrong == MAX_WRONG:
            raise RemoteError(f"{url}: {reason}, {num_wrong} times; fix: upload this file again")
        if waited_s >= limit_s:
            fix = "check the URL and the network, or raise DATA.TIMEOUT_S"
            raise RemoteError(f"{url} cannot be read for {waited_s:.0f} s: {reason}; fix: {fix}")
        if waited_s >= QUIET_S and time.monotonic() - _logged_at.get(host, float("-inf")) >= LOG_EVERY_S:
            _logged_at[host], is_logged = time.monotonic(), True
            logger.warning("%s cannot be read: %s; it is retried for up to %.0f s", url, reason, limit_s)
        time.sleep(min(pause_s * _pauses.uniform(0.5, 1.5), max(0.01, limit_s - waited_s)))
        pause_s, info = min(2 * pause_s, LONGEST_PAUSE_S), True  # shows whether the object was replaced
    if is_logged:
        logger.warning("%s can be read again after %.0f s", url, time.monotonic() - begin)
    return part


def _reader_of(url: str) -> Callable[..., Part]:
    """Return the function that reads ranges of a URL."""
    if not _has_host(url):
        raise RemoteError(f"{printable(url)} is no valid URL; fix: check the host and the port")
    if (protocol := urlsplit(url).scheme) not in (known := ("https", "http", *PACKAGES)):
        raise RemoteError(f"{url}: got the protocol {protocol}; expected one of {', '.join(known)}")
    return _read_fsspec if protocol in PACKAGES else _read_http


def _describe(error: Exception) -> str:
    return _shorten(f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}")


def _shorten(text: str) -> str:
    """Return text of a server as it may be logged: one line of at most 200 characters, without control characters."""
    return printable(text[:200])


def _wait_for(function: Callable[[], Any], deadline: float) -> Any:
    """Return the result of a function that has no limit in time of its own: name look-ups, packages of fsspec.

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


# --------------------------------------------------------------------------------------------- HTTP


class _TooMuchError(http.client.HTTPException):
    """More bytes than were requested."""


class _LimitedReader(io.RawIOBase):
    """Reader of a socket with a deadline and a limit of bytes, for the parser of http.client."""

    def __init__(self, raw: Any, connection: socket.socket, deadline: float, num_bytes: int):
        self._raw, self._socket, self._deadline, self._num_left = raw, connection, deadline, num_bytes

    def readable(self) -> bool:
        """Return True, as BufferedReader requires."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what has arrived; raise TimeoutError at the deadline."""
        _limit_wait(self._socket, self._deadline)
        number = self._raw.readinto(buffer)
        self._num_left -= number
        if self._num_left < 0:
            raise _TooMuchError("the server sends more than was requested")
        return number

    def close(self) -> None:
        """Close the file of the socket, which is closed itself with the last of its files."""
        self._raw.close()
        super().close()


class _LimitedResponse(http.client.HTTPResponse):
    """An answer that is read by a _LimitedReader."""

    def __init__(self, connection: socket.socket, deadline: float, num_bytes: int, method: str | None = None):
        super().__init__(connection, method=method)
        self.fp = io.BufferedReader(_LimitedReader(self.fp.detach(), connection, deadline, num_bytes))


def _limit_wait(connection: socket.socket, deadline: float) -> None:
    """Let the next operation of a socket wait for STALL_S at most, and not beyond the deadline."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no complete answer in time")
    connection.settimeout(min(STALL_S, left_s))


def _read_http(url: str, start: int, end: int, info: bool, deadline: float) -> Part:
    target = url
    for _ in range(_MAX_REDIRECTS + 1):
        response, body = _request(target, start, end, deadline)
        if response.status not in _REDIRECTS:
            break
        target = _redirect(url, target, response.getheader("Location"))
    else:
        raise RemoteError(f"{url} redirects more than {_MAX_REDIRECTS} times, now to {target}; fix: check the URL")
    if response.status in _TEMPORARY or response.status >= 500:
        raise http.client.HTTPException(f"HTTP {response.status}")
    if response.status != 206:
        answer = f"the server answers HTTP {response.status} to a request for bytes; fix: check the URL"
        raise RemoteError(f"{url}: {_PERMANENT.get(response.status, answer)}")
    size = _read_size(response, start, end)
    if size is None or len(body) > end - start:
        found = ", ".join(f"{name}: {response.getheader(name)}" for name in _LENGTHS if response.getheader(name))
        sent = _shorten(found or f"no {_LENGTHS[0]}")
        expected = f"expected the bytes {start} to {end - 1} or to the end, unencoded"
        raise RemoteError(f"{url}: the server answers with {sent}; {expected}; fix: use another server")
    return Part(body, size, _shorten(response.getheader("ETag") or response.getheader("Last-Modified") or ""))


_LENGTHS = ("Content-Range", "Content-Length", "Content-Encoding")


def _read_size(response: http.client.HTTPResponse, start: int, end: int) -> int | None:
    """Return the size of the object; None if the headers do not describe the requested range."""
    found = re.fullmatch("bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", response.getheader("Content-Range") or "")
    length = response.getheader("Content-Length") or "0"
    if found is None or (response.getheader("Content-Encoding") or "identity") != "identity":
        return None
    first, last, size = map(int, found.groups())
    if (first, last) != (start, min(end, size) - 1) or not re.fullmatch("[0-9]{1,18}", length):
        return None
    return size if int(length) <= last + 1 - first else None


def _has_host(url: str, base: str = "") -> bool:
    """Return whether a URL, which may be relative to a base, has a host and a valid port."""
    try:
        parts = urlsplit(urljoin(base, url))
        return bool(parts.hostname) and " " not in parts.netloc and parts.port != 0
    except ValueError:
        return False


def _redirect(url: str, base: str, location: str | None) -> str:
    """Return the URL that a server redirects to; raise RemoteError if that is none of HTTP, or less safe."""
    if not location:
        raise RemoteError(f"{url}: the server redirects without a Location; fix: check the URL")
    target = urljoin(base, location) if _has_host(location, "//host") else ""
    if not (_has_host(target) and target.isascii() and target.isprintable()):
        raise RemoteError(f"{url} redirects to {_shorten(location)!r}, which is no URL; fix: use another server")
    if urlsplit(target).scheme not in ("https", urlsplit(base).scheme):
        raise RemoteError(f"{url} redirects to {_shorten(target)}, which is less safe; fix: use another server")
    return target


def _request(url: str, start: int, end: int, deadline: float) -> tuple[http.client.HTTPResponse, bytes]:
    """Return the answer to a GET and its body, which is read only if the status is 206, up to a byte too much."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    # After a fork, the connections belong to the parent process.
    key, opened = f"{os.getpid()} {parts.scheme} {parts.netloc}", _connections.__dict__
    connection = opened.pop(key, None)
    try:
        if connection is None:
            connection = kind(parts.hostname or "", parts.port, timeout=STALL_S)
            _wait_for(connection.connect, deadline)
        num_bytes = 2 * (end - start) + _OVERHEAD
        connection.response_class = functools.partial(_LimitedResponse, deadline=deadline, num_bytes=num_bytes)
        _limit_wait(connection.sock, deadline)
        path = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
        connection.request("GET", path, headers={"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"})
        response = connection.getresponse()
        is_range = response.status == 206 and _read_size(response, start, end) is not None
        body = response.read(end - start + 1) if is_range else b""
        if response.isclosed() and not response.will_close and len(opened) < _MAX_OPEN:
            opened[key], connection = connection, None
    except (ssl.SSLCertVerificationError, http.client.InvalidURL, UnicodeError, _TooMuchError) as error:
        raise RemoteError(f"{url}: {_shorten(str(error))}; fix: check the URL") from error
    except ValueError as error:  # of the parser of http.client, e.g. for the size of a chunk
        raise http.client.HTTPException(f"invalid answer: {error}") from error
    finally:
        if connection is not None:
            connection.close()
    return response, body


# ------------------------------------------------------------------------------------------- fsspec


def _read_fsspec(url: str, start: int, end: int, info: bool, deadline: float) -> Part:
    size, version = _wait_for(lambda: call_filesystem(url, "info"), deadline) if info else (0, "")
    stop = min(end, size) if info else end
    data = _wait_for(lambda: call_filesystem(url, "cat_file", start=start, end=stop), deadline)
    if not isinstance(data, (bytes, bytearray)) or len(data) > stop - start:
        raise RemoteError(f"{url}: the server sends more than the bytes {start} to {stop - 1}; fix: use another server")
    return Part(bytes(data), size, version)


def call_filesystem(url: str, method: str, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a method of the fsspec file system of a URL; of `info`, the size and the version.

    RemoteError is raised for what retries cannot help, OSError for other failures.
    """
    protocol, _, rest = url.partition("://")
    is_shared = protocol in (*PACKAGES, "file")  # by threads; others may be one connection, which ends with an error
    root = f"{protocol}://" if is_shared else f"{protocol}://{rest.partition('/')[0]}/"
    try:
        filesystem = _open_filesystem(root, os.getpid(), 0 if is_shared else threading.get_ident())
        kwargs |= {"refresh": True} if method == "info" and protocol == "hf" else {}  # it has a cache nevertheless
        paths = [filesystem._strip_protocol(arg) if "://" in str(arg) else arg for arg in (*args, url)]
        found = getattr(filesystem, method)(*paths, **kwargs)
    except FileNotFoundError as error:
        if type(cause := error.__cause__).__name__ == "error_temp":  # of FTP: the server is busy
            raise OSError(f"{type(cause).__name__}: {_shorten(str(cause))}") from error
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
        if not is_shared:
            _open_filesystem.cache_clear()
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
def _open_filesystem(root: str, pid: int, thread: int) -> Any:
    """Return the file system of a process: its event loop does not survive a fork."""
    protocol = root.partition("://")[0]
    try:
        import fsspec

        options = {} if protocol in ("sftp", "ssh") else {"use_listings_cache": False}  # these have none
        return fsspec.url_to_fs(root, skip_instance_cache=True, **options)[0]
    except ImportError as error:
        fix = f"pip install 'distribuuuu[{protocol}]'" if protocol in PACKAGES else _shorten(str(error))
        package = PACKAGES.get(protocol, "a package")
        raise RemoteError(f"{protocol}:// needs {package}, which is not installed; fix: {fix}") from error
