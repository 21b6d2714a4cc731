"""The command track: send the rows, images and results of a run that its trackers have not received."""

import contextlib
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from distribuuuu.commands.flag_hints import CommandParser, parse_flags
from distribuuuu.config import ConfigError, get_cfg, load_cfg
from distribuuuu.config.config_node import iter_options
from distribuuuu.config.errors import counted
from distribuuuu.config.locate import FoundConfig
from distribuuuu.config.registry import TRACKERS
from distribuuuu.config.run_files import TRACKERS_FOLDER, local_run
from distribuuuu.engine.preflight import find_missing_trackers
from distribuuuu.files.atomic_file import make_folder, open_for_writing
from distribuuuu.files.locks import is_at, lock_file
from distribuuuu.launch.signals import ignore_signals
from distribuuuu.records.trackers.base import RunInfo, Tracker, describe_error

_DESCRIPTION = """Send the rows of metrics.jsonl, the images and the results of a run that its
trackers have not received, e.g. because a server was down. LOG.TRACKERS adds
trackers that the training did not have. A training starts it with --follow.

  %(prog)s exp/r50
  %(prog)s exp/r50 LOG.TRACKERS mlflow
"""
# With --follow: seconds between two requests with rows, after a failure, and for what is left after the end.
SEND_EVERY_S, RETRY_S, END_S = 5.0, 30.0, 60.0


def track(prog: str, args: list[str]) -> int:
    """Read the command line, and send what is missing."""
    flags, words, problems = parse_flags(build_parser(prog), args)
    if problems:
        raise ConfigError(problems)
    own = Path(local_run(flags.run)) / get_cfg().CFG_DEST
    if not own.is_file():
        raise ConfigError(f"RUN: no such file: {own}; expected the OUT_DIR of a run")
    cfg = load_cfg(FoundConfig(own), words)
    names = [name for name in cfg.LOG.TRACKERS if name != "tensorboard"]  # the run has written its events
    if not names:
        fix = f"fix: {prog} {flags.run} LOG.TRACKERS NAME"
        raise ConfigError(f"LOG.TRACKERS: got {list(cfg.LOG.TRACKERS)}; expected some of {TRACKERS.names()}; {fix}")
    if missing := [": ".join(problem) for problem in find_missing_trackers(cfg)]:
        raise ConfigError(missing)
    run = RunInfo(own.parent, dict(iter_options(cfg)))
    if flags.follow:
        return follow(run, names[0])
    failures = []
    for name in names:
        print(f"{name}: connecting", flush=True)  # which may take a while, if its address is dead
        try:
            with sending(run, name) as (tracker, _):
                tracker.send_missing()
            print(f"{name}: sent {', '.join(counted(number, noun) for noun, number in tracker.sent.items())}")
        except Exception as error:  # of any service: the others are still sent
            failures.append(f"LOG.TRACKERS: {name}: {describe_error(error)}; fix: see docs/trackers.md")
    if failures:
        raise ConfigError(failures)
    return 0


@contextlib.contextmanager
def sending(run: RunInfo, name: str, timeout_s: float = 0.0) -> Iterator[tuple[Tracker, IO]]:
    """Hold the lock of the processes that send a run to a tracker; yield the tracker and the file of the lock.

    The tracker is made under the lock: it reads what the process before it has sent.
    """
    with open_for_writing(make_folder(run.out_dir, TRACKERS_FOLDER) / f".{name}.lock", "ab") as lock:
        if not lock_file(lock.fileno(), timeout_s):
            raise BlockingIOError("another process sends this run; wait until it has ended")
        yield TRACKERS.get(name)(run), lock


def follow(run: RunInfo, name: str) -> int:
    """Send rows as a training writes them, until a byte or the end of standard input; then what is left.

    The first failure is one line on standard error; the next attempt follows after `RETRY_S` seconds.
    """
    ignore_signals()  # they are meant for the training, whose end is read from standard input
    ended, problems = threading.Event(), []

    def warn(problem: str) -> None:
        problems.append(problem)
        if len(problems) == 1:
            fix = f"after the run, distribuuuu track {shlex.quote(str(run.out_dir))}"
            text = f"LOG.TRACKERS: {name}: {problem}; the run is not affected, and OUT_DIR keeps what is missing"
            print(f"{time.strftime('%H:%M:%S')} WARNING: {text}; fix: {fix}", file=sys.stderr, flush=True)

    def wait_for_end() -> None:
        sys.stdin.buffer.read(1)
        ended.set()
        time.sleep(END_S)
        warn(f"not everything was sent within {END_S:.0f} s after the end")
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()
    with sending(run, name, timeout_s=2 * END_S) as (tracker, lock):
        is_last = False
        while not is_last and is_at(lock, Path(lock.name)):  # else the run was archived, and another one begins
            is_last, pause_s = ended.is_set(), SEND_EVERY_S
            try:
                tracker.send_missing(with_files=is_last)
            except Exception as error:  # of any service
                warn(describe_error(error))
                pause_s = RETRY_S
            if not is_last:
                ended.wait(pause_s)
    return 0


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the arguments."""
    text = "KEY VALUE: LOG.TRACKERS NAMES, or PLUGINS FILE, code that they need"
    parser = CommandParser(prog, description=_DESCRIPTION, usage="%(prog)s RUN [KEY VALUE ...]", epilog=text)
    parser.add_argument("run", metavar="RUN", help="the OUT_DIR of a run")
    parser.add_argument("--follow", action="store_true", help="send what a training writes until standard input ends")
    return parser
