"""TCP ports of this machine."""

import socket

LOOPBACK = "127.0.0.1"


def find_free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


# Ports on which this process serves the store of its groups until it ends.
SERVED_PORTS: set[int] = set()


def find_port_problem(address: str, port: int) -> str | None:
    """Return why this process cannot listen on a port; None if it can, or does."""
    if port in SERVED_PORTS:
        return None
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return f"MASTER_PORT {port} on {address}: {error.strerror}; fix: set MASTER_PORT to a free port"
    return None
