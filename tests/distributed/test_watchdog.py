"""Watchdog: healthy runs, invalid connections, network, stalls. Runs that it ends are tested in test_stop.py."""

import json
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from fuzz_watchdog import fuzz
from support.runs import ROOT

from distribuuuu.distributed import watchdog_server
from distribuuuu.distributed.watchdog import WatchdogClient
from distribuuuu.distributed.watchdog_server import MAX_PENDING, UNREACHABLE_S, JsonLines, WatchdogServer, describe_end
from distribuuuu.launch.ports import choose_addresses, find_own_address


@pytest.fixture
def server():
    """A server of two processes."""
    server = WatchdogServer(world_size=2, token="secret", timeout_s=60)
    server.start()
    yield server
    if server.is_alive():
        server.close()


def join(server: WatchdogServer, rank: int, folder) -> WatchdogClient:
    client = WatchdogClient(rank, ("127.0.0.1", server.ports[0]), "secret", folder)
    client.start()
    wait_for(lambda: rank in server._peers)
    return client


def wait_for(condition, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def connect(server: WatchdogServer, rank: int) -> JsonLines:
    """Return the connection of a process that runs no client thread."""
    connection = socket.create_connection(("127.0.0.1", server.ports[0]), timeout=60)
    connection.sendall(b"secret\n")
    lines = JsonLines(connection)
    lines.send({"rank": rank, "host": "here"})
    connection.setblocking(True)
    connection.settimeout(60)
    wait_for(lambda: rank in server._peers)
    return lines


def has_message(lines: JsonLines, what: str) -> bool:
    """Tell whether a message arrives before the time-out of the connection; skip others."""
    while messages := lines.receive():
        if any(what in message for message in messages):
            return True
    return False


def test_clients_leave_without_ending_the_run(server, tmp_path):
    clients = [join(server, rank, tmp_path) for rank in (0, 1)]
    clients[1].mark("epoch 1, step 3")
    clients[1].close()
    clients[0].close()
    server.close()
    assert not any(thread.is_alive() for thread in (server, *clients))


def test_a_server_that_closes_stops_the_clients(server, tmp_path):
    clients = [join(server, rank, tmp_path) for rank in (0, 1)]
    clients[0].close()
    server.close()
    clients[1].join(60)
    assert not clients[1].is_alive()
    clients[1].close()


# ------------------------------------------------------------------------------------------ invalid connections


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b'{"token": "secret", "rank": 0}\n', b"\xff\n", b"[" * 200_000]
)
def test_data_before_the_token_is_not_parsed(server, tmp_path, monkeypatch, words):
    parsed = []
    monkeypatch.setattr(
        watchdog_server, "_parse", lambda line, parse=watchdog_server._parse: parsed.append(line) or parse(line)
    )
    client = join(server, 0, tmp_path)
    with socket.create_connection(("127.0.0.1", server.ports[0]), timeout=60) as connection:
        try:
            connection.sendall(words)
            assert connection.recv(1) == b"", "it is closed"
        except ConnectionError:
            pass
    assert server.is_alive() and client.is_alive()
    assert not any(line[:5] == words[:5] for line in parsed), "nothing is parsed before the token"
    client.close()


def test_a_connection_without_a_token_is_closed_after_a_timeout(server, monkeypatch):
    monkeypatch.setattr(watchdog_server, "AUTH_TIMEOUT_S", 0.5)
    with socket.create_connection(("127.0.0.1", server.ports[0]), timeout=60) as connection:
        connection.sendall(b"secr")
        assert connection.recv(1) == b""


def test_many_pending_connections_do_not_block_a_process(server, tmp_path):
    crowd = [socket.create_connection(("127.0.0.1", server.ports[0])) for _ in range(3 * MAX_PENDING)]
    client = join(server, 0, tmp_path)
    assert len(server._pending) <= MAX_PENDING + server.world_size
    for connection in crowd:
        connection.close()
    client.close()


@pytest.mark.parametrize(
    "line",
    [b"[" * 200_000, b'{"a":' * 5000, b"[1]", b'{"failed": 3}', b'{"failed": [], "at": 7, "marks": {}}', b"1" * 5000,
     b'{"at": "' + b"x" * 100_000 + b'"}', b'{"marks": 1e999, "starting": "no", "leaves": []}', b"\xff\x00"],
    ids=range(9),
)  # fmt: skip
def test_invalid_messages_are_skipped(server, line):
    lines = connect(server, 1)
    lines.connection.sendall(line + b"\n")
    lines.send({"at": "epoch 7, step 1"})
    wait_for(lambda: server._peers[1].position == "epoch 7, step 1")
    assert server.is_alive() and not server._is_over.is_set()
    lines.send({"leaves": True})
    wait_for(lambda: 1 not in server._peers)


@pytest.mark.parametrize("rank", [-1, 2, True, "1", None, [1], 1e999, 10**30])
def test_an_invalid_rank_is_refused(server, tmp_path, rank):
    client = join(server, 0, tmp_path)
    for wrong in (rank, 0):  # 0 is there already
        with socket.create_connection(("127.0.0.1", server.ports[0]), timeout=60) as member:
            member.sendall(b"secret\n" + json.dumps({"rank": wrong}).encode() + b"\n" + b'{"rank": 1}\n')
            assert member.recv(1) == b""
    assert server.is_alive() and not server._is_over.is_set() and client.is_alive()
    client.close()


@pytest.mark.slow
def test_a_process_that_does_not_read_blocks_nobody(server):
    lines = connect(server, 1)
    lines.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    theirs = server._peers[1].lines
    began = time.monotonic()
    for _ in range(2000):
        theirs.send({"words": "x" * 10_000})
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_the_server_survives_a_fuzzer():
    report = fuzz(seed=3, num_connections=150, max_s=60)
    assert report.alive == report.members and report.server_is_alive and report.connections == 150


def test_errors_of_accept_are_survived(server, tmp_path, monkeypatch):
    errors = [OSError(24, "EMFILE"), ConnectionAbortedError(103, "aborted")]
    monkeypatch.setattr(server, "heartbeat_s", 0.2)
    accept = socket.socket.accept
    monkeypatch.setattr(socket.socket, "accept", lambda self: accept(self) if not errors else raise_(errors.pop()))
    client = join(server, 0, tmp_path)
    assert server.is_alive() and not errors
    client.close()


def raise_(error: Exception):
    raise error


def test_an_error_in_the_server_ends_no_run(server, tmp_path, monkeypatch, caplog):
    clients = [join(server, rank, tmp_path) for rank in (0, 1)]
    monkeypatch.setattr(server, "_handle", lambda *anything: 1 / 0)
    for client in clients:
        client.join(60)
        assert not client.is_alive(), "the server has stopped the client"
    assert len([record for record in caplog.records if "watchdog disabled" in record.message]) == 1
    for client in clients:
        client.close()


def test_an_error_in_a_client_ends_no_run(server, tmp_path, monkeypatch, caplog):
    client = join(server, 1, tmp_path)
    monkeypatch.setattr(client, "_receive_until", lambda deadline: 1 / 0)
    client.join(60)
    wait_for(lambda: 1 not in server._peers)
    assert not server._is_over.is_set() and "watchdog disabled on this process" in caplog.text
    client.close()


# ------------------------------------------------------------------------------------------ the network


def test_the_server_listens_on_the_given_addresses_only(server):
    address = find_own_address("192.0.2.1")
    if address:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, server.ports[0]), timeout=5)
    assert [listener.getsockname()[0] for listener in server._listeners] == ["127.0.0.1"]


def test_processes_of_one_machine_meet_on_the_loopback_address():
    assert find_own_address("127.0.0.1") == "127.0.0.1"
    assert choose_addresses("127.0.0.1", ["127.0.0.1", "::1", "127.0.1.1"]) == dict.fromkeys(
        ["127.0.0.1", "::1", "127.0.1.1"], "127.0.0.1"
    )
    assert choose_addresses("10.0.0.5", ["10.0.0.5"]) == {"10.0.0.5": "127.0.0.1"}


def test_processes_of_other_machines_are_met_on_the_way_to_them(monkeypatch):
    ways = {"10.0.0.6": "10.0.0.5", "fe80::6%eth0": "fe80::5%eth0", "172.16.0.9": ""}
    monkeypatch.setattr("distribuuuu.launch.ports.find_own_address", ways.__getitem__)
    # The host name of the first machine means 127.0.1.1 there, as on Debian.
    chosen = choose_addresses("127.0.0.1", ["127.0.0.1", "10.0.0.6", "fe80::6%eth0"])
    assert chosen == {"127.0.0.1": "127.0.0.1", "10.0.0.6": "10.0.0.5", "fe80::6%eth0": "fe80::5%eth0"}
    # The store is on another machine than process 0: those beside the store reach it where it sends from.
    chosen = choose_addresses("10.0.0.5", ["127.0.0.1", "10.0.0.6", "172.16.0.9", ""])
    assert chosen == {"127.0.0.1": "10.0.0.5", "10.0.0.6": "10.0.0.5", "172.16.0.9": "10.0.0.5", "": "10.0.0.5"}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems give a dead connection up by their own times")
def test_the_kernel_gives_a_vanished_machine_up():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        connection = JsonLines(connection).connection
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == UNREACHABLE_S * 1000
        idle, interval, count = (
            connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}"))
            for name in ("IDLE", "INTVL", "CNT")
        )
        assert idle + interval * count <= UNREACHABLE_S


# Runs in a network of its own whose loopback device is switched off: nothing says goodbye.
VANISHING = """
    import subprocess, sys, time
    from distribuuuu.distributed import watchdog
    from distribuuuu.distributed import watchdog_server
    watchdog_server.UNREACHABLE_S = 3
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    server = watchdog_server.WatchdogServer(2, "secret", 600)
    server.start()
    one = watchdog.WatchdogClient(1, ("127.0.0.1", server.ports[0]), "secret", sys.argv[1])
    watchdog.end_process = lambda status: print("the member ends", status, flush=True)
    one.start()
    time.sleep(1)
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    server.join(30)
    one.join(30)
    print("the server ends" if not server.is_alive() else "the server did not notice")
"""


@pytest.mark.slow
def test_a_machine_that_vanishes_is_missed(tmp_path):
    command = ["unshare", "--user", "--map-root-user", "--net"]
    if not all(map(shutil.which, ("unshare", "ip"))) or subprocess.run([*command, "true"]).returncode:
        pytest.skip("this system lets nobody have a network of one's own")
    code = [sys.executable, "-c", textwrap.dedent(VANISHING), str(tmp_path)]
    done = subprocess.run([*command, *code], cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert "the server ends" in done.stdout and "the member ends 1" in done.stdout, done
    assert "process 0 on" in done.stderr and "could not be reached" in done.stderr


# ------------------------------------------------------------------------------------------ silence and progress


@pytest.mark.slow
def test_silence_is_no_death(server, monkeypatch):
    """A call into C, e.g. the launch of a kernel, may hold the interpreter lock for minutes."""
    monkeypatch.setattr(server, "heartbeat_s", 0.05)
    silent = connect(server, 1)
    time.sleep(3)  # sixty heartbeats
    assert server.is_alive() and not server._is_over.is_set()
    silent.send({"leaves": True})


# Holds the interpreter lock, in the process of the server or in another, for more than a hundred heartbeats.
HOLDING = """
    import ctypes, sys, time
    from distribuuuu.distributed import watchdog
    from distribuuuu.distributed import watchdog_server
    watchdog_server.HEARTBEAT_S = watchdog.HEARTBEAT_S = 0.02
    address = ("127.0.0.1", int(sys.argv[1]))
    if sys.argv[1] == "0":
        server = watchdog_server.WatchdogServer(2, "secret", 600)
        server.start()
        address = ("127.0.0.1", server.ports[0])
        print(address[1], flush=True)
    own = watchdog.WatchdogClient(int(sys.argv[1] != "0"), address, "secret", ".")
    own.start()
    time.sleep(0.5)
    ctypes.PyDLL(None).sleep(4)
    time.sleep(0.5)
    print("alive", own.is_alive() and own._server_host != "", flush=True)
    sys.stdin.read()
"""


def start_holding(port: str) -> subprocess.Popen:
    code = [sys.executable, "-c", textwrap.dedent(HOLDING), port]
    return subprocess.Popen(code, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_held_interpreter_lock_is_no_death():
    first = start_holding("0")
    port = first.stdout.readline().strip()
    second = start_holding(port)
    assert [process.stdout.readline().strip() for process in (first, second)] == ["alive True", "alive True"]
    for process in (second, first):
        process.stdin.close()
        process.wait(60)


@pytest.mark.slow
def test_a_process_that_makes_no_progress_is_stuck_in_time(monkeypatch):
    monkeypatch.setattr(watchdog_server, "HEARTBEAT_S", 0.05)
    server = WatchdogServer(world_size=2, token="secret", timeout_s=1, startup_timeout_s=600)
    server.start()
    members = {rank: connect(server, rank) for rank in (0, 1)}
    for number in range(20):
        for rank, lines in members.items():
            lines.send({"at": f"step {number}", "marks": number, "starting": rank == 1})
        time.sleep(0.02)
    time.sleep(2)
    assert not server._is_over.is_set(), "process 0 waits for one that is still starting"
    for number in range(20, 300):
        if server._is_over.is_set():
            break
        members[0].send({"at": f"step {number}", "marks": number, "starting": False})
        members[1].send({"at": "step 20", "marks": 20, "starting": False})
        time.sleep(0.02)
    for lines in members.values():
        assert has_message(lines, "stacks")
        lines.send({"wrote": True})
    members[1].connection.settimeout(60)
    end = next(m["end"] for m in iter(lambda: members[1].receive(), None) for m in m if "end" in m)
    assert "process 1 on here has made no step for 1 s (DIST.TIMEOUT_S) after step 20; all stop" == end["message"]
    members[1].connection.close()
    assert has_message(members[0], "end")


@pytest.mark.parametrize("message_age_s, is_silent", [(3.5, False), (6.5, True)])
def test_a_process_whose_heartbeats_arrive_late_is_not_called_silent(monkeypatch, message_age_s, is_silent):
    server, ended = WatchdogServer(world_size=2, token="secret", timeout_s=4), []
    monkeypatch.setattr(server, "_end_run", lambda *arguments: ended.append(arguments))
    lines = SimpleNamespace(send=lambda message: None)
    server._clock = 100.0
    server._peers[1] = watchdog_server._Peer(
        lines, since=0, rank=1, is_starting=False, progress_at=90, message_at=100 - message_age_s
    )
    server._check_progress()
    for listener in server._listeners:
        listener.close()
    ((culprit, _, silent),) = ended
    assert culprit.rank == 1 and silent is is_silent


@pytest.mark.slow
def test_a_suspended_job_has_not_hung(server, monkeypatch):
    """After an hour's suspension all clocks jump, and nobody has been stuck."""
    lines, clock = connect(server, 0), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600)
    time.sleep(2.5 * server.heartbeat_s)
    assert not server._is_over.is_set() and server._clock < 30
    lines.send({"leaves": True})


@pytest.mark.slow
def test_nobody_is_ended_before_all_have_written_their_stacks(monkeypatch):
    """A process that ends breaks the collectives of the others: they would no longer be where they were stuck."""
    monkeypatch.setattr(watchdog_server, "HEARTBEAT_S", 0.05)
    server = WatchdogServer(world_size=2, token="secret", timeout_s=0.5)
    server.start()
    members = {rank: connect(server, rank) for rank in (1, 0)}
    assert has_message(members[0], "stacks") and has_message(members[1], "stacks")
    members[1].send({"wrote": True})
    members[1].connection.settimeout(1.0)
    assert not has_message(members[1], "end")
    members[0].send({"wrote": True})
    members[1].connection.settimeout(60)
    assert has_message(members[1], "end")
    members[1].connection.close()
    assert has_message(members[0], "end")


@pytest.mark.slow
def test_the_end_waits_for_a_checkpoint_but_not_for_idle_threads(tmp_path):
    code = """
        import threading, time, sys
        from pathlib import Path
        from concurrent.futures import ThreadPoolExecutor
        from distribuuuu.launch import signals
        pools = [ThreadPoolExecutor(1) for _ in range(4)]
        for pool in pools:
            pool.submit(len, "").result()
        def write():
            time.sleep(0.5)
            Path(sys.argv[1]).write_text("whole")
        threading.Thread(target=write, name=signals.WRITER_NAME).start()
        signals.SAVE_S = 60
        signals.end_process(7)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "file")]
    assert subprocess.run(command, cwd=ROOT, timeout=50).returncode == 7
    assert (tmp_path / "file").read_text() == "whole"


def test_four_thousand_processes_send_no_more_messages_a_second_than_a_few_hundred():
    assert WatchdogServer(4096, "secret", 60).heartbeat_s == 16 and WatchdogServer(8, "secret", 60).heartbeat_s == 1


@pytest.mark.slow
def test_many_processes_join_and_receive_the_end(tmp_path):
    server = WatchdogServer(world_size=200, token="secret", timeout_s=60)
    server.start()
    with ThreadPoolExecutor(8) as pool:
        members = list(pool.map(lambda rank: connect(server, rank), range(200)))
    assert sorted(server._peers) == list(range(200)) and server._reporter.rank == 1
    members[77].connection.close()
    enders = [
        threading.Thread(target=has_message, args=(lines, "end")) for lines in members if lines is not members[77]
    ]
    for ender in enders:
        ender.start()
    for ender in enders:
        ender.join(60)
        assert not ender.is_alive()
    for lines in members:
        lines.connection.close()


def test_what_is_said(server):
    class Gone:
        is_unreachable = False

    class Member:
        rank, host, position, failed, lines = 3, "node2", "epoch 2, step 14", None, Gone()

        def __str__(self):
            return "process 3 on node2"

    assert describe_end(Member()) == "process 3 on node2 died after {last step}; the others stop"
    stuck = describe_end(Member(), (60, "DIST.TIMEOUT_S"))
    assert "has made no step for 60 s (DIST.TIMEOUT_S) after epoch 2, step 14" in stuck
    silent = describe_end(Member(), (60, "DIST.TIMEOUT_S"), is_silent=True)
    assert "has been silent and has made no step for 60 s" in silent
    Gone.is_unreachable = True
    assert "could not be reached for 15 s" in describe_end(Member())
