"""A server of the S3 protocol."""

import contextlib
import functools
import logging
import urllib.request
from collections.abc import Iterator

import pytest
from support.processes import free_port


class ObjectStore:
    """A server of S3 in threads, which AWS's variables `environment` name; its objects survive `stop`.

    All requests are answered with `refusal`, (status, code of S3), if it is not None.
    """

    def __init__(self, server_type):
        self.port, self.refusal, self._type = free_port(), None, server_type
        credentials = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}
        values = {"ENDPOINT_URL": f"http://127.0.0.1:{self.port}", **credentials}
        self.environment = {f"AWS_{name}": value for name, value in values.items()}
        self.start()

    def start(self) -> None:
        """Listen on the port."""
        self._server = self._type("127.0.0.1", self.port, verbose=False)
        self._server.start()
        self._server._server.app = functools.partial(self._answer, self._server._server.app)

    def reset(self) -> None:
        """Leave one object store: an empty bucket."""
        self.refusal = None
        url = self.environment["AWS_ENDPOINT_URL"]
        for method, path in (("POST", "moto-api/reset"), ("PUT", "bucket")):
            urllib.request.urlopen(urllib.request.Request(f"{url}/{path}", method=method)).close()

    def stop(self) -> None:
        """Close the port."""
        self._server.stop()
        self._server._server.server_close()

    def _answer(self, app, environ, start_response):
        if self.refusal is None:
            return app(environ, start_response)
        status, code = self.refusal
        body = f"<Error><Code>{code}</Code><Message>refused: {code}</Message></Error>".encode()
        start_response(f"{status} Refused", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body * (environ["REQUEST_METHOD"] != "HEAD")]


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Run a server for the length of a block; skip the test if a package is missing."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    moto = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    store = ObjectStore(moto.ThreadedMotoServer)
    yield store
    store.stop()
