"""The command line that all tools share: --cfg FILE, KEY VALUE words, and errors without a traceback."""

import argparse
import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from distribuuuu.cli.flag_hints import split_flags
from distribuuuu.config import Config, ConfigError, defaults, get_cfg
from distribuuuu.config.config_files import find_run_config
from distribuuuu.config.errors import counted, did_you_mean
from distribuuuu.config.reader import COMMAND_LINE, origin_of, read_cfg
from distribuuuu.engine.preflight import find_run_problems, resolve_num_classes
from distribuuuu.launch.detect import detect_launch, has_lost_launcher, was_launched
from distribuuuu.launch.host import tune_malloc
from distribuuuu.launch.nproc import own_command, run_processes, without_nproc
from distribuuuu.launch.signals import (
    STATUS_OF,
    RunStopped,
    SignalState,
    die_with_parent,
    end_process,
    exit_now,
    handled_by,
    is_first_process,
    print_stacks_on_quit,
)

USAGE_ERROR = 2


def run_tool(description: str, start: Callable[[Config], object], train: bool) -> int:
    """Read the command line, check the run, then call start(cfg), with --nproc in many processes; return the status.

    0: done; 2: the config, the data or a checkpoint has to be changed first, and standard error says how; 130, 143, 129
    and 75: stopped by SIGINT, by SIGTERM, by SIGHUP, and to be started again (see signals.py).
    """
    open_standard_streams()
    print_stacks_on_quit()
    # On the CPU the loader's workers and the model's threads share the cores. A thread that spins while it waits for
    # one that is not running makes a step twenty times slower. OpenMP reads this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if was_launched():  # a launcher that is killed leaves no process behind
        die_with_parent(signal.SIGTERM)
        if has_lost_launcher():  # before the line above
            return STATUS_OF[signal.SIGTERM]
    with handled_by(exit_now):
        try:
            cfg, nproc = parse_args(description, sys.argv[1:], train)
            if nproc > 1:
                return run_processes(nproc, without_nproc(own_command()))
            if cfg is not None:
                tune_malloc()
                start(cfg)
        except ConfigError as error:
            report(error)
            return _end_with(error.status)
        except RunStopped as stopped:
            return stopped.status
        except Exception:
            if not SignalState.is_ending:
                raise
            sys.excepthook(*sys.exc_info())
            end_process(1)
    return 0


def tell(message: str) -> None:
    """Print a line to standard error, on the first process alone."""
    if is_first_process():
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr, flush=True)


def _end_with(status: int) -> int:
    """Return the status, or end with it at once where an error of this process alone has left the group as it was."""
    if SignalState.is_ending:
        end_process(status)
    return status


class _TolerantStream(io.TextIOWrapper):
    """Standard error that drops what cannot be written, e.g. when its reader has ended."""

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered, or drop it."""
        with contextlib.suppress(OSError):
            super().flush()


def open_standard_streams() -> None:
    """Open those of descriptors 0 to 2 that are closed, and keep standard error from ending the process.

    The next file to be opened would take the place of a closed one, and get what was meant for it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        raw, encoding = io.BufferedWriter(io.FileIO(2, "w", closefd=False)), getattr(sys.stderr, "encoding", "utf-8")
        sys.stderr = _TolerantStream(raw, encoding=encoding, errors="backslashreplace", line_buffering=True)


def report(error: ConfigError) -> None:
    """Print every problem of a ConfigError; the same problem on many processes is printed by the first."""
    if not is_first_process() and not error.one_process:
        return
    lines = [f"{counted(len(error.problems), 'problem')} to solve first:"]
    lines += [f"  - {problem}" for problem in error.problems]
    with contextlib.suppress(OSError):  # the status stays, even where standard error is a file on a full disk
        print("\n".join(lines), file=sys.stderr, flush=True)


def parse_args(description: str, words: list[str], train: bool) -> tuple[Config | None, int]:
    """Return the checked config of a command line, None when it only asked for something to be printed, and --nproc.

    Raises:
        ConfigError: with every problem of the words, the file, the paths and the data folders.
    """
    parser = build_parser(description)
    args, overrides = parser.parse_known_args(words)
    known = [option for action in parser._actions for option in action.option_strings]
    problems, overrides = split_flags(overrides, known)
    needs_none = args.cfg or train or args.help_config is not None
    run_config = None if needs_none else find_run_config(overrides)
    if run_config and args.nproc in (None, 1):  # else the processes that are started say so
        tell(f"--cfg is not given: reading {run_config}, the config of the run in OUT_DIR")
    cfg, found = read_cfg(args.cfg or run_config, overrides)
    if run_config and cfg.origins.get("MODEL.WEIGHTS") != COMMAND_LINE:
        cfg = _without_weights(cfg)
    problems += found
    problems += find_nproc_problems(args.nproc)
    printing = args.dump_config or args.help_config is not None
    if not printing:
        problems += find_run_problems(cfg, train, args.nproc, set_keys_only=bool(problems))
    if problems:
        raise ConfigError(problems)
    if not printing:
        return resolve_num_classes(cfg), args.nproc or 1
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends us in silence
    print(dump_with_origins(cfg) if args.dump_config else explain_options(args.help_config), end="")
    return None, 1


def _without_weights(cfg: Config) -> Config:
    """Return the config of a run without the weights that it started from: its best ones are to be evaluated."""
    changed = cfg.clone()
    changed.defrost()
    changed.MODEL.WEIGHTS = None
    changed.freeze()
    return changed


def find_nproc_problems(nproc: int | None) -> list[str]:
    """Return what is wrong with --nproc."""
    if nproc is None:
        return []
    if nproc < 1:
        return [f"--nproc {nproc}: start at least one process"]
    try:
        launch = detect_launch()
    except ConfigError as error:
        return error.problems
    if launch.world_size > 1:
        return [f"--nproc {nproc}: {launch} was started by a launcher already; leave out --nproc"]
    return []


def build_parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of the flags; what it leaves over are KEY VALUE words."""
    parser = argparse.ArgumentParser(
        description=description,
        allow_abbrev=False,
        usage="%(prog)s [--cfg FILE] [--nproc N] [KEY VALUE ...]",
        epilog="KEY VALUE words override the file, e.g. OPTIM.BASE_LR 0.4 TRAIN.BATCH_SIZE 64",
    )
    parser.add_argument("--cfg", metavar="FILE", help="YAML file of what differs from the defaults")
    parser.add_argument(
        "--help-config", metavar="SECTION", nargs="?", const="", help="explain the options (of a section) and exit"
    )
    parser.add_argument(
        "--dump-config", action="store_true", help="print the resolved config, with where each value was set, and exit"
    )
    parser.add_argument(
        "--nproc", metavar="N", type=int, help="run N processes on this machine, as torchrun --nproc_per_node=N would"
    )
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # the older launch adds it
    return parser


def explain_options(section: str) -> str:
    """Return the options of a section (all: '') with their defaults and meaning.

    Raises:
        ConfigError: there is no such section.
    """
    options = documented_options()
    chosen = [option for option in options if not section or f"{option[0]}.".startswith(f"{section}.")]
    if not chosen:
        sections = sorted({key.split(".")[0] for key, _, _ in options})
        hint = did_you_mean(section, sections)
        raise ConfigError(f"--help-config: no such section: {section}{hint}; there are {', '.join(sections)}")
    return "".join(f"{key}: {default}\n    {comment}\n" for key, default, comment in chosen)


def documented_options() -> list[tuple[str, str, str]]:
    """Return (key, default, comment) of every option, in the order of defaults.py."""
    options, comment = [], []
    for line in Path(defaults.__file__).read_text(encoding="utf-8").splitlines():
        match = re.match(r"_C\.([A-Z0-9_.]+) = (.*)", line)
        if line.startswith("# "):
            comment.append(line[2:])
        elif match and comment:
            default = "{}" if match[2].startswith("CfgNode") else match[2]
            options.append((match[1], default, " ".join(comment)))
            comment = []
        else:
            comment = []
    return options


def dump_with_origins(cfg: Config) -> str:
    """Return the tree as YAML, with a comment on each value that is not a default: where it was set."""
    lines, default = [], get_cfg()
    for line, key in _yaml_lines(cfg):
        origin = origin_of(cfg, default, key)
        lines.append(f"{line}  # {origin}\n" if origin else f"{line}\n")
    return "".join(lines)


def _yaml_lines(node: Config, prefix: str = "", indent: str = "") -> list[tuple[str, str]]:
    """Return (line, key) of each line of the tree as YAML; one value a line."""
    lines = []
    for name, value in node.items():
        if isinstance(value, Config) and value:
            lines.append((f"{indent}{_as_yaml(name)}:", f"{prefix}{name}"))
            lines += _yaml_lines(value, f"{prefix}{name}.", f"{indent}  ")
        else:
            plain = dict(value) if isinstance(value, Config) else value
            lines.append((f"{indent}{_as_yaml(name)}: {_as_yaml(plain)}", f"{prefix}{name}"))
    return lines


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
