"""The command sweep: search options by many runs, which can be stopped and resumed at any moment."""

import argparse
import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import yaml

from distribuuuu.commands.flag_hints import CommandParser, at_least, parse_flags
from distribuuuu.commands.output import print_report
from distribuuuu.commands.sweep.plan import Plan, open_sweep, read_trials
from distribuuuu.commands.sweep.search_space import is_list, list_ends, parse_space
from distribuuuu.config import Config, ConfigError, Problem, get_cfg, load_cfg
from distribuuuu.config.json_file import replace_nonfinite
from distribuuuu.config.run_files import find_path_problem, local_folder
from distribuuuu.engine.preflight import find_run_problems
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.untrusted import InvalidFileError
from distribuuuu.launch.detect import detect_launch

if TYPE_CHECKING:
    from distribuuuu.commands.sweep.results import Row

_DESCRIPTION = """Search options by many runs with Optuna: all combinations of lists, or
--trials N. Each run is an ordinary one in its own folder below OUT_DIR. Rerun
the same command to resume a sweep, or start it on more machines to help.

  %(prog)s --cfg shapes/resnet14 OPTIM.BASE_LR=0.02,0.05 OUT_DIR r
  %(prog)s --cfg shapes/resnet14 OPTIM.BASE_LR=log:0.01:0.3 \\
      OPTIM.WEIGHT_DECAY=log:1e-5:1e-3 --trials 20 --asha 3 --seeds 3 \\
      --jobs 2 OUT_DIR exp/search
"""


def sweep(prog: str, args: list[str]) -> int:
    """Run a sweep, print its table, and write its results and the best config; return the exit status."""
    flags, fixed, space, first = parse_args(prog, args)
    from distribuuuu.commands.html.page import write_page
    from distribuuuu.commands.sweep.results import BEST_FILE, build_sweep_page, format_rows
    from distribuuuu.commands.sweep.study import Study

    plan, page = Plan(flags, fixed, space, first), "sweep.html"
    os.environ.pop("SLURM_STEP_ID", None)  # the runs are no tasks of the step
    try:
        plan.out_dir.mkdir(parents=True, exist_ok=True)
        open_sweep(plan)
        study = Study(plan)
        study.run()
        rows = study.rows()
        write_outcome(plan, rows)
        write_page(plan.out_dir / page, build_sweep_page(plan, rows, study.importance()))
    except InvalidFileError as error:
        raise ConfigError(f"OUT_DIR: {error}; fix: set another OUT_DIR") from error
    except OSError as error:
        what = f"{error.filename} cannot be written" if error.filename else f"a run in {plan.out_dir} cannot be started"
        raise ConfigError(f"OUT_DIR: {what}: {error.strerror or error}") from error
    best = f"best config: {plan.out_dir / BEST_FILE}; " if any(row.seeds for row in rows) else ""
    print_report("\n".join([*format_rows(plan, rows), f"{best}page: {plan.out_dir / page}"]))
    if num := sum(row.status == "running" for row in rows):
        print(f"{num} of the trials run in other processes, the last of which completes the results")
    return int(all(row.status == "failed" for row in rows))


def parse_args(prog: str, args: Sequence[str]) -> tuple[argparse.Namespace, list[str], dict[str, Any], Config]:
    """Return the flags, the KEY VALUE arguments, the distributions of the swept options, and a config of a trial.

    Raises:
        ConfigError: with every problem of the flags, the options, the paths and the data folders.
    """
    flags, words, problems = parse_flags(build_parser(prog), args)
    if not importlib.util.find_spec("optuna"):
        raise ConfigError("sweep: optuna is not installed; fix: pip install 'distribuuuu[sweep]'")
    if flags.slurm or flags.sbatch:
        fix = "fix: start this command as the tasks of a job array, see tools/slurm/sweep.sbatch"
        raise ConfigError(Problem("--slurm" if flags.slurm else "--sbatch", f"is gone: jobs join a sweep; {fix}"))
    fixed, space, found = parse_space(words)
    problems += found
    if flags.trials is None and (ranges := [key for key, values in space.items() if not is_list(values)]):
        problems.append(Problem("--trials", f"is missing; {ranges[0]} is a range; fix: add --trials 20"))
    if flags.asha and flags.hyperband:
        problems.append(Problem("--hyperband", "got it with --asha; fix: remove one of them"))
    if "OUT_DIR" not in fixed[::2]:
        problems.append(Problem("OUT_DIR", "is missing; fix: add OUT_DIR exp/my_sweep"))
    out_dir = dict(zip(fixed[::2], fixed[1::2], strict=False)).get("OUT_DIR", "")
    if local_folder(out_dir) != out_dir:  # a run may be at a URL, a sweep may not
        problems.append(Problem("OUT_DIR", find_path_problem(out_dir) or ""))
    pruner = "--asha" if flags.asha else "--hyperband" if flags.hyperband else ""
    for key in {"OPTIM.MAX_EPOCH", "TRAIN.EVAL_PERIOD"} & set(space) if pruner else ():
        problems.append(Problem(key, f"cannot be swept with {pruner}, which compares equal epochs"))
    cfgs, found = read_trials(flags.cfg, fixed, list_ends(space))
    problems, first = [*problems, *found], cfgs[0]
    if min(cfg.OPTIM.MAX_EPOCH for cfg in cfgs) < 1:
        problems.append(Problem("OPTIM.MAX_EPOCH", "got 0; expected 1 or more: a trial without epochs has no result"))
    problems += find_run_problems(first, train=True, nproc=flags.nproc, set_keys_only=bool(problems))
    if (launch := detect_launch()).world_size > 1:
        problems.append(Problem("launcher", f"got {launch}; expected one process; fix: start the sweep without it"))
    if not first.TRAIN.AUTO_RESUME:
        problems.append(Problem("TRAIN.AUTO_RESUME", "got False; expected True: a sweep resumes its runs"))
    if first.TRAIN.PATIENCE:
        message = f"got {first.TRAIN.PATIENCE}; expected 0: the trials need the same epochs"
        problems.append(Problem("TRAIN.PATIENCE", f"{message}; fix: set it to 0; --asha 3 stops trials early"))
    if problems:
        raise ConfigError(problems)
    return flags, fixed, space, first


def build_parser(prog: str) -> CommandParser:
    """Return the parser of the flags; the remaining arguments are KEY VALUE and KEY=VALUES."""
    usage = "%(prog)s [FLAG ...] KEY=VALUES ... [KEY VALUE ...] OUT_DIR DIR"
    parser = CommandParser(prog, joined=False, description=_DESCRIPTION, usage=usage,
                           epilog="KEY=VALUES: a,b,c or a range log:LOW:HIGH, lin:LOW:HIGH, int:LOW:HIGH")  # fmt: skip
    add = parser.add_argument
    add("--cfg", metavar="FILE", help="YAML file of the options other than the defaults; several are merged")
    add("--trials", metavar="N", type=at_least(1), help="number of trials (all combinations of lists)")
    add("--sampler", choices=("tpe", "sobol", "random"), default="tpe", help="how --trials are chosen (tpe)")
    add("--asha", metavar="ETA", type=at_least(2), help="successive halving: one of ETA trials continues after a rung")
    add("--hyperband", metavar="ETA", type=at_least(2), help="successive halving with several first rungs")
    add("--seeds", metavar="N", type=at_least(1), default=1, help="repeat the best three with N - 1 other seeds (1)")
    add("--jobs", metavar="N", type=at_least(1), default=1, help="runs at a time, which share this machine (1)")
    for flag in ("--slurm", "--sbatch"):  # of older versions
        add(flag, help=argparse.SUPPRESS)
    add("--nproc", metavar="N", type=at_least(1), default=1, help="processes, and GPUs, of each run (1)")
    return parser


def write_outcome(plan: Plan, rows: Sequence["Row"]) -> None:
    """Write the table of a finished sweep, and the config of its best run."""
    from distribuuuu.commands.sweep.results import BEST_FILE

    record = {"schema": 2, "metric": plan.metric, "higher_is_better": plan.higher_is_better, "rungs": plan.rungs,
              "seeds": [*plan.seeds], "rows": replace_nonfinite([asdict(row) for row in rows])}  # fmt: skip
    with replacing(plan.out_dir / "sweep_results.json", "w", encoding="utf-8") as file:
        file.write(json.dumps(record, indent=2) + "\n")
    if not (best := rows[0]).seeds:
        return
    words = [word for pair in best.values_of.items() for word in pair]
    cfg = load_cfg(plan.flags.cfg, [*plan.options, *words])
    header = f"# Trial {best.trial} of a sweep: {plan.metric} {best.objective:.3f} on its evaluation images.\n"
    changes = {**find_changes(cfg, get_cfg()), "OUT_DIR": str(plan.out_dir / "best")}
    with replacing(plan.out_dir / BEST_FILE, "w", encoding="utf-8") as file:
        file.write(header + yaml.safe_dump(changes, sort_keys=False))


def find_changes(node: Any, default: Any) -> dict:
    """Return the options of a config that differ from the defaults, as nested dicts; without OUT_DIR."""
    changes = {}
    for key, value in node.items():
        if isinstance(value, Config):
            value = find_changes(value, default.get(key, {}))
        if key != "OUT_DIR" and value != default.get(key) and value != {}:
            changes[key] = list(value) if isinstance(value, tuple) else value
    return changes
