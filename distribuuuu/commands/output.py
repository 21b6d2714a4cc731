"""Output of the optional commands: the path of a file that they write, tables, and texts on standard output."""

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.run_files import BEST_NAMES, RUN_FILES, find_path_problem
from distribuuuu.files.untrusted import printable
from distribuuuu.launch.detect import detect_launch
from distribuuuu.launch.signals import STATUS_OF

# Values of --format, and the columns of a text.
FORMATS = ("text", "json")
WIDTH = 80
# Exit status of a command if images are broken.
BROKEN_IMAGES = 3


def check_out(flag: str, out: str | os.PathLike) -> None:
    """Raise ConfigError if a command's output, the value of `flag`, is no local path, or is a file of a run."""
    problem = find_path_problem(out)
    name = Path(out).name
    is_of_run = name in (*RUN_FILES, "config.yaml") or BEST_NAMES.fullmatch(name)
    if problem is None and is_of_run and os.path.lexists(out):
        problem = f"got {out}, which is a file of a run; fix: choose another name"
    if problem:
        raise ConfigError(f"{flag}: {problem}")


def check_out_file(out: Path) -> None:
    """Check, as `check_out`, the file that --out names; its folder must exist."""
    check_out("--out", out)
    if not out.parent.is_dir():
        raise ConfigError(f"--out: no such folder: {out.parent}; fix: create it, or name another file")
    if out.exists() and not out.is_file():  # a device would be replaced by a file
        raise ConfigError(f"--out: {out} is no file; fix: name another one")


def check_one_process(fix: str) -> None:
    """Raise ConfigError if a launcher has started several processes of a command that is one."""
    if (launch := detect_launch()).world_size > 1:
        raise ConfigError(Problem("launcher", f"got {launch}; expected one process; fix: {fix}"))


def align_columns(lines: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return the lines of a table with two spaces between its columns, without trailing spaces.

    Args:
        lines: the cells of each line; those after the last column are appended as they are.
        sides: '<' (left) or '>' (right) for each column.
    """
    formats = [f"{side}{max(len(line[column]) for line in lines)}" for column, side in enumerate(sides)]
    table = ([*map(format, line, formats), *line[len(sides) :]] for line in lines)
    return ["  ".join(cells).rstrip() for cells in table]


@contextlib.contextmanager
def ending_with_reader() -> Iterator[None]:
    """End the process without an error if the reader of what the block prints, e.g. `head`, has gone.

    The block only prints: any connection that its other side closes would end the process too. ConfigError: standard
    output cannot be written, e.g. because a disk is full.
    """
    if threading.current_thread() is not threading.main_thread():  # of a program, which has signals of its own
        yield
        return
    previous = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the rest of the buffer, which is written at exit
        message = f"cannot be written: {error.strerror}; fix: redirect it to another file"
        raise ConfigError(Problem("standard output", message)) from error
    finally:
        signal.signal(signal.SIGPIPE, previous)


def print_report(text: str) -> None:
    """Print a text, with escapes for what the encoding of standard output lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    with ending_with_reader():
        print(printable(text, keep="\n"), flush=True)


def stop_with(left: str) -> Callable[[int], None]:
    """Return a handler of signals that says what is left, and ends this process at once; its workers end with it."""

    def stop(signum: int) -> None:
        with contextlib.suppress(OSError):  # the reader of standard error has exited
            os.write(2, f"\n{signal.Signals(signum).name}: stopped; {left}\n".encode())
        os._exit(STATUS_OF[signum])

    return stop
