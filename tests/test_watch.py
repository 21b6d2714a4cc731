"""The watch where nothing is wrong; how it ends a run is seen on whole runs in test_stop.py."""

import contextlib
import socket
import time

import pytest

from distribuuuu.watch import Watch
from distribuuuu.watch_hub import Hub, Lines, describe_end


@pytest.fixture
def hub():
    """A hub of two processes."""
    hub = Hub(world_size=2, token="secret", timeout_s=60)
    hub.start()
    yield hub
    if hub.is_alive():
        hub.close()


def join(hub: Hub, rank: int, folder) -> Watch:
    watch = Watch(rank, ("localhost", hub.port), "secret", folder)
    watch.start()
    return watch


def test_processes_come_and_go_in_peace(hub, tmp_path):
    watches = [join(hub, rank, tmp_path) for rank in (0, 1)]
    watches[1].mark("epoch 1, step 3")
    time.sleep(0.3)
    watches[1].close()
    watches[0].close()
    hub.close()
    assert not any(thread.is_alive() for thread in (hub, *watches))


def test_the_end_of_the_hub_in_peace_frees_the_others(hub, tmp_path):
    watches = [join(hub, rank, tmp_path) for rank in (0, 1)]
    time.sleep(0.3)
    watches[0].close()
    hub.close()
    watches[1].join(5)
    assert not watches[1].is_alive()
    watches[1].close()


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b'{"token": "guessed", "rank": 0}\n', b"\xff\n"]
)
def test_strangers_are_not_heard(hub, tmp_path, words):
    watch = join(hub, 0, tmp_path)
    with contextlib.suppress(ConnectionError), socket.create_connection(("localhost", hub.port)) as stranger:
        stranger.sendall(words)
    time.sleep(0.5)
    assert hub.is_alive() and watch.is_alive()
    watch.close()


def test_nobody_is_ended_before_all_have_written_their_stacks(hub):
    """A process that ends breaks the collectives of the others: they would no longer be where they were stuck."""
    members = {rank: Lines(socket.create_connection(("localhost", hub.port), timeout=10)) for rank in (1, 0)}
    for rank, lines in members.items():
        lines.send({"token": "secret", "rank": rank, "host": "here"})
        lines.send({"at": "epoch 1, step 3", "age_s": 61.0})
    assert told(members[0], "stacks") and told(members[1], "stacks")
    members[1].send({"wrote": True})
    members[1].connection.settimeout(1.0)
    assert not told(members[1], "end")
    members[0].send({"wrote": True})
    members[1].connection.settimeout(10)
    assert told(members[1], "end")
    members[1].connection.close()
    assert told(members[0], "end")


def told(lines: Lines, what: str) -> bool:
    """Tell whether a message comes, until the connection's time is over; skip those before it."""
    while messages := lines.receive():
        if any(what in message for message in messages):
            return True
    return False


def test_what_is_said(hub):
    class Member:
        rank, host, position, silent, failed = 3, "node2", "epoch 2, step 14", 0, None

        def __str__(self):
            return "process 3 on node2"

    assert describe_end(Member(), False, 60) == "process 3 on node2 died after {last step}; the others stop"
    assert "made no step for 60 s (DIST.TIMEOUT_S) after epoch 2, step 14" in describe_end(Member(), True, 60)
