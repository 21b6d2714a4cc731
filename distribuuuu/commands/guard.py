"""The guard around every command: standard streams, signals, errors without a traceback, exit statuses."""

import contextlib
import io
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.files.untrusted import printable
from distribuuuu.launch import signals
from distribuuuu.launch.detect import was_launched
from distribuuuu.launch.signals import RunStopped, SignalState, end_process, exit_now, handled_by, is_first_process

# Seconds in which a launcher ends a process whose error the first process has reported too.
SAME_ERROR_S = 2.0


class _TolerantStream(io.TextIOWrapper):
    """Standard error that drops what cannot be written, e.g. because its reader has exited."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def tolerate_closed_stderr() -> None:
    """Ignore write errors on standard error, e.g. of a terminal that was closed."""
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        raw, encoding = io.BufferedWriter(io.FileIO(2, "w", closefd=False)), getattr(sys.stderr, "encoding", "utf-8")
        sys.stderr = _TolerantStream(raw, encoding=encoding, errors="backslashreplace", line_buffering=True)


def run_guarded(run: Callable[[], int]) -> int:
    """Call a function that returns an exit status; handle signals, and print the errors that the user can fix.

    The exit status is that of the function, of a ConfigError (2 by default), or of a signal, see signals.py.
    """
    tolerate_closed_stderr()
    signals.print_stack_on_quit()
    # On the CPU the loader workers and the model's threads share the cores. A thread that spins while it waits for one
    # that has no core makes a step twenty times slower. OpenMP reads this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # torch prints a stack trace in C++ for each request to a store whose host has ended.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if was_launched():  # a killed launcher leaves no process behind
        from distribuuuu.launch.processes import die_with_parent, has_lost_launcher

        die_with_parent(signal.SIGTERM)
        if has_lost_launcher():  # before the line above
            return signals.STATUS_OF[signal.SIGTERM]
    with handled_by(exit_now):
        try:
            return run()
        except ConfigError as error:
            report(error)
            if SignalState.current.is_ending:  # an error of this process alone, which cannot leave the process group
                end_process(error.status)
            return error.status
        except RunStopped as stopped:
            return stopped.status
        except Exception:  # of any kind: it is raised again, unless a signal is ending the process
            if not SignalState.current.is_ending:
                raise
            sys.excepthook(*sys.exc_info())
            end_process(1)
            raise


def report(error: ConfigError) -> None:
    """Print every problem of an error to standard error; if all processes have it, only the first prints."""
    where = ""
    if not is_first_process() and not error.one_process:
        if error.on_all_processes or os.environ.get("SLURM_LOCALID", "0") != "0":
            return
        time.sleep(SAME_ERROR_S)
        where = f"process {os.environ.get('RANK', os.environ.get('SLURM_PROCID'))} on {socket.gethostname()}: "
    lines = [f"{where}{counted(len(error.problems), 'problem')} to solve first:"]
    # A file name in a problem starts no line of its own.
    lines += [f"  - {printable(problem, keep=chr(10))}".replace("\n", "\n    ") for problem in error.problems]
    with contextlib.suppress(OSError):  # keeps the exit status even if standard error is a file on a full disk
        print("\n".join(lines), file=sys.stderr, flush=True)
