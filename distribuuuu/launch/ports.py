"""TCP ports and addresses of this machine: a free port, the owner of a taken one, and routes to other machines."""

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path

_LISTENING = "0A"
LOOPBACK = "127.0.0.1"


def find_free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def find_port_problem(address: str, port: int) -> str | None:
    """Return why this machine cannot listen on a port, with the process that does, or None."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        reason = f"is taken{find_port_owner(port)}" if taken else f"cannot be opened: {error.strerror}"
        return f"MASTER_PORT {port} on {address} {reason}; set MASTER_PORT to a free port"
    return None


def find_own_address(host: str) -> str:
    """Return the address from which this machine reaches a host, '' if there is no route; nothing is sent."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return probe.getsockname()[0]
    return ""


def choose_addresses(own: str, others: Iterable[str]) -> dict[str, str]:
    """Return for each of the others' addresses the one at which that machine reaches this one.

    Processes of this machine get the loopback address, which no other machine can reach.

    Args:
        own: the address from which this machine reaches the host of the store, '' if unknown.
        others: the same of the other processes. On its own machine a host name may resolve to a loopback address.
    """
    chosen = {}
    for other in set(others):
        if _is_local(other):
            chosen[other] = LOOPBACK if _is_local(own) else own
        else:
            chosen[other] = LOOPBACK if other == own else find_own_address(other) or own or LOOPBACK
    return chosen


def _is_local(address: str) -> bool:
    return not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback


def find_port_owner(port: int) -> str:
    """Return ' by process PID (COMMAND)', or '' if it is unknown; reads /proc (Linux)."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in Path("/proc").glob("[0-9]*") if wanted else ():
        with contextlib.suppress(OSError):
            if any(os.readlink(link) in wanted for link in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f" by process {process.name} ({command[:120]})"
    return ""


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(fields[9])
    return inodes
