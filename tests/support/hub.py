"""A local stand-in for the HTTP interface of the Hugging Face Hub: create a repository, commit to it, download."""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_local"


class Hub(ThreadingHTTPServer):
    """Repositories in memory.

    Attributes:
        repositories: OWNER/NAME -> file name -> bytes.
        commits: messages of the commits.
        blobs: contents of large files, which are sent before the commit, by their SHA-256.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.is_private: dict[str, bool] = {}
        self.commits: list[str] = []
        self.blobs: dict[str, bytes] = {}

    @property
    def environment(self) -> dict[str, str]:
        """Variables that direct huggingface_hub to this server; large files are sent by git LFS."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def commit(self, repository: str, lines: list[dict]) -> None:
        """Apply a commit: a header and files, in full or by the SHA-256 of their blob."""
        files = self.repositories[repository]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.blobs[value["oid"]]


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args) -> None:
        """Print nothing."""

    def answer(self, content: bytes | dict, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts != ["api", "validate-yaml"] and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid credentials"}, 401)
        elif parts == ["api", "validate-yaml"]:
            self.answer({"errors": [], "warnings": []})
        elif parts == ["api", "repos", "create"]:
            name = "/".join(filter(None, (json.loads(body).get("organization"), json.loads(body)["name"])))
            self.server.repositories.setdefault(name, {})
            self.server.is_private[name] = b"private" in body and b'"private": false' not in body
            self.answer({"url": f"{self.server.url}/{name}"})
        elif "preupload" in parts:
            paths = [file["path"] for file in json.loads(body)["files"]]
            kinds = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
            files = [{"path": path, "uploadMode": kind, "shouldIgnore": False} for path, kind in kinds.items()]
            self.answer({"files": files})
        elif parts[-1] == "batch":
            objects = json.loads(body)["objects"]
            for entry in objects:
                entry["actions"] = {"upload": {"href": f"{self.server.url}/blobs/{entry['oid']}"}}
            self.answer({"transfer": "basic", "objects": objects})
        else:
            self.server.commit("/".join(parts[2:4]), [json.loads(line) for line in body.splitlines()])
            url = f"{self.server.url}/{'/'.join(parts[2:4])}/commit/{COMMIT}"
            self.answer({"commitUrl": url, "commitOid": COMMIT, "success": True})

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        assert hashlib.sha256(data).hexdigest() == self.path.rpartition("/")[2]
        self.server.blobs[self.path.rpartition("/")[2]] = data
        self.answer(b"")

    def do_GET(self) -> None:
        """Serve /OWNER/NAME/resolve/REVISION/FILE."""
        owner, name, *_, file = self.path.strip("/").split("/")
        content = self.server.repositories.get(f"{owner}/{name}", {}).get(file)
        if content is None:
            self.answer(b"", 404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
        else:
            self.answer(content, ETag=f'"{hashlib.sha256(content).hexdigest()}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET


@contextlib.contextmanager
def local_hub() -> Iterator[Hub]:
    """Run a Hub in a thread for the duration of the block."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
