"""TCP ports and addresses of this machine: a free port, and routes to other machines."""

import contextlib
import ipaddress
import socket
from collections.abc import Sequence

LOOPBACK = "127.0.0.1"


def find_free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def find_port_problem(address: str, port: int) -> str | None:
    """Return why this machine cannot listen on a port; None if it can."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return f"MASTER_PORT {port} on {address}: {error.strerror}; fix: set MASTER_PORT to a free port"
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
