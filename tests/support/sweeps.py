"""Descriptions of small sweeps."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from distribuuuu.commands.sweep.asha import plan_rungs
from distribuuuu.commands.sweep.trials import Sweep, Trial


def make_sweep(
    out_dir: Path,
    values: Sequence[Mapping[str, str]],
    epochs: int,
    eta: int = 0,
    seeds: Sequence[int] = (0,),
    overrides: Sequence[str] = (),
    higher_is_better: bool = True,
) -> Sweep:
    """Return the description of a sweep over given values, e.g. [{"OPTIM.BASE_LR": "0.1"}], compared by top1."""
    fixed = dict(zip(overrides[::2], overrides[1::2], strict=True))
    space = {key: ",".join(trial.get(key, "") for trial in values) for key in values[0]}
    inputs = {"config": "", "config_sha256": "", "overrides": fixed, "space": space, "trials": None,
              "seeds": len(seeds), "asha": eta, "nproc": 1}  # fmt: skip
    trials = tuple(Trial(number, options, epochs) for number, options in enumerate(values))
    rungs = plan_rungs(epochs, eta, len(trials))
    return Sweep(out_dir, inputs, trials, tuple(seeds), rungs, "top1", higher_is_better)
