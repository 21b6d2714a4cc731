"""The command track: send the rows, images and results of a run that its trackers have not received."""

from pathlib import Path

from distribuuuu.commands.arguments import run_guarded
from distribuuuu.commands.flag_hints import CommandParser, parse_flags
from distribuuuu.commands.output import find_unread_url
from distribuuuu.config import ConfigError, Problem, get_cfg, load_cfg
from distribuuuu.config.config_node import iter_options
from distribuuuu.config.errors import counted
from distribuuuu.config.plugins import FoundConfig
from distribuuuu.config.registry import TRACKERS
from distribuuuu.config.run_files import METRICS
from distribuuuu.engine.preflight import find_missing_trackers
from distribuuuu.files.untrusted import open_regular, printable
from distribuuuu.records.metric_writers import TrackedRun, parse_record

SUMMARY = "send a run to experiment trackers: MLflow, W&B, Trackio"
SYNONYMS = ("sync", "log", "upload")
_DESCRIPTION = """Send the rows of metrics.jsonl, the images and the results of a run that its
trackers have not received, e.g. because a server was down. LOG.TRACKERS adds trackers that the training did not have.

  %(prog)s exp/r50
  %(prog)s exp/r50 LOG.TRACKERS mlflow
"""
# The options that may be set; the others are those of the run, which the trackers receive.
_OWN_OPTIONS = ("LOG.TRACKERS", "PLUGINS")


def track(prog: str, args: list[str]) -> int:
    """Read the command line, and send what is missing."""
    return run_guarded(lambda: _run(prog, args))


def _run(prog: str, args: list[str]) -> int:
    flags, rest, problems = parse_flags(build_parser(prog), args, lambda words: words.split()[0] not in _OWN_OPTIONS)
    if problems:
        raise ConfigError(problems)
    if problem := find_unread_url(flags.run):
        raise ConfigError(Problem("RUN", problem))
    if not (folder := Path(flags.run)).is_dir():
        raise ConfigError(f"RUN: no such folder: {folder}; expected the OUT_DIR of a run")
    if not (own := folder / get_cfg().CFG_DEST).is_file():
        raise ConfigError(f"RUN: {folder} holds no {own.name}; expected the OUT_DIR of a run")
    words = [*flags.overrides, *rest]
    cfg = load_cfg(FoundConfig(own), words)
    if keys := [key for key in words[::2] if key not in _OWN_OPTIONS]:
        message = f"is sent as the run had it; expected {' or '.join(_OWN_OPTIONS)}; fix: remove it"
        raise ConfigError([Problem(key, message) for key in keys], cfg.origins)
    names = [name for name in cfg.LOG.TRACKERS if name != "tensorboard"]  # the run has written its events
    if not names:
        known = ", ".join(name for name in TRACKERS.names() if name != "tensorboard")
        fix = f"fix: {prog} {flags.run} LOG.TRACKERS NAME"
        raise ConfigError(f"LOG.TRACKERS: got {list(cfg.LOG.TRACKERS)}; expected some of {known}; {fix}")
    if missing := [": ".join(problem) for problem in find_missing_trackers(cfg)]:
        raise ConfigError(missing)
    from distribuuuu.engine.run_lock import lock_out_dir

    failures, metrics = [], folder / METRICS
    has_rows = metrics.is_file()
    with lock_out_dir(folder) as find_loss:
        for name in names:
            tracker = TRACKERS.get(name)(TrackedRun(folder, dict(iter_options(cfg)), 0, find_loss))
            print(f"{name}: connecting", flush=True)  # which may take a while, if its address is dead
            try:
                tracker.send_missing()
            except Exception as error:  # of any service: the others are still sent
                problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                failures.append(f"LOG.TRACKERS: {name}: {problem}; fix: see docs/trackers.md, and run this again")
            kinds = {noun: number for noun, number in tracker.sent.items() if has_rows or noun != "row"}
            print(f"{name}: sent {', '.join(counted(number, noun) for noun, number in kinds.items())}")
    if note := _describe_rows(metrics):
        print(printable(note))
    if failures:
        raise ConfigError(failures)
    return 0


def _describe_rows(path: Path) -> str:
    """Return a line about a metrics.jsonl that is missing, or has damaged lines, which are not sent; else nothing."""
    if not path.is_file():
        return f"{path}: no such file; there are no rows to send"
    with open_regular(path) as file:
        num_damaged = sum(not line.endswith(b"\n") or parse_record(line) is None for line in file)
    return f"{path}: {counted(num_damaged, 'damaged line')} skipped" if num_damaged else ""


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser(prog, description=_DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="the OUT_DIR of a run")
    text = "LOG.TRACKERS NAMES: the trackers; PLUGINS FILE: code that they need; no other options"
    parser.add_argument("overrides", metavar="KEY VALUE", nargs="*", default=[], help=text)
    return parser
