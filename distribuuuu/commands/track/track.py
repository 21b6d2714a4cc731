"""The command track: send the rows, images and results of a run that its trackers have not received."""

from pathlib import Path

from distribuuuu.commands.arguments import run_guarded
from distribuuuu.commands.flag_hints import CommandParser, parse_flags
from distribuuuu.config import ConfigError, get_cfg, load_cfg
from distribuuuu.config.config_node import iter_options
from distribuuuu.config.errors import counted
from distribuuuu.config.plugins import FoundConfig
from distribuuuu.config.registry import TRACKERS
from distribuuuu.engine.preflight import find_missing_trackers
from distribuuuu.records.metric_writers import TrackedRun

SUMMARY = "send a run to experiment trackers: MLflow, W&B, Trackio"
SYNONYMS = ("sync", "log", "upload")
_DESCRIPTION = """Send the rows of metrics.jsonl, the images and the results of a run that its
trackers have not received, e.g. because a server was down. LOG.TRACKERS adds trackers that the training did not have.

  %(prog)s exp/r50
  %(prog)s exp/r50 LOG.TRACKERS mlflow
"""


def track(prog: str, args: list[str]) -> int:
    """Read the command line, and send what is missing."""
    return run_guarded(lambda: _run(prog, args))


def _run(prog: str, args: list[str]) -> int:
    flags, rest, problems = parse_flags(build_parser(prog), args)
    if problems:
        raise ConfigError(problems)
    folder = Path(flags.run)
    if not (own := folder / get_cfg().CFG_DEST).is_file():
        raise ConfigError(f"RUN: {folder} holds no {own.name}; expected the OUT_DIR of a run")
    cfg = load_cfg(FoundConfig(own), [*flags.overrides, *rest])
    names = [name for name in cfg.LOG.TRACKERS if name != "tensorboard"]  # the run has written its events
    if not names:
        known = ", ".join(name for name in TRACKERS.names() if name != "tensorboard")
        fix = f"fix: {prog} {flags.run} LOG.TRACKERS NAME"
        raise ConfigError(f"LOG.TRACKERS: got {list(cfg.LOG.TRACKERS)}; expected some of {known}; {fix}")
    if missing := [": ".join(problem) for problem in find_missing_trackers(cfg)]:
        raise ConfigError(missing)
    from distribuuuu.engine.run_lock import lock_out_dir

    failures = []
    with lock_out_dir(folder) as find_loss:
        for name in names:
            tracker = TRACKERS.get(name)(TrackedRun(folder, dict(iter_options(cfg)), 0, find_loss))
            print(f"{name}: connecting", flush=True)  # which may take a while, if its address is dead
            try:
                tracker.send_missing()
            except Exception as error:  # of any service: the others are still sent
                problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                failures.append(f"LOG.TRACKERS: {name}: {problem}; fix: see docs/trackers.md, and run this again")
            print(f"{name}: sent {', '.join(counted(number, noun) for noun, number in tracker.sent.items())}")
    if failures:
        raise ConfigError(failures)
    return 0


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser(prog, description=_DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="the OUT_DIR of a run")
    text = "options to change, e.g. LOG.TRACKERS mlflow"
    parser.add_argument("overrides", metavar="KEY VALUE", nargs="*", default=[], help=text)
    return parser
