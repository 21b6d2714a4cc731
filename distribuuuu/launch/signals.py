"""Signals: what ends a run at once, what asks it to stop, and who shall not hear them; imports no torch.

A run that was asked to stop exits with 130 after SIGINT (Ctrl-C), with 143 after SIGTERM (kill, scancel), with 129
after SIGHUP (a closed terminal), and after SIGUSR1 (sbatch --signal) with 75, which says: start the same command again.
SIGQUIT prints the stacks of all threads, and the run goes on.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

# sysexits.h: a temporary failure, the user is invited to retry.
REQUEUE = 75
STATUS_OF = {signal.SIGINT: 130, signal.SIGTERM: 143}
if hasattr(signal, "SIGUSR1"):  # not on Windows
    STATUS_OF[signal.SIGUSR1] = REQUEUE
    STATUS_OF[signal.SIGHUP] = 129

# Not a signal, but asks for the same: the hours of the run are over.
OUT_OF_TIME = 1000
# Launchers pass on what the terminal or Slurm has already sent to everybody; that soon, it is the same signal.
ECHO_S = 1.0
_PR_SET_PDEATHSIG = 1
# The thread that writes checkpoints, and the seconds that it gets when the process has to end: one or two GiB take as
# many. A process that failed prints its error after about as long.
WRITER_NAME = "checkpoint writer"
SAVE_S = 8.0


class RunStopped(Exception):
    """The run was asked to stop, and every process has agreed to.

    Args:
        asked_by: the number of a signal, or OUT_OF_TIME.

    Attributes:
        status: what the process is to exit with.
    """

    on_all_processes = True

    def __init__(self, asked_by: int):
        out_of_time = asked_by == OUT_OF_TIME
        self.status = REQUEUE if out_of_time else STATUS_OF[asked_by]
        super().__init__("CHECKPOINT.MAX_HOURS" if out_of_time else signal.Signals(asked_by).name)


def exit_now(signum: int) -> None:
    """End this process now, with the status of the signal; process 0 says so in one line."""
    if SignalState.is_ending:
        return
    if is_first_process():
        left = "the newest checkpoint stays" if SignalState.has_begun else "no step was made, nothing is lost"
        with contextlib.suppress(OSError):  # nobody reads standard error any more
            os.write(2, f"{signal.Signals(signum).name}: ended at once; {left}\n".encode())
    os._exit(STATUS_OF[signum])


def end_process(status: int) -> None:
    """End this process without Python's clean-up, which may wait for ever: for other processes, for idle threads.

    A checkpoint that is being written is still good, so its thread gets SAVE_S seconds.
    """
    for thread in threading.enumerate():
        if thread.name == WRITER_NAME:
            thread.join(SAVE_S)
    os._exit(status)


def is_first_process() -> bool:
    """Tell whether this is process 0, by the launcher's variables alone."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


@contextlib.contextmanager
def handled_by(
    handler: Callable[[int], None],
    on_quit: Callable[[int], None] = lambda signum: write_stacks(SignalState.stacks_file, "on SIGQUIT"),
) -> Iterator[None]:
    """Give our signals to handler(signum), SIGQUIT to on_quit(signum), for the length of the block.

    Outside the main thread do nothing.

    It is called on a thread: Python's own handlers run between two steps of the main thread, which may wait in C for
    minutes, e.g. for the other processes. The number of a signal is written to a socket at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, kernels = socket.socketpair()
    kernels.setblocking(False)
    listener = threading.Thread(target=_listen, args=(ours, handler, on_quit), name="signals", daemon=True)
    listener.start()
    before = {signum: signal.signal(signum, _pass_by) for signum in STATUS_OF if not _is_nohup(signum)}
    fd_before = signal.set_wakeup_fd(kernels.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd_before)
        for signum, handler_before in before.items():  # the error is printed after this, by Python itself
            signal.signal(signum, signal.SIG_IGN if SignalState.is_ending else handler_before)
        kernels.shutdown(socket.SHUT_RDWR)
        kernels.close()
        listener.join()


def _pass_by(signum: int, frame: object) -> None:
    """Do nothing: the listener has the number."""


def _is_nohup(signum: int) -> bool:
    """Tell whether this is SIGHUP and `nohup` has started the process, so that it is to be ignored."""
    return signum == getattr(signal, "SIGHUP", None) and signal.getsignal(signum) is signal.SIG_IGN


def _listen(connection: socket.socket, handler: Callable[[int], None], on_quit: Callable[[int], None]) -> None:
    with connection:
        while numbers := connection.recv(64):
            for signum in numbers:
                if signum in STATUS_OF:
                    handler(signum)
                elif signum == getattr(signal, "SIGQUIT", None):
                    on_quit(signum)


def print_stacks_on_quit() -> None:
    """Have SIGQUIT print the stacks of all threads and, in a block of `handled_by`, write them to their file.

    They are printed by a handler in C: it runs even while the interpreter lock is held.
    """
    if hasattr(signal, "SIGQUIT") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGQUIT, _pass_by)
        faulthandler.register(signal.SIGQUIT, file=2, all_threads=True, chain=True)


def write_stacks(path: Path | None, title: str) -> None:
    """Write the stacks of all threads of this process to a file, if there is one."""
    with contextlib.suppress(OSError):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"{socket.gethostname()}, pid {os.getpid()}, {title}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)


class SignalState:
    """Remembers the first signal, and ends the process at the second; an echo of the first does not count."""

    # Whether a process like this one had something to save, once.
    has_begun = False
    # Whether this process has an error to print and ends by itself; a launcher may signal it for the others' end.
    is_ending = False
    # The file that gets this process's stacks.
    stacks_file: Path | None = None

    def __init__(self):
        SignalState.has_begun = True
        self.first: int | None = None
        self._received_at = 0.0

    def receive(self, signum: int) -> None:
        """Handle a signal."""
        now = time.monotonic()
        if self.first is None:
            self.first, self._received_at = signum, now
        elif now - self._received_at > ECHO_S:
            exit_now(signum)


def die_with_parent(signum: int) -> None:
    """Have the kernel send this process a signal when the one that started it ends, however it does (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum))


def ignore_signals() -> None:
    """Ignore what a run handles, in a process that its parent ends."""
    signal.set_wakeup_fd(-1)  # the fork has inherited the socket of its parent
    for signum in (*STATUS_OF, getattr(signal, "SIGQUIT", signal.SIGINT)):
        signal.signal(signum, signal.SIG_IGN)


def _pass_over_lost_reader(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught error of a worker, but not that the process that reads its batches has ended."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)


def set_up_worker_signals(worker_id: int, parent: int) -> None:
    """Let a loader worker outlive every signal to the run, which needs it to reach its stop, but not its own process.

    Slurm signals every process of a step, the terminal every process in the foreground.

    Args:
        worker_id: the worker's number, which does not matter.
        parent: the process id of the process that loads.
    """
    ignore_signals()
    sys.excepthook = _pass_over_lost_reader
    if hasattr(signal, "SIGKILL"):
        die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
