"""The description of a sweep, and the checks of its trials before the first one is started."""

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distribuuuu.commands.sweep.search_space import is_list, list_ends
from distribuuuu.config import Config, ConfigError, Problem
from distribuuuu.config.json_file import load_json
from distribuuuu.config.reader import CfgFiles, list_files, read_cfg
from distribuuuu.config.run_files import CHECKPOINTS
from distribuuuu.engine.preflight import resolve_num_classes
from distribuuuu.files.atomic_file import replacing

SWEEP_FILE, MAX_TRIALS = "sweep.json", 1000


class Plan:
    """The description of a sweep; its arguments are the result of `parse_args`.

    Raises:
        ConfigError: with every problem of the configs of the trials that are known; names are checked before the first
            start only.
    """

    def __init__(self, flags: argparse.Namespace, fixed: Sequence[str], space: dict[str, Any], first: Config):
        self.flags, self.space = flags, space
        options = dict(zip(fixed[::2], fixed[1::2], strict=True))
        self.out_dir = Path(options.pop("OUT_DIR"))
        self.options = [word for pair in options.items() for word in pair]
        # The values of all trials; none: Optuna samples them.
        lists = [values.choices for values in space.values() if is_list(values)]
        grid = [] if flags.trials else itertools.product(*lists)
        most = math.prod(map(len, lists)) if len(lists) == len(space) else MAX_TRIALS
        self.num_trials = flags.trials or most
        if self.num_trials > (most := min(most, MAX_TRIALS)):
            fix = f"expected at most {most:,}, the number of combinations or {MAX_TRIALS:,}; fix: --trials {most}"
            raise ConfigError(Problem("--trials", f"got {self.num_trials:,} trials; {fix}"))
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
        words = [word for pair in values.items() for word in pair]
        return ["train", *map(str, [*flags, *self.options, *words, "RNG_SEED", seed, "OUT_DIR", folder])]


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
    pairs = [[word for pair in values.items() for word in pair] for values in trials]
    cfgs, problems = zip(*(read_cfg(cfg_file, [*words, *fixed]) for words in pairs), strict=True)
    return list(cfgs), list({str(problem): problem for found in problems for problem in found}.values())


def find_name_problems(cfgs: Sequence[Config]) -> list[Problem]:
    """Return the problems of the models and optimizers that trials name, and of the names of their arguments."""
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
    found = load_json(path)
    if isinstance(found, dict) and found.get("schema") == 1:
        read = f"read it by distribuuuu table {shlex.quote(str(plan.out_dir))}"
        raise ConfigError(f"OUT_DIR: {path} is of a sweep of an older version; {fix}, or {read}")
    if found != record:
        raise ConfigError(f"OUT_DIR: {path} describes the sweep of other arguments, or of another --cfg; {fix}")
