"""HTTP server with byte ranges over a folder, and faults and attacks that a test switches on."""

import contextlib
import functools
import http.server
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# An answer in pieces to a request for the bytes from the first to the last of so many; they are the fourth argument.
Attack = Callable[[int, int, int, bytes], Iterator[bytes]]
DRIP_S = 0.05


def partial_answer(body: bytes | Iterator[bytes], *headers: str) -> Iterator[bytes]:
    """Yield an answer of status 206 with any headers, after which the server closes the connection."""
    yield "\r\n".join(["HTTP/1.1 206 Partial Content", "Connection: close", *headers, "", ""]).encode("latin-1")
    yield from [body] if isinstance(body, bytes) else body


def drip(data: bytes) -> Iterator[bytes]:
    """Yield single bytes with pauses, without end."""
    for byte in itertools.cycle(data):
        time.sleep(DRIP_S)
        yield bytes([byte])


def redirect(location: str | None) -> Attack:
    """Return an attack that redirects to a URL, or does not tell where."""
    found = [] if location is None else [f"Location: {location}"]
    lines = ["HTTP/1.1 302 Found", "Connection: close", "Content-Length: 0", *found]
    return lambda *_: iter(["\r\n".join([*lines, "", ""]).encode("utf-8")])


def wrong_range(text: str) -> Attack:
    """Return an attack with a wrong Content-Range: a format of first, last and size."""

    def answer(first: int, last: int, size: int, body: bytes) -> Iterator[bytes]:
        found = text.format(first=first, last=last, size=size)
        return partial_answer(body, f"Content-Range: {found}", f"Content-Length: {len(body)}")

    return answer


def with_headers(*headers: str, body: Callable[[bytes], bytes | Iterator[bytes]] = lambda body: body) -> Attack:
    """Return an attack with the correct range, further headers, and any body."""
    return lambda *found: partial_answer(body(found[3]), "Content-Range: bytes {}-{}/{}".format(*found[:3]), *headers)


_ENDLESS = functools.partial(itertools.repeat, bytes(1 << 16))
# Answers that never end: an error is expected at the deadline at the latest.
ENDLESS: dict[str, Attack] = {
    "silence": lambda *_: (time.sleep(DRIP_S) or b"" for _ in itertools.count()),
    "dripped headers": lambda *_: itertools.chain([b"HTTP/1.1 206 Partial Content\r\n"], drip(b"X: a\r\n")),
    "dripped body": with_headers("Content-Length: 1000000", body=lambda _: drip(b"\0")),
    "header line": lambda *_: itertools.chain([b"HTTP/1.1 206 Partial Content\r\nX: "], _ENDLESS()),
    "body": with_headers(body=lambda _: _ENDLESS()),
    "negative chunk": with_headers(
        "Transfer-Encoding: chunked", body=lambda _: itertools.chain([b"-1\r\n"], _ENDLESS())
    ),
}
# Answers that contradict the request.
CONTRADICTIONS: dict[str, Attack] = {
    **{text: wrong_range(text) for text in (
        "", "bytes */{size}", "bytes 7-{last}/{size}", "bytes {first}-{last}/" + "9" * 5000,
    )},
    "longer": with_headers(body=lambda body: body + b"!"),
    "file": redirect("file:///etc/passwd"), "nowhere": redirect(None), "loop": redirect("/loop"),
}  # fmt: skip


class RangeServer:
    """Serves a folder in threads; a context manager.

    Attributes:
        failures: the probability of a fault (one of `kinds`) of an answer.
        kinds: "status" (503), "cut" (the connection is closed after some bytes), "truncated" (fewer bytes than
            promised, in a well-formed answer), "corrupt" (a wrong byte), "closed" (no answer).
        status, has_ranges, is_gone: status of all answers if not 0; ranges are honored; no request is answered.
        requests: (path, first byte, last byte) of each answered request.
        attack: the pieces of each answer, if it is not None; see ENDLESS and CONTRADICTIONS.
        num_sent, token: bytes of the answers of attacks; the Authorization of the last request.
    """

    def __init__(self, folder: Path):
        self.folder, self.failures = folder, 0.0
        self.kinds = ("status", "cut", "truncated", "corrupt", "closed")
        self.status, self.has_ranges, self.is_gone = 0, True, False
        self.requests: list[tuple[str, int, int]] = []
        self.attack: Attack | None = None
        self.num_sent, self.is_over, self.token = 0, False, None
        self.random, self.num_faults = random.Random(0), 0
        handler = type("Handler", (_Handler,), {"owner": self})
        server = type("Server", (http.server.ThreadingHTTPServer,), {"request_queue_size": 128})
        self._server = server(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *args: None  # a client that is gone
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "RangeServer":
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self.is_over = True
        self._server.shutdown()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: RangeServer

    def log_message(self, *args) -> None:
        """Print nothing."""

    def do_GET(self) -> None:  # noqa: N802
        server = self.owner
        fault, server.token = "", self.headers["Authorization"]
        if server.failures and server.random.random() < server.failures:
            fault, server.num_faults = server.random.choice(server.kinds), server.num_faults + 1
        path = server.folder / self.path.lstrip("/")
        status = server.status or (503 if fault == "status" else 0 if path.is_file() else 404)
        if server.is_gone or fault == "closed":
            self.close_connection = True
        elif status:
            self._answer(status, b"", {})
        else:
            self._send(path, fault)

    def _send(self, path: Path, fault: str) -> None:
        size, headers = path.stat().st_size, {"ETag": f'"{path.stat().st_mtime_ns}"'}
        if not self.owner.has_ranges:
            self._answer(200, path.read_bytes(), headers)
            return
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        if first >= size and not self.owner.attack:
            self._answer(416, b"", headers)
            return
        last = min(last, size - 1)
        self.owner.requests.append((self.path, first, last))
        with path.open("rb") as file:
            file.seek(first)
            body = file.read(last + 1 - first)
        if self.owner.attack:
            self._send_pieces(self.owner.attack(first, last, size, body))
            return
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        if fault == "corrupt":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if fault == "truncated":
            body = body[:-1]
        self._answer(206, body, headers, cut=fault == "cut")

    def _send_pieces(self, pieces: Iterator[bytes]) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            for piece in pieces:
                if self.owner.is_over:
                    break
                self.wfile.write(piece)
                self.owner.num_sent += len(piece)

    def _answer(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = self.close_connection or cut
