"""The plan of a sweep: its search space, its trials and their checks before the first one is started."""

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distribuuuu.config import Config, ConfigError, Problem
from distribuuuu.config.json_file import load_json
from distribuuuu.config.options import OPTIONS
from distribuuuu.config.reader import CfgFiles, list_files, read_cfg
from distribuuuu.config.run_files import CHECKPOINTS
from distribuuuu.engine.preflight import resolve_num_classes
from distribuuuu.files.atomic_file import replacing

SWEEP_FILE, MAX_TRIALS = "sweep.json", 1000
_EXPECTED = "expected values a,b,c or a range log:LOW:HIGH, lin:LOW:HIGH or int:LOW:HIGH"
_KEY = re.compile(r"[a-zA-Z]\w*(\.[^=]+)?")
_RANGE = re.compile(r"(log|lin|int):([^:]*):([^:]*)")
_TOP_LEVEL_COMMA = re.compile(r",(?![^\[({]*[\])}])")


def parse_space(words: Sequence[str]) -> tuple[list[str], dict[str, Any], list[Problem]]:
    """Return the KEY VALUE arguments, the distributions of the KEY=VALUES arguments, and the problems of both."""
    fixed, problems, rest = list[str](), list[Problem](), list(words)
    space: dict[str, Any] = {}
    while rest:
        word = rest.pop(0)
        key, sign, text = word.partition("=")
        if not sign or not _KEY.fullmatch(key):
            fixed += [word, *rest[:1]]
            del rest[:1]
            continue
        if key in space:
            problems.append(Problem(key, "is swept twice; fix: remove one"))
        elif key in OPTIONS and OPTIONS[key].not_swept:
            problems.append(Problem(key, f"cannot be swept: {OPTIONS[key].not_swept}"))
        else:
            try:
                space[key] = parse_values(text)
            except ValueError as error:
                problems.append(Problem(key, f"got {text!r}; {error}"))
    problems += [Problem(key, "is both fixed and swept; fix: remove one") for key in space if key in fixed[::2]]
    if not space and not problems:
        problems.append(Problem("command line", f"no option is swept; {_EXPECTED}, e.g. OPTIM.BASE_LR=0.1,0.2"))
    return fixed, space, problems


def parse_values(text: str) -> Any:
    """Return the distribution of a text: categorical, with texts, for a list.

    Raises:
        ValueError: it is invalid; the message says what is expected.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if match := _RANGE.fullmatch(text):
        kind, *ends = match.groups()
        low, high = map(int if kind == "int" else float, ends)
        if not -math.inf < low < high < math.inf:
            raise ValueError("expected LOW < HIGH")
        return IntDistribution(low, high) if kind == "int" else FloatDistribution(low, high, log=kind == "log")
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


class Plan:
    """The plan of a sweep; its arguments are the result of `parse_args`.

    Raises:
        ConfigError: with every problem of the configs of the trials that are known; names are checked before the first
            start only.
    """

    def __init__(self, flags: argparse.Namespace, fixed: Sequence[str], space: dict[str, Any], first: Config):
        self.flags, self.space = flags, space
        options = dict(zip(fixed[::2], fixed[1::2], strict=True))
        self.out_dir = Path(options.pop("OUT_DIR"))
        self.options = to_words(options)
        lists = [values.choices for values in space.values() if is_list(values)]
        self.num_trials = flags.trials or math.prod(map(len, lists))
        if self.num_trials > MAX_TRIALS:
            got = f"got {self.num_trials:,} trials; expected at most {MAX_TRIALS:,}"
            raise ConfigError(Problem("--trials", f"{got}; fix: --trials {MAX_TRIALS}"))
        # The values of all trials; none: Optuna samples them.
        grid = [] if flags.trials else itertools.product(*lists)
        self.grid = [dict(zip(space, values, strict=True)) for values in grid]
        cfgs, problems = read_trials(flags.cfg, fixed, self.grid or list_ends(space))
        if problems or (not (self.out_dir / SWEEP_FILE).exists() and (problems := find_name_problems(cfgs))):
            raise ConfigError(problems)
        self.epochs, seed, eta = first.OPTIM.MAX_EPOCH, first.RNG_SEED or 0, flags.asha or flags.hyperband or 0
        self.seeds = range(seed, seed + flags.seeds)  # of the runs of a trial; the first one is that of the search
        # Epochs after which a trial may be paused.
        self.rungs = plan_rungs(self.epochs, eta, self.num_trials, first.TRAIN.EVAL_PERIOD)
        if eta and not self.rungs:
            got = f"got {eta} for {self.num_trials} trials of {self.epochs} epochs"
            expected = f"at least {eta} of both, and a TRAIN.EVAL_PERIOD below the epochs"
            raise ConfigError(Problem("--asha" if flags.asha else "--hyperband", f"{got}; expected {expected}"))
        # The objective: the display name of the first metric of the evaluation, e.g. "top1".
        self.metric, self.higher_is_better = find_objective(resolve_num_classes(cfgs[0]))

    def folder(self, number: int, seed: int) -> Path:
        """Return OUT_DIR of a run."""
        return self.out_dir / f"trial_{number:03d}" / f"seed_{seed}"

    def last_epoch(self, values: Mapping[str, str]) -> int:
        """Return OPTIM.MAX_EPOCH of a trial."""
        return int(values.get("OPTIM.MAX_EPOCH", self.epochs))

    def command(self, folder: Path, seed: int, values: Mapping[str, str], epoch: int) -> list[str]:
        """Return the arguments of `distribuuuu` that continue a run up to an epoch."""
        files, nproc = list_files(self.flags.cfg), self.flags.nproc
        flags: list[object] = ["--cfg", *files] if files else []
        flags += ["--nproc", nproc] if nproc > 1 else []
        flags += ["--stop-epoch", epoch] if epoch < self.last_epoch(values) else []
        words = [*flags, *self.options, *to_words(values), "RNG_SEED", seed, "OUT_DIR", folder]
        return ["train", *map(str, words)]


def plan_rungs(epochs: int, eta: int, num_trials: int, period: int = 1) -> tuple[int, ...]:
    """Return the epochs of the rungs: r, r eta, r eta^2, ..., as many as leave a trial for the last epoch.

    The first one is a multiple of `period`, after which a run is evaluated.
    """
    powers = [eta**k for k in range(1, 64) if eta**k <= min(epochs, num_trials)] if eta else []
    first = math.ceil(epochs / powers[-1] / period) * period if powers else epochs
    return tuple(first * power for power in [1, *powers] if first * power < epochs)


def read_trials(
    cfg_file: CfgFiles, fixed: Sequence[str], trials: Sequence[Mapping[str, str]]
) -> tuple[list[Config], list[Problem]]:
    """Return the config of each trial, and each problem once."""
    cfgs, problems = zip(*(read_cfg(cfg_file, [*to_words(values), *fixed]) for values in trials), strict=True)
    return list(cfgs), list({str(problem): problem for found in problems for problem in found}.values())


def find_name_problems(cfgs: Sequence[Config]) -> list[Problem]:
    """Return the first problem of each model and optimizer that trials name, and of the names of their arguments."""
    from distribuuuu.models.find_architecture import build_model_spec
    from distribuuuu.optim.named_optimizers import check_arguments, find_optimizer

    named = {(cfg.MODEL.ARCH, *cfg.MODEL.KWARGS, cfg.OPTIM.NAME, *cfg.OPTIM.KWARGS): cfg for cfg in cfgs}
    problems = dict[str, Problem]()
    for cfg in map(resolve_num_classes, named.values()):
        try:
            with contextlib.suppress(AssertionError, ImportError):  # a GPU or package that the nodes may have
                build_model_spec(cfg)
                check_arguments(cfg, find_optimizer(cfg))
        except ConfigError as error:
            problems |= {str(one): one for one in (problem.located(cfg.origins) for problem in error.problems)}
    return list(problems.values())


def find_objective(cfg: Config) -> tuple[str, bool]:
    """Return the display name of the metric that selects the best epoch of a run, and whether higher is better."""
    from distribuuuu.config.registry import METRICS, task_class

    names = cfg.TEST.METRICS or task_class(cfg).default_metrics
    if not names:
        return "loss", False
    metric = METRICS.get(names[0])(cfg.MODEL.NUM_CLASSES, cfg.TRAIN.TOPK)
    return metric.label(names[0]), metric.higher_is_better


def open_sweep(plan: Plan) -> None:
    """Write the description of a sweep to OUT_DIR at its first start.

    Raises:
        ConfigError: OUT_DIR holds a run or another sweep, or the description there is damaged.
    """
    path, fix = plan.out_dir / SWEEP_FILE, "fix: set another OUT_DIR"
    config = read_cfg(plan.flags.cfg, plan.options)[0].dump()
    flags = {name: getattr(plan.flags, name) for name in ("sampler", "asha", "hyperband", "seeds", "nproc")}
    space = {key: str(values) for key, values in plan.space.items()}
    record = {"schema": 2, **flags, "is_grid": not plan.flags.trials, "space": space, "metric": plan.metric,
              "config_sha256": hashlib.sha256(config.encode()).hexdigest()}  # fmt: skip
    if (plan.out_dir / CHECKPOINTS).exists():
        raise ConfigError(f"OUT_DIR: {plan.out_dir} is the folder of a run; {fix}")
    if not path.exists():
        with replacing(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(record, indent=2) + "\n")
    if load_json(path) != record:
        message = f"{path} describes the sweep of other arguments, of another --cfg or of an older version"
        raise ConfigError(f"OUT_DIR: {message}; {fix}")
