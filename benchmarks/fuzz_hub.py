"""Send garbage to the hub of the watch while processes beat: all of them must stay alive.

python benchmarks/fuzz_hub.py [--connections 2000] [--seed 1] [--seconds 120]: on the loopback address only.
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
# Processes that are watched, out of a world that has room for some more.
NUM_MEMBERS, WORLD_SIZE = 4, 8
# Connections that are left open, half of them with half a line.
MOST_OPEN = 200
# What may follow the right token: no rank that can be, or no hello at all.
WRONG_HELLOS = (
    b"[1, 2]", b"{}", b'{"rank": "1"}', b'{"rank": -1}', b'{"rank": 8}', b'{"rank": true}', b'{"rank": 1e999}',
    b'{"rank": null, "host": 7}', b'{"rank": [[]]}', b"null", b'"rank"', b"9" * 6000, b"[" * 100_000, b'{"a":' * 30_000,
    b'{"rank": 0}', b'{"rank": 3, "host": {}}', b"\xff\xfe", b"", b'{"failed": {"status": 1}}', b'{"leaves": true}',
)  # fmt: skip


@dataclass
class Report:
    """What a run of the fuzzer came to."""

    connections: int
    members: int
    alive: int
    hub_is_alive: bool
    seconds: float


def fuzz(seed: int, num_connections: int, most_s: float) -> Report:
    """Attack a hub on the loopback address with so many connections, for so many seconds at most."""
    rng, began = random.Random(seed), time.monotonic()
    hub = WatchdogServer(WORLD_SIZE, TOKEN, timeout_s=600)
    hub.start()
    with tempfile.TemporaryDirectory() as folder:
        members = [WatchdogClient(rank, ("127.0.0.1", hub.ports[0]), TOKEN, folder) for rank in range(NUM_MEMBERS)]
        for member in members:
            member.start()
        while len(hub._members) < NUM_MEMBERS and time.monotonic() < began + most_s:
            time.sleep(0.01)
        still_open: list[socket.socket] = []
        done = 0
        while done < num_connections and time.monotonic() < began + most_s:
            attack(rng, hub.ports[0], still_open)
            done += 1
            for number, member in enumerate(members):
                member.mark(f"step {done} of member {number}")
            while len(still_open) > MOST_OPEN:
                still_open.pop(0).close()
        time.sleep(1.5)  # a beat
        is_sound = hub.is_alive() and not hub._over.is_set() and len(hub._members) == NUM_MEMBERS
        alive = sum(member.is_alive() for member in members)
        for victim in still_open:
            victim.close()
        for member in members:
            member.close()
        hub.close()
    return Report(done, NUM_MEMBERS, alive, is_sound, time.monotonic() - began)


def attack(rng: random.Random, port: int, still_open: list[socket.socket]) -> None:
    """Make one connection and misbehave on it."""
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
            connection.sendall(TOKEN.encode() + b"\n" + rng.choice(WRONG_HELLOS)[: rng.randrange(9)])
        elif kind == "shapes":
            lines = [rng.choice(WRONG_HELLOS) for _ in range(rng.randrange(1, 4))]
            connection.sendall(b"\n".join([TOKEN.encode(), *lines, b""]))
        elif kind == "reset":
            connection.sendall(rng.randbytes(8))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if kind in ("slow", "silent", "half"):
        still_open.append(connection)
        return
    connection.close()


def main() -> int:
    """Read the command line, attack, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120)
    args = parser.parse_args()
    print(describe_run())
    report = fuzz(args.seed, args.connections, args.seconds)
    print(report)
    return int(report.alive != report.members or not report.hub_is_alive)


if __name__ == "__main__":
    sys.exit(main())
