"""Servers of others: whatever they answer, and however slowly, a read ends in time with an error that names the URL."""

import contextlib
import ftplib
import http.client
import json
import shutil
import socket
import threading
import time
import zlib
from collections import Counter
from pathlib import Path

import fsspec
import pytest
from support.commands import command_module
from support.images import draw_folder
from support.packs import pack as make_pack
from support.range_server import CONTRADICTIONS, ENDLESS, REDIRECTS, RangeServer, redirect, with_headers, wrong_range

from distribuuuu.config import ConfigError
from distribuuuu.data.packed import remote as pack
from distribuuuu.data.packed import transport
from distribuuuu.data.packed.cache import DiskCache
from distribuuuu.data.packed.dataset import Packed
from distribuuuu.data.packed.transport import RemoteError

parse_args, pack_split = command_module("pack.pack").parse_args, command_module("pack.packer").pack_split

# Far more than any of these reads takes: a read that hangs fails the test.
PATIENCE_S = 30
# Far more than the buffers of a connection hold, and far less than an endless answer.
MAX_SENT = 100 << 20


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(transport, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(pack, "START_S", 5.0)
    monkeypatch.setattr(pack, "START_TIMEOUT_S", 0.4)
    monkeypatch.setattr(pack, "_failures", {})


@pytest.fixture
def server(tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "loop").write_bytes(bytes(range(200)))
    with RangeServer(tmp_path / "served") as server:
        yield server


def outcome_of(function, *args, **kwargs):
    """Return the result of a function, or its ConfigError; fail if it does not end, or raises anything else."""
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
    if isinstance(found[0], BaseException) and not isinstance(found[0], ConfigError):
        raise found[0]
    return found[0]


def refusal_of(url: str, timeout_s: float = 0.4) -> str:
    """Return the error of reading a range of a URL: one printable line."""
    error = outcome_of(transport.fetch, url, 10, 40, timeout_s)
    assert isinstance(error, RemoteError) and str(error).startswith(url) and str(error).isprintable()
    return str(error)


def test_an_answer_without_end_is_given_up(server):
    for name, attack in ENDLESS.items():
        server.attack = attack
        before = server.num_sent
        assert "; fix: " in refusal_of(f"{server.url}/loop"), name
        assert server.num_sent - before < MAX_SENT, name


def test_an_answer_that_contradicts_the_request_is_refused_at_once(server):
    longer = {length: with_headers(*filter(None, [length]), body=lambda body: body + b"!")
              for length in ("", "Content-Length: 31")}  # fmt: skip
    for name, attack in {**CONTRADICTIONS, **longer}.items():
        server.attack = attack
        server.requests.clear()
        assert "expected the bytes 10 to 39" in refusal_of(f"{server.url}/loop", timeout_s=PATIENCE_S), name
        assert len(server.requests) == 1, name


@pytest.mark.parametrize(("status", "error"), [
    *((status, http.client.HTTPException) for status in (408, 429, 500, 503)), (404, RemoteError), (416, RemoteError),
])  # fmt: skip
def test_temporary_errors_of_a_server_are_told_from_those_that_last(server, status, error):
    server.status, url, read = status, f"{server.url}/loop", transport._read_http
    with pytest.raises(error):
        read(url, 10, 40, False, time.monotonic() + PATIENCE_S)
    server.status = 0
    assert read(url, 10, 40, False, time.monotonic() + PATIENCE_S).data == bytes(range(10, 40))


def test_an_answer_in_chunks_is_read_and_text_of_a_server_cannot_act_on_a_terminal(server):
    server.attack = with_headers("Transfer-Encoding: chunked", body=lambda body: b"1e\r\n" + body + b"\r\n0\r\n\r\n")
    assert transport.fetch(f"{server.url}/loop", 10, 40, 5.0).data == bytes(range(10, 40))
    server.attack = with_headers("Content-Encoding: \x1b[2J\x9b")
    assert "\\x1b" in refusal_of(f"{server.url}/loop")


def test_a_bad_redirect_is_refused_with_the_url_and_another_server_is_followed(server, tmp_path):
    for name, attack in REDIRECTS.items():
        server.attack = attack
        server.requests.clear()
        assert "redirects" in refusal_of(f"{server.url}/loop", timeout_s=PATIENCE_S), name
        assert len(server.requests) <= 6
    server.requests.clear()
    with RangeServer(tmp_path / "served") as other:
        server.attack = redirect(f"{other.url}/loop")
        assert transport.fetch(f"{server.url}/loop", 10, 40, 5.0).data == bytes(range(10, 40))
        assert len(server.requests) == len(other.requests) == 1


def test_connections_to_many_hosts_are_not_kept(server, monkeypatch):
    monkeypatch.setattr(transport, "_MAX_OPEN", 2)
    monkeypatch.setattr(transport, "_connections", threading.local())
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            other = stack.enter_context(RangeServer(server.folder))
            for _ in range(2):
                assert transport.fetch(f"{other.url}/loop", 0, 5, 5.0).data == bytes(range(5))
        assert len(transport._connections.__dict__) == 2


def test_a_look_up_or_a_handshake_that_hangs_ends_at_the_deadline(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"https://127.0.0.1:{listening.getsockname()[1]}/x"
        assert "no complete answer in time" in refusal_of(url, timeout_s=0.2)
    is_over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: is_over.wait(PATIENCE_S) and [])
    assert "no complete answer in time" in refusal_of("http://host.invalid/x", timeout_s=0.2)
    is_over.set()
    for url in ("http://", "http://[::1/x", "http://host:99999999/x", "http://a b/x"):
        assert "is no valid URL" in refusal_of(url)


class HostileStore:
    def __init__(self, **methods):
        self.__dict__.update(methods)

    def _strip_protocol(self, url):
        return url

    def info(self, url):
        return {"size": 200, "ETag": "1"}

    def cat_file(self, url, start, end):
        return bytes(range(start, end))


def refusal_of_store(monkeypatch, **methods) -> str:
    monkeypatch.setattr(transport, "_open_filesystem", lambda *args: HostileStore(**methods))
    error = outcome_of(transport.fetch, "s3://bucket/loop", 10, 40, 0.2, info=True)
    if isinstance(error, transport.Part):
        return ""
    assert isinstance(error, RemoteError) and str(error).startswith("s3://bucket/loop")
    return str(error)


def test_an_object_store_has_the_same_limits(monkeypatch):
    assert refusal_of_store(monkeypatch) == ""
    is_over = threading.Event()
    for method in ("info", "cat_file"):
        hangs = {method: lambda *args, **kwargs: is_over.wait(PATIENCE_S)}
        assert "no complete answer in time" in refusal_of_store(monkeypatch, **hangs)
    is_over.set()
    for data in (bytes(31), "text", None):
        answer = {"cat_file": lambda *_, data=data, **__: data}
        assert "more than the bytes 10 to 39" in refusal_of_store(monkeypatch, **answer)
    for found in ({}, {"size": None}, {"size": -1}, {"size": "9"}, {"size": 1e9}, [], None):
        assert "does not tell its size" in refusal_of_store(monkeypatch, info=lambda _, found=found: found)


def test_a_busy_ftp_server_has_no_missing_objects(monkeypatch):
    def refuse(path):
        raise FileNotFoundError(path) from causes[0]

    monkeypatch.setattr(transport, "_open_filesystem", lambda *args: HostileStore(info=refuse))
    causes: list[Exception] = [ftplib.error_temp("425 busy")]
    with pytest.raises(OSError, match="error_temp: 425 busy"):
        transport.call_filesystem("ftp://host/run/mirror.json", "info")
    causes = [ftplib.error_perm("550 no file")]
    with pytest.raises(transport.MissingObjectError, match="no such object"):
        transport.call_filesystem("ftp://host/run/mirror.json", "info")


def test_a_file_system_gets_only_options_that_it_knows(monkeypatch):
    monkeypatch.setattr(fsspec, "url_to_fs", lambda root, **options: (options, root))
    options = {root: transport._open_filesystem(root, -1, -1) for root in ("s3://", "ftp://host/", "sftp://me@host/")}
    assert ["use_listings_cache" in found for found in options.values()] == [True, True, False]  # paramiko refuses it


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    root, out = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("packed")
    draw_folder(root, "train", {"ant": 10, "bee": 20})
    draw_folder(root, "val", {"ant": 1, "bee": 1})
    make_pack(out, "--shard-mb", "0.02", "TRAIN.DATASET", root)
    return out


@pytest.fixture
def source(packed, tmp_path):
    shutil.copytree(packed, tmp_path / "packs")
    with RangeServer(tmp_path / "packs") as server:
        yield server


def open_pack(source, tmp_path, timeout_s=5.0, gb=1.0):
    return outcome_of(Packed, source.url, "train", None, str(tmp_path / "cache"), gb, timeout_s)


def test_a_size_that_contradicts_the_index_is_refused_before_it_is_read(source, tmp_path):
    assert str(open_pack(source, tmp_path, gb=1e-6)).startswith("DATA.CACHE_GB: got 1e-06; expected room for the ")
    source.attack = wrong_range("bytes {first}-{last}/1000000000000000")
    for read in (lambda: outcome_of(pack.read_meta, f"{source.url}/train"), lambda: open_pack(source, tmp_path)):
        source.requests.clear()
        error = read()
        assert isinstance(error, RemoteError) and str(error).startswith(f"{source.url}/train/index.bin")
        assert "1,000,000,000,000,000 bytes, expected " in str(error)
        assert len(source.requests) <= 1 + transport.MAX_WRONG


def corrupt_first_answers(seen: Counter):
    """Return an attack that changes a byte of the first answer about each range."""

    def answer(first, last, size, body):
        seen[first, last] += 1
        wrong = bytes([body[0] ^ 1]) + body[1:] if seen[first, last] == 1 else body
        headers = [f"Content-Range: bytes {first}-{last}/{size}", f"Content-Length: {len(body)}"]
        return iter(["\r\n".join(["HTTP/1.1 206 OK", *headers, "", ""]).encode() + wrong])

    return answer


def test_a_wrong_byte_in_the_index_is_read_again(source, packed, tmp_path):
    source.attack, local = corrupt_first_answers(Counter()), Packed(packed, "train")
    assert outcome_of(pack.read_meta, f"{source.url}/train") == (local.meta, 30)
    source.attack = corrupt_first_answers(seen := Counter())
    images = open_pack(source, tmp_path)
    assert [bytes(images.read(index)) for index in range(30)] == [bytes(local.read(index)) for index in range(30)]
    assert min(seen.values()) == 2


def test_a_slow_answer_is_no_failure_of_a_start(source, monkeypatch):
    monkeypatch.setattr(pack, "START_S", 0.1)
    monkeypatch.setattr(pack, "START_TIMEOUT_S", PATIENCE_S)
    source.latency_s = 0.15  # beyond the time of retries
    assert outcome_of(pack.read_meta, f"{source.url}/train")[1] == 30


def test_a_hostile_server_of_packs_is_given_up(source, tmp_path, monkeypatch):
    images = open_pack(source, tmp_path, timeout_s=0.4)
    for name in ("dripped headers", "dripped body", "body", "negative chunk"):
        source.attack, before = ENDLESS[name], source.num_sent
        monkeypatch.setattr(pack, "_failures", {})
        for read in (lambda: pack.read_meta(f"{source.url}/train"), lambda: images.read(0)):
            assert isinstance(error := outcome_of(read), RemoteError) and str(error).startswith(f"{source.url}/train/")
        assert isinstance(open_pack(source, tmp_path, timeout_s=0.4), RemoteError)
        assert source.num_sent - before < MAX_SENT


def crafted(whole: bytes, change) -> bytes:
    """Return an index with a changed header and its right checksum and size."""
    length = int.from_bytes(whole[8:16], "little")
    header = json.loads(whole[20 : 20 + length])
    change(header)
    text = json.dumps(header).encode().ljust(length)
    rest = whole[20 + length :]
    header["size"] = 20 + len(text) + len(rest)
    text = json.dumps(header).encode().ljust(len(text))
    assert len(text) + 20 + len(rest) == header["size"]
    return whole[:8] + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(4, "little") + text + rest


def test_a_hostile_index_with_a_right_checksum_is_refused(source, tmp_path, monkeypatch):
    path = source.folder / "train" / "index.bin"
    whole = path.read_bytes()
    for change in [
        lambda header: header.update(arrays=[]), lambda header: header.update(meta=[]),
        lambda header: header["arrays"].pop("label"), lambda header: header["arrays"]["label"].pop(),
        lambda header: header["arrays"]["label"].__setitem__(1, []), lambda header: header["meta"].pop("options"),
        lambda header: header["meta"].update(shards=[{"name": "shard-00000.bin", "size": 2**63, "images": 1}]),
        lambda header: header["meta"].update(mean=[10**400] * 3), lambda header: header["meta"].update(std=[0] * 3),
        lambda header: header["meta"].update(classes=[["a"]]), lambda header: header["meta"].update(crc32=None),
    ]:  # fmt: skip
        path.write_bytes(crafted(whole, change))
        monkeypatch.setattr(pack, "_failures", {})
        for error in (outcome_of(pack.read_meta, f"{source.url}/train"), open_pack(source, tmp_path)):
            assert str(error).startswith(f"{source.url}/train/index.bin: it has an invalid header")


def fail(part: bytes):
    raise StopAsyncIteration  # anything


def test_a_file_is_stored_in_parts_and_read_once(tmp_path):
    files, taken = DiskCache(tmp_path, 1000), []

    def parts():
        for number in range(3):
            taken.append(number)
            yield bytes(100)

    files.store("a", 300, parts())
    files.store("a", 300, parts())  # it exists
    files.store("large", 10**15, parts())
    assert taken == [0, 1, 2] and (tmp_path / "a").read_bytes() == bytes(300) and not (tmp_path / "large").exists()
    assert int((tmp_path / "usage").read_text()) == 300
    with pytest.raises(StopAsyncIteration):
        files.store("b", 100, map(fail, [b"", b""]))
    assert not [path.name for path in tmp_path.iterdir() if path.name not in ("a", "usage", "usage.lock")]


def test_a_damaged_count_of_the_bytes_in_use_is_counted_again(tmp_path):
    files = DiskCache(tmp_path, 1000)
    for number, text in enumerate(("-999999", "", "x", "9" * 5000, "\xff")):
        (tmp_path / "usage").write_text(text)
        files.fetch(str(number), lambda: bytes(100))
        files.drop(str(number))
        assert int((tmp_path / "usage").read_text()) == 100
