"""A tracking server of MLflow that is killed, stopped, slow or unreachable during a run."""

import contextlib
import json
import os
import signal
import socket
import socketserver
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from support.commands import run_command
from support.processes import free_port, wait_for
from support.runs import ROOT, TRAIN_NET, assert_same_run, run_tool, small_options, timeless

pytestmark = pytest.mark.slow
EPOCHS, STEPS = 40, 160
WORDS = ("OPTIM.MAX_EPOCH", EPOCHS)
# Seconds that the slow server adds to each call.
DELAY_S = 2.0


class Server:
    """A server with a sqlite store and a folder of artifacts, both of which survive it."""

    def __init__(self, folder: Path):
        self.folder, self.port = folder, free_port()
        self.start()

    def start(self) -> None:
        """Start the processes, and wait for the first answer."""
        store, files = f"sqlite:///{self.folder}/store.db", self.folder / "artifacts"
        words = ("--backend-store-uri", store, "--artifacts-destination", files, "--workers", 1, "--port", self.port)
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", *map(str, words)]
        env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "DO_NOT_TRACK": "true"}
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        wait_for(self._answers, self._process)

    def _answers(self) -> bool:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).status == 200
        except OSError:
            return False

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the server."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kill the server, and wait for its end."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def rows_of(self, name: str) -> list[tuple[str, int]]:
        """Return (name, step) of each loss that the store has, in all runs of a name."""
        query = "SELECT key, step FROM metrics JOIN runs USING (run_uuid) WHERE name = ? AND key LIKE '%/loss'"
        with contextlib.closing(sqlite3.connect(self.folder / "store.db")) as store:
            return sorted(store.execute(query, (name,)))

    def status_of(self, run_id: str) -> str:
        """Return the status of a run."""
        with contextlib.closing(sqlite3.connect(self.folder / "store.db")) as store:
            return store.execute("SELECT status FROM runs WHERE run_uuid = ?", (run_id,)).fetchone()[0]


class SlowProxy(socketserver.ThreadingTCPServer):
    """A port that forwards to a server, each request after `DELAY_S`."""

    daemon_threads = True

    def __init__(self, port: int):
        super().__init__(("127.0.0.1", 0), _Forward)
        self.target = ("127.0.0.1", port)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class _Forward(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with socket.create_connection(self.server.target) as server:
            threading.Thread(target=_copy, args=(server, self.request, 0.0), daemon=True).start()
            _copy(self.request, server, DELAY_S)


def _copy(source, sink, delay_s: float) -> None:
    try:
        while data := source.recv(1 << 16):
            time.sleep(delay_s)
            sink.sendall(data)
    except OSError:  # one side has ended
        return


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("mlflow", reason="pip install 'distribuuuu[mlflow]'")
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def plain(image_folder, tmp_path_factory) -> Path:
    """A run without a tracker."""
    out = tmp_path_factory.mktemp("plain") / "out"
    assert run_tool(TRAIN_NET, *small_options(image_folder, out, *WORDS)).returncode == 0
    return out


def has_sent_rows(out: Path) -> bool:
    """Tell whether the tracker has sent rows."""
    path = out / "trackers" / "mlflow.json"
    return path.exists() and bool(json.loads(path.read_text())["rows"])


def train(args: list[str], address: str, out: Path, fail) -> list[str]:
    """Train, and call `fail`, unless it is None, when rows have been sent; return the warnings of the tracker."""
    env = os.environ | {"MLFLOW_TRACKING_URI": address, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, TRAIN_NET, *args], cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    if fail:
        wait_for(lambda: has_sent_rows(out), process)
        fail()
    errors = process.communicate(timeout=300)[1]  # until the tracker has ended too
    assert process.returncode == 0
    return [line for line in errors.splitlines() if "WARNING: LOG.TRACKERS" in line]


@pytest.mark.parametrize("fault", ["killed", "stopped", "slow", "unreachable"])
def test_a_fault_of_the_server(image_folder, tmp_path, server, plain, fault, monkeypatch, capsys):
    out, address = tmp_path / f"{fault}_run", f"http://127.0.0.1:{server.port}"
    args = small_options(image_folder, out, *WORDS, "LOG.TRACKERS", "mlflow")
    if fault == "unreachable":
        warnings = train(args, f"http://127.0.0.1:{free_port()}", out, None)
    elif fault == "slow":
        with SlowProxy(server.port) as proxy:
            warnings = train(args, f"http://127.0.0.1:{proxy.server_address[1]}", out, None)
            proxy.shutdown()
    elif fault == "stopped":
        warnings = train(args, address, out, lambda: server.signal(signal.SIGSTOP))
        server.signal(signal.SIGCONT)
    else:
        warnings = train(args, address, out, server.kill)
        server.start()

    assert_same_run(out, plain)
    assert timeless(out) == timeless(plain)
    assert len(warnings) == (fault != "slow"), "a slow server is waited for"
    assert all(" mlflow: " in warning and f"distribuuuu track {out}" in warning for warning in warnings)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    assert run_command("track", out) == 0 and "mlflow: sent " in capsys.readouterr().out
    evaluations = [("eval/loss", step) for step in range(4, STEPS + 1, 4)]
    assert server.rows_of(out.name) == evaluations + [("train/loss", step) for step in range(1, STEPS + 1)]
    assert server.status_of(json.loads((out / "trackers" / "mlflow.json").read_text())["run"]) == "FINISHED"
    assert run_command("track", out) == 0 and "sent 0 rows, 0 images, 0 files" in capsys.readouterr().out
