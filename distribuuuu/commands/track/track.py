"""The command track: send the rows and results of a run that its trackers have not received."""

import os
import shlex
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from distribuuuu.commands.flag_hints import CommandParser
from distribuuuu.config import ConfigError, Problem, load_cfg
from distribuuuu.config.config_node import iter_options
from distribuuuu.config.registry import TRACKERS
from distribuuuu.config.run_files import TRACKERS_FOLDER
from distribuuuu.engine.feature_preflight import find_missing_trackers
from distribuuuu.files.atomic_file import make_folder, open_for_writing
from distribuuuu.files.locks import is_at, lock_file
from distribuuuu.inference.locate_run import locate_run
from distribuuuu.launch.signals import ignore_signals
from distribuuuu.records.trackers.base import RunInfo, describe_error

_DESCRIPTION = """Send the rows of metrics.jsonl and the results of a run that its trackers have
not received, e.g. because a server was down. LOG.TRACKERS adds trackers that
the training did not have. A training starts it with --follow.

  %(prog)s exp/r50
  %(prog)s exp/r50 LOG.TRACKERS mlflow
"""
# With --follow: seconds between two requests with rows, after a failure, and for what is left after the end.
SEND_EVERY_S, RETRY_S, END_S = 5.0, 30.0, 60.0


def track(prog: str, args: list[str]) -> int:
    """Read the command line, and send what is missing."""
    flags = build_parser(prog).parse_args(args)
    own = locate_run(flags.run).config
    cfg = load_cfg(own, flags.overrides)
    if other := {*flags.overrides[::2]} - {"LOG.TRACKERS", "PLUGINS"}:
        raise ConfigError([Problem(key, "is sent as the run had it; fix: remove it") for key in sorted(other)])
    names = [name for name in cfg.LOG.TRACKERS if name != "tensorboard"]  # the run has written its events
    if not names:
        fix = f"fix: {prog} {flags.run} LOG.TRACKERS NAME"
        raise ConfigError(f"LOG.TRACKERS: got {list(cfg.LOG.TRACKERS)}; expected some of {TRACKERS.names()}; {fix}")
    if missing := [": ".join(problem) for problem in find_missing_trackers(cfg)]:
        raise ConfigError(missing)
    ended, failures, out_dir = threading.Event(), list[str](), Path(own).parent

    def report(problem: str) -> None:
        fix = f"fix: see docs/trackers.md, then run distribuuuu track {shlex.quote(str(out_dir))}"
        failures.append(f"LOG.TRACKERS: {name}: {problem}; OUT_DIR keeps what is missing; {fix}")
        if flags.follow and len(failures) == 1:
            print(f"{time.strftime('%H:%M:%S')} WARNING: {failures[0]}", file=sys.stderr, flush=True)

    def wait_for_end() -> None:
        sys.stdin.buffer.read(1)
        ended.set()
        time.sleep(END_S)
        report(f"not everything was sent within {END_S:.0f} s after the end")
        os._exit(1)

    if flags.follow:
        ignore_signals()  # they are meant for the training, whose end is read from standard input
        threading.Thread(target=wait_for_end, daemon=True).start()
    else:
        ended.set()
    for name in names:
        print(f"{name}: connecting", flush=True)  # which may take a while, if its address is dead
        try:
            send(RunInfo(out_dir, dict(iter_options(cfg))), name, ended, report)
        except OSError as error:  # of the lock
            report(str(error))
    if failures and not flags.follow:
        raise ConfigError(failures)
    return 0


def send(run: RunInfo, name: str, ended: threading.Event, report: Callable[[str], None]) -> None:
    """Send what a tracker lacks until the training has ended; report each failure.

    The tracker is made under the lock of the processes that send to it: it reads what the process before it has sent.
    """
    with open_for_writing(make_folder(run.out_dir, TRACKERS_FOLDER) / f".{name}.lock", "ab") as lock:
        if not lock_file(lock.fileno(), 0 if ended.is_set() else 2 * END_S):
            raise BlockingIOError("another process sends this run; wait until it has ended")
        tracker, is_last = TRACKERS.get(name)(run), False
        while not is_last and is_at(lock, Path(lock.name)):  # else the run was archived, and another one begins
            is_last, pause_s = ended.is_set(), SEND_EVERY_S
            try:
                tracker.send_missing(with_files=is_last)
                if is_last:
                    print(f"{name}: rows sent: {tracker.num_sent:,}", flush=True)
            except Exception as error:  # of any service
                report(describe_error(error))
                pause_s = RETRY_S
            ended.wait(pause_s)


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the arguments."""
    text = "KEY VALUE: LOG.TRACKERS NAMES, or PLUGINS FILE, code that they need"
    parser = CommandParser(prog, description=_DESCRIPTION, usage="%(prog)s RUN [KEY VALUE ...]", epilog=text)
    parser.add_argument("run", metavar="RUN", help="the OUT_DIR of a run")
    parser.add_argument("--follow", action="store_true", help="send what a training writes until standard input ends")
    return parser
