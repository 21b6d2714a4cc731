"""Connections between the processes and rank 0, over which lines of JSON are sent.

The kernel breaks a connection when a process dies. A process that leaves says so before: what was sent arrives before
the end of a connection.
"""

import contextlib
import errno
import ipaddress
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from distribuuuu.launch.ports import LOOPBACK

# Seconds after which the kernel closes a connection whose other end does not respond, e.g. a node without power.
UNREACHABLE_S = 15
# Bytes of a line, at most.
_MAX_LINE = 1 << 16


class Channel:
    """A connection that sends and receives JSON objects as lines.

    Attributes:
        broken: why it has ended, e.g. 'died'; '' while it is open.
    """

    def __init__(self, connection: socket.socket):
        self.socket, self.broken = connection, ""
        self._buffer = b""
        keep_alive(connection)

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self.socket.fileno()

    def send(self, **message: Any) -> None:
        """Send an object; ignore a broken connection, which the reader notices."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the objects that have arrived, after a selector has found some or the end of the connection.

        Raises:
            ValueError: the other end is no process of the run.
        """
        try:
            data = self.socket.recv(_MAX_LINE)
        except OSError as error:
            is_unreachable = error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
            self.broken = f"could not be reached for {UNREACHABLE_S} s" if is_unreachable else "died"
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > _MAX_LINE:
            raise ValueError("a line is too long")
        self.broken = "" if data else "died"
        for line in lines:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("expected an object")
            yield message

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
        self.socket.close()


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel close a connection whose other end does not respond for UNREACHABLE_S seconds."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {"TCP_KEEPIDLE": UNREACHABLE_S // 3, "TCP_KEEPINTVL": UNREACHABLE_S // 3, "TCP_KEEPCNT": 2,
              "TCP_USER_TIMEOUT": UNREACHABLE_S * 1000}  # fmt: skip
    for name, value in limits.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), max(1, value))


def listen(address: str, num_processes: int) -> socket.socket:
    """Return a socket that accepts the connections of so many processes, on an address of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    target = socket.getaddrinfo(address, 0, family, socket.SOCK_STREAM)[0][4]  # with the scope of an IPv6 address
    return socket.create_server(target, family=family, backlog=max(128, num_processes))


def kill_here(host: str, pid: int) -> None:
    """Let a silent process of this machine print its stacks, and kill it: its interpreter lock may be held for ever."""
    if host == socket.gethostname() and pid != os.getpid():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGQUIT)  # faulthandler prints the stacks without the lock
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)


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
