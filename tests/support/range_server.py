"""HTTP server with byte ranges over a folder, and faults that a test switches on."""

import http.server
import random
import threading
import time
from pathlib import Path


class RangeServer:
    """Serves a folder in threads, with keep-alive; a context manager.

    Attributes:
        latency_s: pause before each answer.
        failures: the probability of a fault (one of `kinds`) of an answer.
        kinds: "status" (503), "cut" (the connection is closed after some bytes), "truncated" (fewer bytes than
            promised, in a well-formed answer), "corrupt" (a wrong byte), "closed" (no answer).
        status: answer everything with this status if it is not 0.
        has_ranges: whether ranges are honored.
        is_gone: close each connection without an answer.
        requests: (path, first byte, last byte) of each answered request.
        delay_of: further seconds by path.
    """

    def __init__(self, folder: Path):
        self.folder, self.latency_s, self.failures = folder, 0.0, 0.0
        self.kinds = ("status", "cut", "truncated", "corrupt", "closed")
        self.status, self.has_ranges, self.is_gone = 0, True, False
        self.requests: list[tuple[str, int, int]] = []
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
        time.sleep(server.latency_s)
        fault = ""
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
        if first >= size:
            self._answer(416, b"", headers)
            return
        last = min(last, size - 1)
        self.owner.requests.append((self.path, first, last))
        with path.open("rb") as file:
            file.seek(first)
            body = file.read(last + 1 - first)
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        if fault == "corrupt":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if fault == "truncated":
            body = body[:-1]
        self._answer(206, body, headers, cut=fault == "cut")

    def _answer(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = self.close_connection or cut
