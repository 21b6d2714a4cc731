"""Untrusted servers: whatever they answer, and however slowly, a read ends in time with an error that names the URL."""

import itertools
import shutil
import socket
import threading
from pathlib import Path

import pytest
from support.images import draw_folder
from support.packs import pack as make_pack
from support.range_server import CONTRADICTIONS, ENDLESS, RangeServer, redirect, wrong_range

from distribuuuu.config import ConfigError
from distribuuuu.data.packed import store
from distribuuuu.data.packed.dataset import Packed
from distribuuuu.data.packed.remote import copy_pack
from distribuuuu.data.packed.store import RemoteError

# Far more than any of these reads takes: a read that hangs fails the test.
PATIENCE_S = 30
# Far more than the buffers of a connection hold, and far less than an endless answer.
MAX_SENT = 100 << 20


@pytest.fixture
def server(tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "loop").write_bytes(bytes(range(200)))
    with RangeServer(tmp_path / "served") as server:
        yield server


def outcome_of(function, *args, **kwargs):
    """Return the result of a function, or its error; fail if it does not end, or raises anything else."""
    found = []

    def call() -> None:
        try:
            found.append(function(*args, **kwargs))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert found, "it hangs"
    if isinstance(found[0], BaseException) and not isinstance(found[0], (ConfigError, OSError)):
        raise found[0]
    return found[0]


def read(url: str, timeout_s: float = 0.4):
    folder, name = url.rsplit("/", 1)
    return store.Store(folder, timeout_s, timeout_s).read(name, 10, 40)[0]


def refusal_of(url: str, timeout_s: float = 0.4) -> str:
    """Return the error of reading a range of a URL: one printable line."""
    error = outcome_of(read, url, timeout_s)
    assert isinstance(error, RemoteError) and str(error).isprintable()
    assert str(error).startswith(url) and "; fix: " in str(error)
    return str(error)


@pytest.mark.parametrize("name", ENDLESS)
def test_an_answer_without_end_is_given_up(server, name):
    server.attack = ENDLESS[name]
    refusal_of(f"{server.url}/loop")
    assert server.num_sent < MAX_SENT


def test_an_answer_that_contradicts_the_request_is_refused_at_once(server):
    for name, attack in CONTRADICTIONS.items():
        server.attack = attack
        server.requests.clear()
        assert "use another server" in (found := refusal_of(f"{server.url}/loop", PATIENCE_S)) or "HTTP 302" in found
        # Without `Connection: close`, the next request may be sent to a connection that the server is closing.
        assert len(server.requests) == 1 or name == "loop"


@pytest.mark.parametrize(("status", "said"), [
    *((status, f"HTTP {status} ") for status in (408, 429, 500, 503)), (404, "no such object"),
    (416, "does not send the requested bytes (HTTP 416"),
])  # fmt: skip
def test_temporary_errors_of_a_server_are_told_from_those_that_last(server, status, said):
    server.status, url = status, f"{server.url}/loop"
    assert said in refusal_of(url)
    server.status = 0
    assert read(url, 5.0) == bytes(range(10, 40))


def test_a_time_or_a_name_in_an_error_is_no_status():
    for time in ("404.1ms", "20.4s, after 8 retries, max_retries: 8, retry_timeout: 60s"):
        text = f"Error performing GET http://host/credentials/redirect in {time} - HTTP error: error sending request"
        said = str(store.explain(Exception(text), "http://host/x"))
        assert "/x: it cannot be reached: HTTP error: error sending request; fix: " in said


def test_a_handshake_that_hangs_ends_at_the_deadline_and_wrong_urls_are_named():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"https://127.0.0.1:{listening.getsockname()[1]}/x"
        assert "HTTP error" in refusal_of(url, timeout_s=0.2)
    for url in ("http:///x", "http://[::1/x", "http://host:99999999/x", "http://a b/x", "hf://OWNER/NAME/x"):
        assert "is no valid URL" in str(outcome_of(read, url))


def test_a_hub_is_read_by_its_address_and_a_token_is_not_sent_to_the_server_of_a_redirect(tmp_path, monkeypatch):
    """Files of the Hugging Face Hub are stored elsewhere."""
    path = tmp_path / "datasets/me/set/resolve/v1/train"
    path.mkdir(parents=True)
    (path / "x").write_bytes(bytes(range(50)))
    monkeypatch.setenv("HF_TOKEN", "secret")
    with RangeServer(tmp_path) as hub, RangeServer(tmp_path) as other:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for attack, found in ((None, hub), (redirect(f"{other.url}/{path.relative_to(tmp_path)}/x"), other)):
            hub.attack = attack
            assert read("hf://datasets/me/set@v1/train/x", 5.0) == bytes(range(10, 40))
            assert found.requests and [one.token for one in (hub, other)] == ["Bearer secret", None]
        assert read(f"{other.url}/datasets/me/set/resolve/v1/train/x", 5.0) and other.token is None


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    root, out = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("packed")
    draw_folder(root, "train", {"ant": 10, "bee": 20})
    draw_folder(root, "val", {"ant": 1, "bee": 1})
    make_pack(out, "--shard-mb", "0.02", "TRAIN.DATASET", root)
    return out


@pytest.fixture
def source(packed, server):
    shutil.copytree(packed, server.folder, dirs_exist_ok=True)
    return server


def copy(source, tmp_path, timeout_s=5.0) -> str:
    """Return the error of copying the training split: a ConfigError that names it."""
    error = outcome_of(copy_pack, f"{source.url}/train", str(tmp_path / "cache"), timeout_s)
    assert isinstance(error, ConfigError) and f"{source.url}/train" in str(error)
    return str(error)


def test_a_size_that_contradicts_the_index_is_refused_before_it_is_read(source, tmp_path):
    source.attack = wrong_range("bytes {first}-{last}/1000000000000000")
    assert "DATA.CACHE_DIR: " in (found := copy(source, tmp_path)) and "1,000,000.0 GB are needed for" in found


def test_an_error_whose_text_is_larger_than_the_memory_ends_the_reading_process_only(source, tmp_path):
    start = b"HTTP/1.1 403 No\r\nContent-Length: 99000000000\r\n\r\n"
    source.attack = lambda *_: itertools.chain([start], itertools.repeat(bytes(1 << 16)))
    assert "the process that uses the store has ended; fix: start again" in copy(source, tmp_path, 60.0)


def test_the_check_before_a_start_names_the_set(source, small_cfg):
    source.attack = ENDLESS["body"]
    cfg = small_cfg("DATA.NAME", "packed", "TRAIN.DATASET", source.url, "TEST.DATASET", f"{source.url}/../other")
    for train in (True, False):
        (problem,) = outcome_of(lambda train=train: list(Packed.find_problems(cfg, train)))
        assert problem[0] == "TRAIN.DATASET" and f"{source.url}/train/" in problem[1]
