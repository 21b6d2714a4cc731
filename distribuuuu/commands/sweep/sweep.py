"""The command sweep: search options by many runs, which can be stopped and resumed at any moment."""

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from distribuuuu.commands.flag_hints import CommandParser, at_least, parse_flags
from distribuuuu.commands.output import print_report
from distribuuuu.commands.sweep.search_space import Dimension, list_trials, parse_space
from distribuuuu.config import Config, ConfigError, Problem, get_cfg
from distribuuuu.config.json_file import replace_nonfinite
from distribuuuu.config.locate import find_config
from distribuuuu.config.reader import BASE, CfgFiles, list_files, load_cfg, read_cfg
from distribuuuu.config.run_files import find_path_problem, local_folder
from distribuuuu.engine.preflight import find_run_problems, resolve_num_classes
from distribuuuu.files.atomic_file import replacing
from distribuuuu.launch.detect import detect_launch

if TYPE_CHECKING:
    from distribuuuu.commands.sweep.trials import Sweep, TrialRow

_DESCRIPTION = """Search options by many runs: all combinations of lists, or --trials N
points of ranges. Each run is an ordinary one in its own folder below OUT_DIR.
Rerun the same command to resume a sweep after a stop.

  %(prog)s --cfg shapes/resnet14 OPTIM.BASE_LR=0.02,0.05 OUT_DIR r
  %(prog)s --cfg shapes/resnet14 OPTIM.BASE_LR=log:0.01:0.3 \\
      OPTIM.WEIGHT_DECAY=log:1e-5:1e-3 --trials 20 --asha 3 --seeds 3 \\
      --jobs 2 OUT_DIR exp/search
"""


# Jobs on a cluster at a time without --jobs, and seconds for an answer of Slurm.
_MAX_SRUNS, _SLURM_S = 100, 120


def sweep(prog: str, args: list[str]) -> int:
    """Run a sweep, print its table, and write its results and the best config; return the exit status."""
    flags, fixed, space, first = parse_args(prog, args)
    options = check_slurm(flags) if flags.slurm else []
    from distribuuuu.commands.html.page import write_page
    from distribuuuu.commands.sweep.asha import run_sweep
    from distribuuuu.commands.sweep.executors import LocalExecutor, SlurmExecutor
    from distribuuuu.commands.sweep.page import PAGE_FILE, build_sweep_page
    from distribuuuu.commands.sweep.trials import BEST_FILE, FAILED, build_rows, format_rows, open_sweep
    from distribuuuu.engine.run_lock import lock_out_dir

    plan = plan_sweep(flags, fixed, space, first)
    try:
        plan.out_dir.mkdir(parents=True, exist_ok=True)
        with lock_out_dir(plan.out_dir):
            plan = open_sweep(plan, read_files(flags.cfg)[1])
            executor = LocalExecutor(flags.jobs or 1, flags.nproc)
            if flags.slurm:
                executor = SlurmExecutor(flags.jobs or _MAX_SRUNS, plan.out_dir, options)
            states = run_sweep(plan, executor)
            rows = build_rows(plan, states)
            write_outcome(plan, rows)
            write_page(plan.out_dir / PAGE_FILE, build_sweep_page(plan, states))
    except OSError as error:
        what = f"{error.filename} cannot be written" if error.filename else f"a run in {plan.out_dir} cannot be started"
        raise ConfigError(f"OUT_DIR: {what}: {error.strerror or error}") from error
    is_any_done = any(row.objective is not None for row in rows)
    best = f"best config: {plan.out_dir / BEST_FILE}; " if is_any_done else ""
    print_report("\n".join([*format_rows(plan, rows), f"{best}page: {plan.out_dir / PAGE_FILE}"]))
    return int(all(row.status == FAILED for row in rows))


# ------------------------------------------------------------------------------------ command line


def parse_args(prog: str, args: Sequence[str]) -> tuple[argparse.Namespace, list[str], dict[str, Dimension], Config]:
    """Return the flags, the KEY VALUE arguments, the dimensions of the KEY=VALUES arguments, and a config of a trial.

    Raises:
        ConfigError: with every problem of the flags, the options, the paths and the data folders.
    """
    flags, words, problems = parse_flags(build_parser(prog), args)
    fixed, space, found = parse_space(words)
    problems += found
    ranges = [key for key, dimension in space.items() if dimension.kind != "list"]
    if ranges and flags.trials is None:
        problems.append(Problem("--trials", f"is missing; {ranges[0]} is a range; fix: add --trials 20"))
    if "OUT_DIR" not in fixed[::2]:
        problems.append(Problem("OUT_DIR", "is missing; fix: add OUT_DIR exp/my_sweep"))
    out_dir = dict(zip(fixed[::2], fixed[1::2], strict=False)).get("OUT_DIR", "")
    if local_folder(out_dir) != out_dir:  # a run may be at a URL, a sweep may not
        problems.append(Problem("OUT_DIR", find_path_problem(out_dir) or ""))
    for key in {"OPTIM.MAX_EPOCH", "TRAIN.EVAL_PERIOD"} & set(space) if flags.asha else ():
        problems.append(Problem(key, "cannot be swept with --asha, which compares equal epochs"))
    ends = [{key: dim.at(end) for key, dim in space.items()} for end in (0.0, 1 - 1e-9)]
    (first, last), found = read_trials(flags.cfg, fixed, ends)
    problems += found
    if min(first.OPTIM.MAX_EPOCH, last.OPTIM.MAX_EPOCH) < 1:
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
    add("--trials", metavar="N", type=at_least(1), help="points of a Sobol sequence (all combinations of lists)")
    add("--asha", metavar="ETA", type=at_least(2), help="successive halving: one of ETA trials continues after a rung")
    add("--seeds", metavar="N", type=at_least(1), default=1, help="repeat the best three with N - 1 other seeds (1)")
    add("--jobs", metavar="N", type=at_least(1), help="runs at a time, which share the machine (1; with --slurm: 100)")
    add("--slurm", metavar="PARTITION", help="run on a Slurm cluster")
    add("--sbatch", metavar="OPTIONS", action="append", default=[], help="options of its jobs, e.g. --sbatch="
        '"--gres=gpu:1 --time=4:00:00"')  # fmt: skip
    add("--nproc", metavar="N", type=at_least(1), default=1, help="processes, and GPUs, of each run (1)")
    return parser


def check_slurm(flags: argparse.Namespace) -> list[str]:
    """Return the options of srun of the flags --slurm, --sbatch and --nproc; nothing is started.

    Raises:
        ConfigError: Slurm is not installed or does not answer, or refuses the partition or the options.
    """
    partition, texts = flags.slurm, flags.sbatch
    if not shutil.which("srun"):
        fix = "fix: run the sweep on a login node of the cluster"
        raise ConfigError(Problem("--slurm", f"got {partition}; srun is not installed here; {fix}"))
    for name in [name for name in os.environ if name.startswith("SLURM_") and name != "SLURM_CONF"]:
        del os.environ[name]  # the sweep itself may be a job
    try:
        options = [word for text in texts for word in shlex.split(text)]
        options = ["--signal=USR1@120", f"--ntasks={flags.nproc}", *options, f"--partition={partition}"]
        subprocess.run(["srun", "--test-only", *options, "true"], check=True, capture_output=True, text=True,
                       stdin=subprocess.DEVNULL, timeout=_SLURM_S)  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(Problem("--slurm", f"got {partition}; no answer in {_SLURM_S} s")) from None
    except subprocess.CalledProcessError as error:
        answer = error.stderr.strip().partition("\n")[0]
        raise ConfigError(Problem("--slurm", f"got {partition} with --sbatch {shlex.join(texts)}; {answer}")) from error
    except ValueError as error:
        raise ConfigError(Problem("--sbatch", f"got {texts[-1]}; {error}")) from error
    return options


# -------------------------------------------------------------------------------------------- plan


def plan_sweep(flags: argparse.Namespace, fixed: list[str], space: dict[str, Dimension], first: Config) -> "Sweep":
    """Return the description of a sweep; its arguments are the result of `parse_args`.

    Raises:
        ConfigError: with every problem of the configs of the trials; names are checked before the first start only.
    """
    seed = first.RNG_SEED or 0
    try:
        values = list_trials(space, flags.trials, seed)
    except ValueError as error:
        raise ConfigError(Problem("--trials", str(error))) from error
    cfgs, problems = read_trials(flags.cfg, fixed, values)
    if problems:
        raise ConfigError(problems)
    from distribuuuu.commands.sweep.asha import plan_rungs
    from distribuuuu.commands.sweep.trials import SWEEP_FILE, Sweep, Trial

    overrides = dict(zip(fixed[::2], fixed[1::2], strict=True))
    out_dir = Path(overrides.pop("OUT_DIR"))
    if not (out_dir / SWEEP_FILE).exists():
        check_names(cfgs)

    rungs = plan_rungs(first.OPTIM.MAX_EPOCH, flags.asha or 0, len(values), first.TRAIN.EVAL_PERIOD)
    if flags.asha and not rungs:
        got = f"got {flags.asha} for {len(values)} trials of {first.OPTIM.MAX_EPOCH} epochs"
        expected = f"at least {flags.asha} of both, and a TRAIN.EVAL_PERIOD below the epochs"
        raise ConfigError(Problem("--asha", f"{got}; expected {expected}"))
    path, content = read_files(flags.cfg)
    if first.PLUGINS:  # the runs read a copy of the file, in another folder
        overrides["PLUGINS"] = str(list(first.PLUGINS))
    inputs = {
        "config": f"config/{path.absolute().parent.name}/{path.name}" if path else "",
        "config_sha256": hashlib.sha256(content).hexdigest() if path else "",
        "overrides": overrides,
        "space": {key: dimension.text for key, dimension in space.items()},
        **{name: getattr(flags, name) for name in ("trials", "seeds", "asha", "nproc")},
    }
    trials = [
        Trial(number, *pair) for number, pair in enumerate(zip(values, (c.OPTIM.MAX_EPOCH for c in cfgs), strict=True))
    ]
    seeds = tuple(range(seed, seed + flags.seeds))
    return Sweep(out_dir, inputs, tuple(trials), seeds, rungs, *find_objective(resolve_num_classes(cfgs[0])))


def read_files(cfg_file: CfgFiles) -> tuple[Path | None, bytes]:
    """Return the path, None without --cfg, and the content of the file that the runs read; files are merged to one."""
    paths = [Path(find_config(file)) for file in list_files(cfg_file)]
    if not paths:
        return None, b""
    content = paths[0].read_bytes()
    if len(paths) > 1 or BASE.encode() in content:
        content = yaml.safe_dump(find_changes(read_cfg(cfg_file)[0], get_cfg()), sort_keys=False).encode()
    return paths[0].with_name("+".join(path.stem for path in paths) + paths[0].suffix), content


def read_trials(
    cfg_file: CfgFiles, fixed: list[str], trials: Sequence[dict[str, str]]
) -> tuple[list[Config], list[Problem]]:
    """Return the config of each trial, and each problem once."""
    pairs = [[word for pair in values.items() for word in pair] for values in trials]
    cfgs, problems = zip(*(read_cfg(cfg_file, [*words, *fixed]) for words in pairs), strict=True)
    return list(cfgs), list({str(problem): problem for found in problems for problem in found}.values())


def check_names(cfgs: Sequence[Config]) -> None:
    """Check the models and optimizers that trials name, and the names of their arguments.

    Raises:
        ConfigError: with each problem once.
    """
    from distribuuuu.models.find_architecture import build_model_spec
    from distribuuuu.optim.named_optimizers import check_arguments, find_optimizer

    named = {(cfg.MODEL.ARCH, *cfg.MODEL.KWARGS, cfg.OPTIM.NAME, *cfg.OPTIM.KWARGS): cfg for cfg in cfgs}
    problems = dict[str, Problem]()
    for cfg in map(resolve_num_classes, named.values()):
        for check in (build_model_spec, lambda cfg: check_arguments(cfg, find_optimizer(cfg))):
            try:
                with contextlib.suppress(AssertionError, ImportError):  # a GPU or package that the nodes may have
                    check(cfg)
            except ConfigError as error:
                problems |= {str(one): one for one in (problem.located(cfg.origins) for problem in error.problems)}
    if problems:
        raise ConfigError(list(problems.values()))


def find_objective(cfg: Config) -> tuple[str, bool]:
    """Return the display name of the metric that selects the best epoch of a run, and whether higher is better."""
    from distribuuuu.config.registry import METRICS, task_class

    names = cfg.TEST.METRICS or task_class(cfg).default_metrics
    if not names:
        return "loss", False
    metric = METRICS.get(names[0])(cfg.MODEL.NUM_CLASSES, cfg.TRAIN.TOPK)
    return metric.label(names[0]), metric.higher_is_better


# ----------------------------------------------------------------------------------------- outcome


def write_outcome(plan: "Sweep", rows: Sequence["TrialRow"]) -> None:
    """Write the table of a finished sweep and its best config."""
    from distribuuuu.commands.sweep.trials import BEST_FILE, RESULTS_FILE

    table = [{**asdict(row), "values_of": plan.trials[row.trial].values} for row in rows]
    record = {"schema": 1, "metric": plan.metric, "higher_is_better": plan.higher_is_better,
              "rungs": plan.rungs, "seeds": plan.seeds, "rows": replace_nonfinite(table)}  # fmt: skip
    with replacing(plan.out_dir / RESULTS_FILE, "w", encoding="utf-8") as file:
        file.write(json.dumps(record, indent=2) + "\n")
    best = rows[0]
    if best.objective is None:
        return
    words = [word for pair in {**plan.inputs["overrides"], **plan.trials[best.trial].values}.items() for word in pair]
    cfg = load_cfg(str(plan.out_dir / plan.inputs["config"]) if plan.inputs["config"] else None, words)
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
