"""The command sweep: search options by many runs, which can be stopped and resumed at any moment."""

import argparse
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from distribuuuu.commands.flag_hints import CommandParser, at_least, parse_flags
from distribuuuu.commands.output import print_report
from distribuuuu.commands.sweep.plan import Plan, is_list, list_ends, open_sweep, parse_space, read_trials
from distribuuuu.config import Config, ConfigError, Problem
from distribuuuu.config.run_files import find_path_problem, local_folder
from distribuuuu.engine.preflight import find_run_problems
from distribuuuu.files.untrusted import InvalidFileError
from distribuuuu.launch.detect import detect_launch

_DESCRIPTION = """Search options by many runs with Optuna: all combinations of lists, or
--trials N. Each run is an ordinary one in its own folder below OUT_DIR. Rerun
the same command to resume a sweep, or start it again, beside it or on other
machines, to help.

  %(prog)s --cfg shapes/resnet14 OPTIM.BASE_LR=0.02,0.05 OUT_DIR r
  %(prog)s --cfg shapes/resnet14 OPTIM.BASE_LR=log:0.01:0.3 \\
      OPTIM.WEIGHT_DECAY=log:1e-5:1e-3 --trials 20 --asha 3 --seeds 3 \\
      OUT_DIR exp/search
"""


def sweep(prog: str, args: list[str]) -> int:
    """Run a sweep, print its table, and write its results and the best config; return the exit status."""
    plan = Plan(*parse_args(prog, args))
    from distribuuuu.commands.sweep.results import format_rows, write_results
    from distribuuuu.commands.sweep.study import Study

    os.environ.pop("SLURM_STEP_ID", None)  # the runs are no tasks of the step
    try:
        plan.out_dir.mkdir(parents=True, exist_ok=True)
        open_sweep(plan)
        study = Study(plan)
        study.run()
        rows = study.rows()
        written = write_results(plan, rows, study.importance())
    except (InvalidFileError, OSError) as error:
        raise ConfigError(f"OUT_DIR: {error}; fix: set another OUT_DIR") from error
    print_report("\n".join([*format_rows(plan, rows), f"written: {', '.join(map(str, written))}"]))
    if num := sum(row.status == "running" for row in rows):
        print(f"{num} of the trials run in other processes, the last of which completes the results")
    return int(all(row.status == "failed" for row in rows))


def parse_args(prog: str, args: Sequence[str]) -> tuple[argparse.Namespace, list[str], dict[str, Any], Config]:
    """Return the flags, the KEY VALUE arguments, the distributions of the swept options, and a config of a trial.

    Raises:
        ConfigError: with every problem of the flags, the options, the paths and the data folders.
    """
    if not importlib.util.find_spec("optuna"):
        raise ConfigError("sweep: optuna is not installed; fix: pip install 'distribuuuu[sweep]'")
    flags, words, problems = parse_flags(build_parser(prog), args)
    fixed, space, found = parse_space(words)
    problems += found
    if flags.trials is None and (ranges := [key for key, values in space.items() if not is_list(values)]):
        problems.append(Problem("--trials", f"is missing; {ranges[0]} is a range; fix: add --trials 20"))
    out_dir = dict(zip(fixed[::2], fixed[1::2], strict=False)).get("OUT_DIR", "")
    if not out_dir:
        problems.append(Problem("OUT_DIR", "is missing; fix: add OUT_DIR exp/my_sweep"))
    elif local_folder(out_dir) != out_dir:  # a run may be at a URL, a sweep may not
        problems.append(Problem("OUT_DIR", find_path_problem(out_dir) or ""))
    for key in ("OPTIM.MAX_EPOCH", "TRAIN.EVAL_PERIOD"):
        if key in space and (flags.asha or flags.hyperband):
            problems.append(Problem(key, "cannot be swept with --asha and --hyperband, which compare equal epochs"))
    cfgs, found = read_trials(flags.cfg, fixed, list_ends(space))
    problems, first = [*problems, *found], cfgs[0]
    problems += find_run_problems(first, train=True, nproc=flags.nproc, set_keys_only=bool(problems))
    if (launch := detect_launch()).world_size > 1:
        problems.append(Problem("launcher", f"got {launch}; expected one process; fix: start the sweep without it"))
    for key, value, expected in (("TRAIN.AUTO_RESUME", first.TRAIN.AUTO_RESUME, True),
                                 ("TRAIN.PATIENCE", first.TRAIN.PATIENCE, 0)):  # fmt: skip
        if value != expected:
            message = f"got {value}; expected {expected}: a sweep resumes its runs, and compares equal epochs"
            problems.append(Problem(key, f"{message}; fix: set it to {expected}"))
    if problems:
        raise ConfigError(problems)
    return flags, fixed, space, first


def build_parser(prog: str) -> CommandParser:
    """Return the parser of the flags; the remaining arguments are KEY VALUE and KEY=VALUES."""
    usage = "%(prog)s [FLAG ...] KEY=VALUES ... [KEY VALUE ...] OUT_DIR DIR"
    parser = CommandParser(prog, joined=False, description=_DESCRIPTION, usage=usage,
                           epilog="KEY=VALUES: a,b,c or a range log:LOW:HIGH, lin:LOW:HIGH, int:LOW:HIGH")  # fmt: skip
    add, pruner = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("--cfg", metavar="FILE", help="YAML file of the options other than the defaults; several are merged")
    add("--trials", metavar="N", type=at_least(1), help="number of trials (all combinations of lists)")
    add("--sampler", choices=("tpe", "sobol", "random"), default="tpe", help="how --trials are chosen (tpe)")
    halving = "successive halving: one of ETA trials continues after a rung"
    pruner("--asha", metavar="ETA", type=at_least(2), help=halving)
    pruner("--hyperband", metavar="ETA", type=at_least(2), help="successive halving with several first rungs")
    add("--seeds", metavar="N", type=at_least(1), default=1, help="repeat the best three with N - 1 other seeds (1)")
    add("--nproc", metavar="N", type=at_least(1), default=1, help="processes, and GPUs, of each run (1)")
    return parser
