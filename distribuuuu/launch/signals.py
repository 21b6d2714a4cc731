"""Signal handling: graceful stop, immediate exit, stack dumps, and workers that ignore signals.

The exit status of a stopped run is 130 after SIGINT (Ctrl-C), 143 after SIGTERM (kill, scancel), 129 after SIGHUP (a
closed terminal) and 75 after SIGUSR1 (sbatch --signal), which asks for the same command to be started again. SIGQUIT
prints the stack of the main thread; the run continues.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from distribuuuu.files.atomic_file import make_folder, open_for_writing
from distribuuuu.files.locks import read_stat

# EX_TEMPFAIL of sysexits.h: a temporary failure, to be retried.
REQUEUE = 75
STATUS_OF: dict[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGUSR1: REQUEUE}

# Stands for a signal: CHECKPOINT.MAX_HOURS are over.
OUT_OF_TIME = 1000
# Launchers forward what the terminal or Slurm has sent to every process; within this time it is the same signal.
ECHO_S = 1.0
# Name of the thread that writes checkpoints, and the seconds it has when the process has to exit: enough for one or two
# GiB. A failed process takes about as long until it prints its error.
WRITER_NAME = "checkpoint writer"
SAVE_S = 8.0


class RunStopped(Exception):
    """A signal or OUT_OF_TIME asked the run to stop, and every process has agreed to; `status` is its exit status."""

    on_all_processes = True

    def __init__(self, asked_by: int):
        out_of_time = asked_by == OUT_OF_TIME
        self.status = REQUEUE if out_of_time else STATUS_OF[asked_by]
        super().__init__("CHECKPOINT.MAX_HOURS" if out_of_time else signal.Signals(asked_by).name)


def exit_now(signum: int) -> None:
    """Exit immediately with the status of the signal, unless it repeats the first one; process 0 prints one line."""
    if SignalState.current.is_ending or SignalState.current.record_echo():
        return
    if is_first_process():
        with contextlib.suppress(OSError):  # standard error may be closed
            os.write(2, f"{signal.Signals(signum).name}: ended at once; checkpoints stay\n".encode())
    os._exit(STATUS_OF[signum])


def end_process(status: int) -> None:
    """Exit without Python's clean-up, which may wait forever for other processes or idle threads.

    A checkpoint that is being written is still valid, so its thread has SAVE_S seconds.
    """
    for thread in threading.enumerate():
        if thread.name == WRITER_NAME:
            with contextlib.suppress(RuntimeError):  # it has not begun to write
                thread.join(SAVE_S)
    os._exit(status)


def is_first_process() -> bool:
    """Tell whether this is process 0, by the launcher's variables alone."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


@contextlib.contextmanager
def handled_by(handler: Callable[[int], None]) -> Iterator[None]:
    """Call handler(signum) for the signals of STATUS_OF within the block.

    The calls come from a thread: Python's own handlers run between two steps of the main thread, which may be in C code
    for minutes, e.g. in a collective. The number of a signal is written to a socket at once. Outside the main thread
    nothing is handled.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    listener = threading.Thread(target=_listen, args=(receiver, handler), name="signals", daemon=True)
    listener.start()
    before = {signum: signal.signal(signum, lambda *_: None) for signum, status in STATUS_OF.items()
              if status != 129 or signal.getsignal(signum) is not signal.SIG_IGN}  # fmt: skip  # nohup: ignored SIGHUP
    fd_before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd_before)
        for signum, handler_before in before.items():  # Python prints an error after this
            signal.signal(signum, signal.SIG_IGN if SignalState.current.is_ending else handler_before)
        sender.shutdown(socket.SHUT_RDWR)
        sender.close()
        listener.join()


def _listen(connection: socket.socket, handler: Callable[[int], None]) -> None:
    with connection:
        while numbers := connection.recv(64):
            for signum in numbers:
                if signum in STATUS_OF:
                    handler(signum)


def print_stack_on_quit() -> None:
    """Make SIGQUIT print the stack of the main thread, by a handler in C, even while the interpreter lock is held.

    Of other threads, which run meanwhile, it would read frames while they change, and could crash the process.
    """
    if threading.current_thread() is threading.main_thread():
        faulthandler.register(signal.SIGQUIT, file=2, all_threads=False)


def write_stacks(path: Path | None, title: str) -> None:
    """Write the stacks of all threads of this process to a file, if there is one."""
    with contextlib.suppress(OSError):
        if path:
            make_folder(path.parents[1], path.parent.name)
            with open_for_writing(path, "w", encoding="utf-8") as file:
                file.write(f"{socket.gethostname()}, pid {os.getpid()}, {title}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)


class SignalState:
    """The answers of this process to signals: a second one ends it, unless it is an echo of the first.

    Args:
        on_second_signal: called with the number of a second signal.

    Attributes:
        current: the state of this process.
        started: time.monotonic() when the first run of this process began to start; later runs begin with their set-up.
        first: the first signal since the start of the run.
        is_ending: whether this process has an error to print and exits by itself; the launcher's signals are ignored.
        stacks_file: the file for this process's stacks.
    """

    current: ClassVar["SignalState"]

    def __init__(self, on_second_signal: Callable[[int], None] = exit_now):
        self.started = time.monotonic()
        self.first: int | None = None
        self.is_ending = False
        self.stacks_file: Path | None = None
        self._on_second_signal, self._received_at, self._parent = on_second_signal, float("-inf"), 0

    def begin_run(self) -> "SignalState":
        """Forget the signals of an earlier run; return the state."""
        self.first, self._received_at = None, float("-inf")
        return self

    def receive(self, signum: int) -> None:
        """Handle a signal."""
        if self.first is None:
            self.first, self._received_at, self._parent = signum, time.monotonic(), os.getppid()
        elif not self.record_echo():
            self._on_second_signal(signum)

    def record_echo(self) -> bool:
        """Record the parent; return whether a signal repeats the first: each thread of a killed parent sends one."""
        elapsed_s, parent = time.monotonic() - self._received_at, os.getppid()
        is_new, self._parent = parent != self._parent, parent
        return elapsed_s <= ECHO_S or elapsed_s < 30.0 and (is_new or read_stat(parent, 0) == "Z")


SignalState.current = SignalState()


def ignore_signals() -> None:
    """Ignore the signals of `handled_by` in a process that its parent stops."""
    signal.set_wakeup_fd(-1)  # inherited from the parent
    for signum in (*STATUS_OF, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
