"""Who has taken a TCP port, which one is free, and the addresses of this machine."""

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
    """Return a port that nothing on this machine listens on."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def find_port_problem(address: str, port: int) -> str | None:
    """Return what keeps this machine from listening on a port, with its owner, or None."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        what = (
            f"is taken{find_port_owner(port)}" if error.errno == errno.EADDRINUSE else f"is refused: {error.strerror}"
        )
        return f"MASTER_PORT {port} on {address} {what}; set MASTER_PORT to a free one"
    return None


def find_own_address(host: str) -> str:
    """Return the address that this machine sends from to reach a host, '' if there is no way; nothing is sent."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return probe.getsockname()[0]
    return ""


def choose_addresses(own: str, others: Iterable[str]) -> dict[str, str]:
    """Return the address of this machine at which each of the others reaches it, by their addresses.

    The processes of this machine reach it at the loopback address, which no other machine can.

    Args:
        own: the address from which this machine sends to the one that all of them have met on, '' if not known.
        others: theirs. A host name may mean the loopback address on its own machine, as on Debian.
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
    """Return ' by process PID (COMMAND)', or '' where that cannot be known; reads /proc (Linux)."""
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
