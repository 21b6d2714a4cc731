"""TCP ports and addresses of this machine: a free port, the owner of a taken one, and routes to other machines."""

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
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


def choose_address(own: str, others: Sequence[str]) -> str:
    """Return the address of this machine at which the processes of other machines reach it; loopback without others.

    Args:
        own: the address from which this machine reaches that of the store, '' if unknown.
        others: the same of the processes on other machines. On its own machine a host name may mean a loopback address.
    """
    if not others:
        return LOOPBACK
    if not _is_local(own):
        return own
    return next(filter(None, (find_own_address(other) for other in others if not _is_local(other))), LOOPBACK)


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
