"""The command sweep: its arguments, and the plan of its trials, which is checked before the first one is started."""

import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distribuuuu.commands.flag_hints import CommandParser, at_least, parse_flags
from distribuuuu.commands.output import align_columns, print_report
from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.json_file import load_json
from distribuuuu.config.options import OPTIONS
from distribuuuu.config.reader import list_files, read_cfg
from distribuuuu.config.registry import METRICS, task_class
from distribuuuu.config.run_files import CHECKPOINTS, find_path_problem, local_folder
from distribuuuu.engine.preflight import find_run_problems, resolve_num_classes
from distribuuuu.files.atomic_file import replacing
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
SWEEP_FILE = "sweep.json"
_EXPECTED = "expected values a,b,c or a range log:LOW:HIGH or lin:LOW:HIGH"
_KEY = re.compile(r"[a-zA-Z]\w*(\.[^=]+)?")
_RANGE = re.compile(r"(log|lin):([^:]*):([^:]*)")
_TOP_LEVEL_COMMA = re.compile(r",(?![^\[({]*[\])}])")


def sweep(prog: str, args: list[str]) -> int:
    """Run a sweep, print its table, and write its results and the best config; return the exit status."""
    plan = Plan(prog, args)
    from distribuuuu.commands.sweep.study import Study, list_cells, write_results

    os.environ.pop("SLURM_STEP_ID", None)  # the runs are no tasks of the step
    try:
        open_sweep(plan)
        study = Study(plan)
        study.run()
        rows = study.rows()
        written = write_results(plan, rows, study.importance())
    except (InvalidFileError, OSError) as error:
        raise ConfigError(f"OUT_DIR: {error}; fix: set another OUT_DIR") from error
    cells = list_cells(plan, rows)
    print_report("\n".join([*align_columns(cells, ">" * len(cells[0])), f"written: {', '.join(map(str, written))}"]))
    return int(all(row.status == "failed" for row in rows))


def build_parser(prog: str) -> CommandParser:
    """Return the parser of the flags; the remaining arguments are KEY VALUE and KEY=VALUES."""
    usage = "%(prog)s [FLAG ...] KEY=VALUES ... [KEY VALUE ...] OUT_DIR DIR"
    parser = CommandParser(prog, joined=False, description=_DESCRIPTION, usage=usage,
                           epilog="KEY=VALUES: a,b,c or a range log:LOW:HIGH, lin:LOW:HIGH")  # fmt: skip
    add = parser.add_argument
    add("--cfg", metavar="FILE", help="YAML file of the options other than the defaults; several are merged")
    add("--trials", metavar="N", type=at_least(1), help="number of trials (all combinations of lists)")
    add("--sampler", choices=("tpe", "sobol", "random"), default="tpe", help="how --trials are chosen (tpe)")
    add("--asha", metavar="ETA", type=at_least(2), help="successive halving: one of ETA trials continues at a rung")
    add("--seeds", metavar="N", type=at_least(1), default=1, help="repeat the best three with N - 1 other seeds (1)")
    add("--nproc", metavar="N", type=at_least(1), default=1, help="processes, and GPUs, of each run (1)")
    return parser


class Plan:
    """The plan of a sweep, from the arguments of the command.

    Raises:
        ConfigError: with every problem of the flags, the options, the paths, the data folders and the known trials.
    """

    def __init__(self, prog: str, args: Sequence[str]):
        if not importlib.util.find_spec("optuna"):
            raise ConfigError("sweep: optuna is not installed; fix: pip install 'distribuuuu[sweep]'")
        flags, words, problems = parse_flags(build_parser(prog), args)
        fixed, self.space, found = parse_space(words)
        problems += found
        ranges = [key for key, values in self.space.items() if not is_list(values)]
        if ranges and not flags.trials:
            problems.append(Problem("--trials", f"is missing; {ranges[0]} is a range; fix: add --trials 20"))
        options = dict(zip(fixed[::2], fixed[1::2], strict=False))
        out_dir = options.pop("OUT_DIR", "")
        if not out_dir:
            problems.append(Problem("OUT_DIR", "is missing; fix: add OUT_DIR exp/my_sweep"))
        elif local_folder(out_dir) != out_dir:  # a run may be at a URL, a sweep may not
            problems.append(Problem("OUT_DIR", find_path_problem(out_dir) or ""))
        for key in ("OPTIM.MAX_EPOCH", "TRAIN.EVAL_PERIOD"):
            if key in self.space and flags.asha:
                problems.append(Problem(key, "cannot be swept with --asha, which compares equal epochs"))
        lists = [] if flags.trials or ranges else [values.choices for values in self.space.values()]
        # The values of all trials; none: Optuna samples them.
        self.grid = [dict(zip(self.space, values, strict=True)) for values in itertools.product(*lists) if values]
        known = [[*to_words(values), *fixed] for values in self.grid or list_ends(self.space)]
        cfgs, found_of_each = zip(*(read_cfg(flags.cfg, words) for words in known), strict=True)
        problems += {str(problem): problem for found in found_of_each for problem in found}.values()
        problems += find_run_problems(cfgs[0], train=True, nproc=flags.nproc, set_keys_only=bool(problems))
        if (launch := detect_launch()).world_size > 1:
            problems.append(Problem("launcher", f"got {launch}; expected one process; fix: start the sweep without it"))
        if problems:
            raise ConfigError(problems)
        pairs = zip(fixed[::2], fixed[1::2], strict=False)  # in their order: `{}` empties a section
        self.options = [word for pair in pairs if pair[0] != "OUT_DIR" for word in pair]
        self.flags, self.out_dir, first = flags, Path(out_dir), cfgs[0]
        self.num_trials, self.epochs, seed = flags.trials or len(self.grid), first.OPTIM.MAX_EPOCH, first.RNG_SEED or 0
        self.seeds = range(seed, seed + flags.seeds)  # of the runs of a trial; the first one is that of the search
        # Epochs after which a trial may be paused.
        self.rungs = plan_rungs(self.epochs, flags.asha or 0, self.num_trials, first.TRAIN.EVAL_PERIOD)
        if flags.asha and not self.rungs:
            expected = "expected at most the trials and the epochs, and a TRAIN.EVAL_PERIOD below"
            raise ConfigError(Problem("--asha", f"got {flags.asha}; {expected}"))
        # The objective: the first metric of the evaluation, which also selects the best epoch of a run.
        name = [*(first.TEST.METRICS or task_class(first).default_metrics), "loss"][0]
        metric = METRICS.get(name)(resolve_num_classes(first).MODEL.NUM_CLASSES, first.TRAIN.TOPK)
        self.metric, self.higher_is_better = metric.label(name), metric.higher_is_better

    def folder(self, number: int, seed: int) -> Path:
        """Return OUT_DIR of a run."""
        return self.out_dir / f"trial_{number:03d}" / f"seed_{seed}"

    def last_epoch(self, values: Mapping[str, str]) -> int:
        """Return OPTIM.MAX_EPOCH of a trial."""
        return int(values.get("OPTIM.MAX_EPOCH", self.epochs))

    def command(self, folder: Path, seed: int, values: Mapping[str, str], epoch: int) -> list[str]:
        """Return the arguments of `distribuuuu` that continue a run up to an epoch."""
        files = list_files(self.flags.cfg)
        flags = [*(["--cfg", *files] if files else []), "--nproc", self.flags.nproc, "--stop-epoch", epoch]
        own = ["TRAIN.AUTO_RESUME", True, "RNG_SEED", seed, "OUT_DIR", folder]
        return ["train", *map(str, [*flags, *self.options, *to_words(values), *own])]


def parse_space(words: Sequence[str]) -> tuple[list[str], dict[str, Any], list[Problem]]:
    """Return the KEY VALUE arguments, the distributions of the KEY=VALUES arguments, and the problems of both."""
    fixed, swept, problems, rest = list[str](), list[str](), list[Problem](), list(words)
    space: dict[str, Any] = {}
    while rest:
        word = rest.pop(0)
        key, sign, text = word.partition("=")
        if not sign or not _KEY.fullmatch(key):
            fixed += [word, *rest[:1]]
            del rest[:1]
            continue
        swept.append(key)
        try:
            if key in OPTIONS and OPTIONS[key].not_swept:
                raise ValueError(f"it cannot be swept: {OPTIONS[key].not_swept}")
            space[key] = parse_values(text)
            if not is_list(space[key]) and key in OPTIONS and OPTIONS[key].kind is int:
                del space[key]
                raise ValueError("whole numbers have no range; expected a list a,b,c")
        except ValueError as error:
            problems.append(Problem(key, f"got {text!r}; {error}"))
    twice = [key for key in space if [*swept, *fixed[::2]].count(key) > 1]
    problems += [Problem(key, "is given twice; fix: remove one of them") for key in twice]
    if not swept:
        problems.append(Problem("command line", f"no option is swept; {_EXPECTED}, e.g. OPTIM.BASE_LR=0.1,0.2"))
    return fixed, space, problems


def parse_values(text: str) -> Any:
    """Return the distribution of a text, categorical for a list; raise ValueError with what is expected."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if match := _RANGE.fullmatch(text):
        low, high = float(match[2]), float(match[3])
        if not -math.inf < low < high < math.inf:
            raise ValueError("expected LOW < HIGH")
        return FloatDistribution(low, high, log=match[1] == "log")
    values = tuple(value.strip() for value in _TOP_LEVEL_COMMA.split(text))
    if "" in values or len({*values}) < max(2, len(values)):
        raise ValueError(f"{_EXPECTED}; to fix a value, write KEY VALUE")
    return CategoricalDistribution(values)


def is_list(distribution: Any) -> bool:
    """Tell whether a distribution is that of a list."""
    return hasattr(distribution, "choices")


def to_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return values as the texts that a run gets: numbers of ranges with four significant digits."""
    return {key: f"{value:.4g}" if isinstance(value, float) else str(value) for key, value in values.items()}


def list_ends(space: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return trials that have each value of a list, and both ends of a range, at least once."""
    ends = [value.choices if is_list(value) else (value.low, value.high) for value in space.values()]
    trials = range(max(map(len, ends), default=1))
    return [to_texts({key: end[trial % len(end)] for key, end in zip(space, ends, strict=True)}) for trial in trials]


def to_words(options: Mapping[str, str]) -> list[str]:
    """Return options as KEY VALUE arguments."""
    return [word for pair in options.items() for word in pair]


def plan_rungs(epochs: int, eta: int, num_trials: int, period: int = 1) -> tuple[int, ...]:
    """Return the epochs of the rungs: r, r eta, r eta^2, ..., as many as leave a trial for the last epoch.

    The first one is a multiple of `period`, after which a run is evaluated.
    """
    powers = [eta**k for k in range(1, 64) if eta**k <= min(epochs, num_trials)] if eta else []
    first = math.ceil(epochs / powers[-1] / period) * period if powers else epochs
    return tuple(first * power for power in [1, *powers] if first * power < epochs)


def open_sweep(plan: Plan) -> None:
    """Write the description of a sweep to OUT_DIR, which is created, at its first start.

    Raises:
        ConfigError: OUT_DIR holds a run or another sweep, or the description there is damaged.
    """
    path, fix = plan.out_dir / SWEEP_FILE, "fix: set another OUT_DIR"
    config = read_cfg(plan.flags.cfg, plan.options)[0].dump()
    flags = {name: getattr(plan.flags, name) for name in ("sampler", "asha", "seeds", "nproc")}
    record = {"schema": 3, **flags, "is_grid": bool(plan.grid), "metric": plan.metric,
              "space": {key: str(values) for key, values in plan.space.items()},
              "config_sha256": hashlib.sha256(config.encode()).hexdigest()}  # fmt: skip
    if (plan.out_dir / CHECKPOINTS).exists():
        raise ConfigError(f"OUT_DIR: {plan.out_dir} is the folder of a run; {fix}")
    plan.out_dir.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with replacing(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(record, indent=2) + "\n")
    if load_json(path) != record:
        message = f"{path} describes the sweep of other arguments, of another --cfg or of an older version"
        raise ConfigError(f"OUT_DIR: {message}; {fix}")
