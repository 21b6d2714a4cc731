"""Objects at URLs through obstore: http(s)://, s3://, gs://, az:// and file:///; hf:// is read by its HTTPS address.

Servers are not trusted: the time for a range and the bytes that are kept of an answer are limited. obstore is used in
child processes with limited memory: its threads do not survive a fork, and it reads the text of an error whole.
"""

import contextlib
import datetime
import importlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from distribuuuu.config.errors import ConfigError, DataError
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.untrusted import printable
from distribuuuu.launch.processes import has_lost_launcher, set_up_worker, start_child

# Attempts at a file, after which wrong bytes are no accident of the network.
MAX_WRONG = 4
# Bytes of memory of a process that uses obstore, and of a part of an object.
MAX_MEMORY, PART = 8 << 30, 8 << 20
# Patterns of an error of obstore: its name, and the status of the answer or its text. Retries help with the last one.
_MISSING = "no such object or bucket; fix: check the URL"
_MESSAGES = {
    "FileNotFound|status (404|410)": _MISSING,
    # S3 answers an expired token with 400; without credentials, obstore asks the machine's server for them.
    r"status (400|401|403|407)|169\.254\.|metadata\.google|redential":
        "access denied ({}): no credentials, or they have expired; fix: renew them, or make the data readable",
    r"NotSupported|Requested .* got|CONTENT_RANGE|Content-Length|status [34](?!08|25|29)|redirect":
        "the server does not send the requested bytes ({}); fix: check the URL and the file, or use another server",
    "": "it cannot be reached: {}; fix: check the network and the URL; for packed data, DATA.TIMEOUT_S may be raised",
}  # fmt: skip


class RemoteError(DataError):
    """Remote data that cannot be read, or is not what it was; the message names the URL."""


class LostObjectError(RemoteError):
    """An object that does not exist in its store, or has another content than it should have."""


class Store:
    """The objects at a URL; credentials are those of the environment. Its methods raise RemoteError.

    Args:
        request_s: seconds after which a request has failed.
        retry_s: seconds of failures after which no other attempt begins.
    """

    def __init__(self, url: str, request_s: float = 60.0, retry_s: float = 30.0):
        self.url, protocol = url, url.partition(":")[0]
        limit, retry = (datetime.timedelta(seconds=seconds) for seconds in (request_s, retry_s))
        client: dict[str, Any] = {"allow_http": True, "timeout": limit}
        if protocol == "hf" and (token := os.environ.get("HF_TOKEN")):
            client["default_headers"] = {"Authorization": f"Bearer {token}"}
        options: Any = {"client_options": client, "retry_config": {"max_retries": 1000, "retry_timeout": retry}}
        try:
            from obstore import store

            if protocol == "file":
                self._objects: Any = store.LocalStore(unquote(urlsplit(url).path), mkdir=True)
            elif protocol in ("http", "https", "hf"):
                self._objects = store.HTTPStore(_address_on_hub(url) if protocol == "hf" else url, **options)
            elif protocol in ("s3", "gs", "az"):
                self._objects = store.from_url(url, **options)
            else:
                raise ValueError("expected one of https, http, s3, gs, az, hf")
        except ImportError as error:
            raise RemoteError(f"{url} needs obstore; fix: pip install 'distribuuuu[remote]'") from error
        except Exception as error:  # those of obstore, ValueError, OSError
            reason, fix = shorten(str(error).partition("\n\n")[0]), "check the URL and its port"
            raise RemoteError(f"{printable(url)} is no valid URL ({reason}); fix: {fix}") from error

    @contextlib.contextmanager
    def request(self, name: str) -> Iterator[Any]:
        """Yield the store of obstore for a request of an object, whose errors are raised as `explain` returns them."""
        try:
            yield self._objects
        except Exception as error:
            raise explain(error, f"{self.url}/{name}") from error

    def read(self, name: str, start: int, end: int) -> tuple[bytes, dict[str, Any]]:
        """Return the bytes from `start` to `end` of an object, or to its end, and what obstore tells about it."""
        data = bytearray()
        with self.request(name) as objects:
            answer = objects.get(name, options={"range": (start, end)})
            for chunk in answer.stream(min_chunk_size=1 << 20):
                data += chunk
                if len(data) > end - start:
                    more = f"the server sends more than the bytes {start} to {end - 1}"
                    raise RemoteError(f"{self.url}/{name}: {more}; fix: use another server")
            return bytes(data), answer.meta

    def download(self, name: str, size: int, path: Path, check: Callable[[Path], Any]) -> None:
        """Copy an object of `size` bytes to a file, unless `check`, which raises ValueError, finds the file in order.

        Raises:
            LostObjectError: the size is another one, or the content is wrong MAX_WRONG times.
            OSError: of the disk, which may lack space.
        """
        url, wrong = f"{self.url}/{name}", ValueError()
        with contextlib.suppress(FileNotFoundError, ValueError):
            return check(path)
        check_space(path.parent, size, url)
        for _ in range(MAX_WRONG):
            try:
                with replacing(path) as file:
                    for start in range(0, size, PART):
                        data, meta = self.read(name, start, min(start + PART, size))
                        if meta["size"] != size:
                            sizes = f"it has {meta['size']:,} bytes, expected {size:,}: it was truncated or replaced"
                            raise LostObjectError(f"{url}: {sizes}; fix: restore it, or upload it again")
                        file.write(data)
                    file.flush()
                    return check(Path(file.name))
            except RemoteError:
                raise
            except ValueError as error:
                wrong = error
        raise LostObjectError(f"{url}: {wrong}, {MAX_WRONG} times; fix: upload this file again")


def check_space(folder: Path, needed: int, url: str) -> None:
    """Raise OSError if the disk lacks space for what is needed of a URL."""
    if needed > (free := shutil.disk_usage(folder).free):
        raise OSError(f"{needed / 1e9:,.1f} GB are needed for {url}, and {free / 1e9:,.1f} GB are free")


def _address_on_hub(url: str) -> str:
    if not (found := re.fullmatch(r"hf://(datasets/[^/@]+/[^/@]+)(?:@([^/]+))?(/.*)?", url)):
        raise ValueError("expected hf://datasets/OWNER/NAME/FOLDER")
    host = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    return f"{host}/{found[1]}/resolve/{found[2] or 'main'}{found[3] or ''}"


def explain(error: Exception, url: str) -> Exception:
    """Return the RemoteError for an error of obstore; FileExistsError: of an object that should only be created."""
    if isinstance(error, RemoteError):
        return error
    if type(error).__name__ == "AlreadyExistsError":
        return FileExistsError(url)
    text, _, details = re.sub("(://[^/ ]+)/[^ ]*", r"\1", str(error)).partition("\n\nDebug source")  # without paths
    status = re.search("status code: ([0-9]{3})", text)
    found = f"{type(error).__name__} {f'status {status[1]}' if status else text}"
    message = next(message for pattern, message in _MESSAGES.items() if re.search(pattern, found))
    reason = (text.partition(" - ")[2] or text).replace("Server returned non-2xx status code:", "HTTP")
    causes = re.findall(r"\b(TimedOut|Timeout|Connect[A-Z]\w+|dns error)", details)
    reason = shorten(reason).rstrip(":") + (f" ({causes[-1]})" if causes else "")
    return (LostObjectError if message is _MISSING else RemoteError)(f"{url}: {message.format(reason)}")


def shorten(text: str) -> str:
    """Return text of a server as it may be logged: one line of at most 200 characters, without control characters."""
    return printable(" ".join(text.split())[:200])


# ---------------------------------------------------------------------------------- child processes


def start(module: str, *args: Any) -> subprocess.Popen:
    """Start a process that writes an answer for each value that `main` of a module yields for some JSON arguments."""
    command = [sys.executable, "-c", f"from {__name__} import run; run()", module, json.dumps(args)]
    env = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "RUST_BACKTRACE": "0"}
    return start_child(command, "store", env, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def read_answer(line: bytes, url: str) -> Any:
    """Return the value of an answer; raise the RemoteError or OSError of its process."""
    if not line:
        raise RemoteError(f"{url}: the process that uses the store has ended; fix: start again")
    kind, value = json.loads(line)
    if kind == "value":
        return value
    raise (RemoteError if kind == "remote" else OSError)(value)


def run() -> None:
    """Write the answers that `start` promises, in a process that a signal to the run does not end, but its end does."""
    set_up_worker()
    if has_lost_launcher():
        os._exit(1)
    with contextlib.suppress(ValueError):  # there is a lower limit
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
    try:
        for value in importlib.import_module(sys.argv[1]).main(*json.loads(sys.argv[2])):
            print(json.dumps(["value", value]), flush=True)
    except ConfigError as error:
        print(json.dumps(["remote", str(error)]), flush=True)
    except OSError as error:
        print(json.dumps(["disk", error.strerror or str(error)]), flush=True)
    os._exit(0)  # not waiting for requests that hang
