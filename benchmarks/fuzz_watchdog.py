"""Send garbage to the watchdog server while clients send heartbeats: all of them must stay alive.

python benchmarks/fuzz_watchdog.py [--connections 2000] [--seed 1] [--seconds 120]: on the loopback address only.
"""

import argparse
import contextlib
import random
import socket
import struct
import sys
import tempfile
import time
from dataclasses import dataclass

from machine import describe_run

from distribuuuu.distributed.watchdog import WatchdogClient
from distribuuuu.distributed.watchdog_server import WatchdogServer

TOKEN = "0123456789abcdef0123456789abcdef"
# Clients, in a world with room for more.
NUM_MEMBERS, WORLD_SIZE = 4, 8
# Connections that are left open.
MAX_OPEN = 200
# Invalid messages after a valid token.
INVALID_MESSAGES = (
    b"[1, 2]", b"{}", b'{"rank": "1"}', b'{"rank": -1}', b'{"rank": 8}', b'{"rank": true}', b'{"rank": 1e999}',
    b'{"rank": null, "host": 7}', b'{"rank": [[]]}', b"null", b'"rank"', b"9" * 6000, b"[" * 100_000, b'{"a":' * 30_000,
    b'{"rank": 0}', b'{"rank": 3, "host": {}}', b"\xff\xfe", b"", b'{"failed": {"status": 1}}', b'{"leaves": true}',
)  # fmt: skip


@dataclass
class Report:
    """Result of a run of the fuzzer."""

    connections: int
    members: int
    alive: int
    server_is_alive: bool
    seconds: float


def fuzz(seed: int, num_connections: int, max_s: float) -> Report:
    """Open `num_connections` invalid connections to a server on the loopback address, for at most `max_s` seconds."""
    rng, began = random.Random(seed), time.monotonic()
    server = WatchdogServer(WORLD_SIZE, TOKEN, timeout_s=600)
    server.start()
    with tempfile.TemporaryDirectory() as folder:
        members = [WatchdogClient(rank, ("127.0.0.1", server.ports[0]), TOKEN, folder) for rank in range(NUM_MEMBERS)]
        for member in members:
            member.start()
        while len(server._peers) < NUM_MEMBERS and time.monotonic() < began + max_s:
            time.sleep(0.01)
        still_open: list[socket.socket] = []
        done = 0
        while done < num_connections and time.monotonic() < began + max_s:
            attack(rng, server.ports[0], still_open)
            done += 1
            for number, member in enumerate(members):
                member.mark(f"step {done} of member {number}")
            while len(still_open) > MAX_OPEN:
                still_open.pop(0).close()
        time.sleep(1.5)  # a heartbeat
        is_healthy = server.is_alive() and not server._is_over.is_set() and len(server._peers) == NUM_MEMBERS
        alive = sum(member.is_alive() for member in members)
        for connection in still_open:
            connection.close()
        for member in members:
            member.close()
        server.close()
    return Report(done, NUM_MEMBERS, alive, is_healthy, time.monotonic() - began)


def attack(rng: random.Random, port: int, still_open: list[socket.socket]) -> None:
    """Open one connection and send invalid data."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    kind = rng.choice(("garbage", "nested", "guess", "slow", "silent", "reset", "half", "shapes", "shapes"))
    with contextlib.suppress(OSError):
        if kind == "garbage":
            connection.sendall(rng.randbytes(rng.choice((1, 100, 5000, 200_000))))
        elif kind == "nested":
            connection.sendall(rng.choice((b"[", b'{"a":')) * rng.choice((10, 1000, 200_000)) + b"\n")
        elif kind == "guess":
            connection.sendall(rng.randbytes(16).hex().encode() + b'\n{"rank": 1, "host": "x"}\n')
        elif kind == "slow":
            for byte in TOKEN[: rng.randrange(1, 6)].encode():
                connection.sendall(bytes([byte]))
        elif kind == "half":
            connection.sendall(TOKEN.encode() + b"\n" + rng.choice(INVALID_MESSAGES)[: rng.randrange(9)])
        elif kind == "shapes":
            lines = [rng.choice(INVALID_MESSAGES) for _ in range(rng.randrange(1, 4))]
            connection.sendall(b"\n".join([TOKEN.encode(), *lines, b""]))
        elif kind == "reset":
            connection.sendall(rng.randbytes(8))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if kind in ("slow", "silent", "half"):
        still_open.append(connection)
        return
    connection.close()


def main() -> int:
    """Run the fuzzer and print its report; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120)
    args = parser.parse_args()
    print(describe_run())
    report = fuzz(args.seed, args.connections, args.seconds)
    print(report)
    return int(report.alive != report.members or not report.server_is_alive)


if __name__ == "__main__":
    sys.exit(main())
