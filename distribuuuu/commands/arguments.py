"""The command line of training and evaluation: --cfg FILE and KEY VALUE arguments."""

import argparse
import gc
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from distribuuuu.checkpoint.weights_files import best_path, find_best
from distribuuuu.commands.flag_hints import CommandParser, at_least, parse_flags
from distribuuuu.config import Config, ConfigError, Problem, get_cfg
from distribuuuu.config.config_node import changed
from distribuuuu.config.locate import FoundConfig
from distribuuuu.config.reader import COMMAND_LINE, CfgFiles, read_cfg
from distribuuuu.config.run_files import RESULTS, local_run
from distribuuuu.engine.preflight import find_run_problems, resolve_num_classes
from distribuuuu.launch.detect import detect_launch
from distribuuuu.launch.host import tune_malloc


def run_on_config(parser: CommandParser, args: Sequence[str], start: Callable[..., object], train: bool) -> int:
    """Read --cfg and KEY VALUE arguments, check the run, then call start(cfg, flags), as --nproc processes.

    Returns the exit status of these processes, or 0.
    """
    cfg, flags = parse_args(parser, args, train)
    if cfg is not None and flags.nproc > 1:
        from distribuuuu.launch.nproc import run_processes

        return run_processes(flags.nproc, [sys.executable, *sys.orig_argv[1:]])
    if cfg is not None:
        tune_malloc()
        gc.disable()  # in these imports, the search for garbage takes a quarter of the time and finds little
        import distribuuuu.trainer  # noqa: F401

        gc.freeze()
        gc.enable()
        start(cfg, flags)
    return 0


def parse_args(
    parser: CommandParser | None, args: Sequence[str], train: bool
) -> tuple[Config | None, argparse.Namespace]:
    """Return the checked config of a command line (None after printing only) and the flags of a parser.

    Its ConfigError has every problem of the flags, the options, the file, the paths and the data folders.
    """
    flags, overrides, problems = parse_flags(parser or build_parser("", train=train), args)
    if detect_launch().launcher == "--nproc":  # one of the processes that it has started, with the same command line
        flags.nproc = None
    if flags.nproc is not None:
        from distribuuuu.commands.output import check_one_process

        check_one_process("remove --nproc")
    prints = flags.dump_config or flags.help_config is not None
    run, overrides = ("", overrides) if train else expand_run(overrides)
    source: CfgFiles = flags.cfg
    if run and not source:
        source = FoundConfig(os.path.join(run, get_cfg().CFG_DEST))
        if not os.path.isfile(source):  # a folder for other programs
            from distribuuuu.inference.load_run import find_run

            source = find_run(run, None, overrides[4:]).cfg
    cfg, found = read_cfg(source, overrides)
    if isinstance(source, FoundConfig):  # what initialized the run; its best weights are to be evaluated
        initial = {"MODEL.WEIGHTS": None, "MODEL.PRETRAINED": False}
        cfg = changed(cfg, {key: initial[key] for key in initial if cfg.origins.get(key) != COMMAND_LINE})
    problems += found
    if not prints:
        problems += find_run_problems(cfg, train, flags.nproc, set_keys_only=bool(problems))
    if problems:
        error = ConfigError(problems)
        # Else they may be of this machine alone, which lacks the config file or data.
        error.on_all_processes = bool(found) and not any(str(problem.key).startswith("--cfg") for problem in found)
        raise error
    flags.nproc = flags.nproc or 1
    if not prints:
        return resolve_num_classes(cfg), flags
    from distribuuuu.commands.output import ending_with_reader
    from distribuuuu.config.explain import dump_with_origins, explain_options

    with ending_with_reader():
        print(dump_with_origins(cfg) if flags.dump_config else explain_options(flags.help_config, cfg), end="")
    return None, flags


def expand_run(words: list[str]) -> tuple[str, list[str]]:
    """Return the folder of the run that the first word of an evaluation names, or "", and KEY VALUE arguments.

    With an OUT_DIR of their own, the results are written there, unless that is another run's.
    """
    words = [local_run(words[i]) if i == 0 or words[i - 1] == "OUT_DIR" else words[i] for i in range(len(words))]
    is_key = words and re.fullmatch(r"[A-Z_]+(\.\w+)*", words[0])
    if not (words and os.path.exists(words[0])) and (is_key or len(words) % 2 == 0):
        return "", words
    from distribuuuu.inference.locate_run import locate_run

    files = locate_run(words[0])
    if files.is_published:
        return "", ["MODEL.ARCH", words[0], "MODEL.WEIGHTS", words[0], *words[1:]]
    folder, weights = str(files.folder if files.is_export else Path(files.config).parent), files.weights
    other = dict(zip(words[1::2], words[2::2], strict=False)).get("OUT_DIR")
    if other and not files.is_export:
        if Path(other, RESULTS).is_file() and not os.path.samefile(other, folder):
            raise ConfigError(Problem("OUT_DIR", f"{other} holds another run, whose files stay; expected a new folder"))
        weights = weights or find_best(folder) or best_path(folder)
    return folder, ["OUT_DIR", folder, *(("MODEL.WEIGHTS", str(weights)) if weights else ()), *words[1:]]


def build_parser(description: str, prog: str | None = None, train: bool = True) -> CommandParser:
    """Return the parser of the flags of a training or an evaluation; the remaining arguments are KEY VALUE pairs."""
    usage = f"%(prog)s {'' if train else '[RUN] '}[--cfg FILE] [--nproc N] [KEY VALUE ...]"
    epilog = "KEY VALUE arguments override the file, e.g. OPTIM.BASE_LR 0.4"
    parser = CommandParser(prog, description=description, usage=usage, epilog=epilog)
    add = parser.add_argument
    add("--cfg", metavar="FILE", help="YAML file of the options other than the defaults; several are merged")
    add("--help-config", metavar="SECTION", nargs="?", const="", help="explain the options (of a section) and exit")
    add("--dump-config", action="store_true", help="print the resolved config, with the origin of each value, and exit")
    add("--nproc", metavar="N", type=at_least(1), help="start N processes, like torchrun --nproc_per_node=N")
    add("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # added by older launchers
    return parser
