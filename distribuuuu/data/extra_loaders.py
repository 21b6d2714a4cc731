"""Further training loaders of a task: their configs and their part of a step, see `Task.extra_loaders`."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.reader import override
from distribuuuu.config.registry import dataset_class
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.build_transform import MAIN

# First letters of the options that a further loader may set; mixup and CutMix are the task's, for its main batches.
_OF_LOADER = ("TRAIN.BATCH_SIZE", "TRAIN.DATASET", "TRAIN.SPLIT", "TRAIN.IM_SIZE", "DATA.",
              "AUG.POLICY", "AUG.COLOR_JITTER", "AUG.OPERATIONS", "AUG.ERASING", "AUG.OFF_EPOCHS")  # fmt: skip


def configs_of_extra(cfg, loaders: Mapping[str, Mapping], plan: BatchPlan) -> Iterator[tuple[str, Any, BatchPlan]]:
    """Yield name, config and plan of the further loaders of a task, whose steps follow a plan."""
    for name, options in loaders.items():
        if name == MAIN:
            raise ConfigError(f"TASK.NAME: got a task with an extra loader {MAIN}; expected another name for it")
        own = override(cfg, options, f"loader {name}", _OF_LOADER)
        problems = dataset_class(own).find_problems(own, train=True)
        if wrong := [Problem(key, text, own.origins) for key, text in problems if key != "MODEL.NUM_CLASSES"]:
            raise ConfigError(wrong)
        micro_batch, rest = divmod(plan.micro_batch * own.TRAIN.BATCH_SIZE, cfg.TRAIN.BATCH_SIZE)
        if rest:
            message = f"got {own.TRAIN.BATCH_SIZE}; expected a multiple of {cfg.TRAIN.BATCH_SIZE}, that of the config"
            raise ConfigError(Problem("TRAIN.BATCH_SIZE", message), own.origins)
        yield name, own, replace(plan, micro_batch=micro_batch)
