"""Byte ranges of remote objects: HTTP by connections that are kept alive, other protocols through fsspec."""

import functools
import http.client
import logging
import os
import random
import re
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

from distribuuuu.config import ConfigError

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


class RemoteError(ConfigError):
    """Remote data that cannot be read, or is not what it was; the message names the URL."""

    one_process = True
    status = 1

    def __init__(self, problems: Any, origins: Any = None):
        # An error of a loader process is made again from the text of its traceback.
        super().__init__(str(problems).rpartition(f"{type(self).__name__}: ")[2].strip(), origins)


class Part(NamedTuple):
    """A byte range of an object, with the object's size in bytes and version (ETag or time); 0 and "": unknown."""

    data: bytes
    size: int = 0
    version: str = ""


def fetch(
    url: str, start: int, end: int, timeout_s: float, check: Callable[[Part], str] = lambda part: "", info: bool = False
) -> Part:
    """Return the bytes from `start` to `end` of an object, or to its end; failures are retried with growing pauses.

    `check` returns what is wrong with the bytes, or "". With `info` the size and the version are known. RemoteError is
    raised after `timeout_s` of failures, after MAX_WRONG wrong answers, and at once for what retries cannot help.
    """
    protocol, host = urlsplit(url)[:2]
    if protocol not in (known := ("https", "http", *PACKAGES)):
        raise RemoteError(f"{url}: got the protocol {protocol}; expected one of {', '.join(known)}")
    read_range = _read_fsspec if protocol in PACKAGES else _read_http
    begin, pause_s, num_wrong, is_logged = time.monotonic(), FIRST_PAUSE_S, 0, False
    while True:
        try:
            part = read_range(url, start, end, info, min(STALL_S, max(1.0, timeout_s)))
            if missing := (min(end, part.size) if part.size else end) - start - len(part.data):
                raise http.client.IncompleteRead(part.data, missing)
            if not (reason := check(part)):
                break
            num_wrong += 1
        except (OSError, http.client.HTTPException) as error:
            reason = _describe(error)
        waited_s = time.monotonic() - begin
        if num_wrong == MAX_WRONG:
            raise RemoteError(f"{url}: {reason}, {num_wrong} times; fix: upload this file again")
        if waited_s >= timeout_s:
            fix = "check the URL and the network, or raise DATA.TIMEOUT_S"
            raise RemoteError(f"{url} cannot be read for {waited_s:.0f} s: {reason}; fix: {fix}")
        if waited_s >= QUIET_S and time.monotonic() - _logged_at.get(host, float("-inf")) >= LOG_EVERY_S:
            _logged_at[host], is_logged = time.monotonic(), True
            logger.warning("%s cannot be read: %s; it is retried for up to %.0f s", url, reason, timeout_s)
        time.sleep(min(pause_s * _pauses.uniform(0.5, 1.5), max(0.01, timeout_s - waited_s)))
        pause_s, info = min(2 * pause_s, LONGEST_PAUSE_S), True  # shows whether the object was replaced
    if is_logged:
        logger.warning("%s can be read again after %.0f s", url, time.monotonic() - begin)
    return part


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}".replace("\n", " ")


def _read_http(url: str, start: int, end: int, info: bool, stall_s: float) -> Part:
    target = url
    for _ in range(_MAX_REDIRECTS):
        response, body = _request(target, f"bytes={start}-{end - 1}", stall_s)
        location = response.getheader("Location")
        if response.status not in _REDIRECTS or not location:
            break
        target = urljoin(target, location)
        if not target.startswith(("https://", url[:7])):
            raise RemoteError(f"{url} redirects to {target}, which is less safe; fix: use another server")
    if response.status in _TEMPORARY or response.status >= 500:
        raise http.client.HTTPException(f"HTTP {response.status}")
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.getheader("Content-Range") or "")
    if response.status != 206 or not found or int(found[1]) != start:
        answer = f"the server answers HTTP {response.status} to a request for bytes; fix: check the URL"
        raise RemoteError(f"{url}: {_PERMANENT.get(response.status, answer)}")
    return Part(body, int(found[2]), response.getheader("ETag") or response.getheader("Last-Modified") or "")


def _request(url: str, byte_range: str, stall_s: float) -> tuple[http.client.HTTPResponse, bytes]:
    """Return the answer to a GET and its body, which is read only if the status is 206."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    # After a fork, the connections belong to the parent process.
    key, opened = f"{os.getpid()} {parts.scheme} {parts.netloc} {stall_s}", _connections.__dict__
    try:
        connection = opened.pop(key, None) or kind(parts.hostname or "", parts.port, timeout=stall_s)
        path = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
        connection.request("GET", path, headers={"Range": byte_range, "Accept-Encoding": "identity"})
        response = connection.getresponse()
        body = response.read() if response.status == 206 else b""
    except (ssl.SSLCertVerificationError, http.client.InvalidURL, UnicodeError) as error:
        raise RemoteError(f"{url}: {error}; fix: check the URL") from error
    if response.status == 206 and not response.will_close:
        opened[key] = connection
    return response, body


def _read_fsspec(url: str, start: int, end: int, info: bool, stall_s: float) -> Part:
    size, version = call_filesystem(url, "info") if info else (0, "")
    data = call_filesystem(url, "cat_file", start=start, end=min(end, size) if info else end)
    return Part(data, size, version)


def call_filesystem(url: str, method: str, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a method of the fsspec file system of a URL; of `info`, the size and the version.

    RemoteError is raised for what retries cannot help, OSError for other failures.
    """
    try:
        found = getattr(_open_filesystem(url.partition("://")[0], os.getpid()), method)(*args, url, **kwargs)
    except FileNotFoundError as error:
        raise RemoteError(f"{url}: {MISSING}") from error
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
    versions = [found.get(key) for key in ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "mtime")]
    return found["size"], str(next(filter(None, versions), ""))


def _find_status(error: Exception) -> int:
    """Return the HTTP status of an error of a package, which botocore keeps in the cause; 0 if it is unknown."""
    answer = getattr(error.__cause__, "response", None)
    own = answer["ResponseMetadata"].get("HTTPStatusCode") if isinstance(answer, dict) else 0
    status = str(getattr(error, "code", getattr(error, "status", own)))
    return int(status) if status.isdigit() and not isinstance(error, TimeoutError) else 0


@functools.cache
def _open_filesystem(protocol: str, pid: int) -> Any:
    """Return the file system of a process: its event loop does not survive a fork."""
    try:
        import fsspec

        return fsspec.filesystem(protocol, skip_instance_cache=True, use_listings_cache=False)
    except ImportError as error:
        fix = f"pip install 'distribuuuu[{protocol}]'"
        raise RemoteError(f"{protocol}:// needs {PACKAGES[protocol]}, which is not installed; fix: {fix}") from error
