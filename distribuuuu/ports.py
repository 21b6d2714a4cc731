"""Who has taken a TCP port, and which one is free."""

import contextlib
import errno
import os
import socket
from pathlib import Path

_LISTENING = "0A"


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
