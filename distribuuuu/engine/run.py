"""The objects of a training run, what surrounds its steps, and when it evaluates and ends."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from distribuuuu.checkpoint.manager import CheckpointManager, snapshot
from distribuuuu.config import Config
from distribuuuu.config.config_node import get_value
from distribuuuu.config.declaration import AUTO
from distribuuuu.data.batch import Batch, Pass
from distribuuuu.data.loader import Loader, TrainLoader
from distribuuuu.data.samplers import WHOLE
from distribuuuu.data.seeding import derive_seed, seed_step
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.comm import StopRequest
from distribuuuu.distributed.sharding import inference
from distribuuuu.engine.state import TrainState
from distribuuuu.records.results import RunResults
from distribuuuu.records.run_log import Log
from distribuuuu.tasks.base import Task
from distribuuuu.tasks.metrics import check_loss

logger = logging.getLogger(__name__)


@dataclass
class Training:
    """The objects of a training step.

    Attributes:
        model: `state.model`, wrapped for several processes and compiled.
        lr_at: function from the epoch, e.g. 3.25, and optionally a policy, to the learning rate.
        clip: function that clips the gradients of parameters.
    """

    cfg: Config
    task: Task
    state: TrainState
    model: nn.Module
    train_loader: TrainLoader
    lr_at: Callable[..., float]
    clip: Callable[[Iterable[torch.Tensor]], None]


@dataclass
class Run(Training):
    """The objects of a training run: those of its steps and around them; and the first loss, until it is checked."""

    val_loader: Loader
    checkpoints: CheckpointManager
    results: RunResults
    log: Log
    stop: StopRequest
    first_loss: torch.Tensor | None = None

    def save(self, evaluations: dict[str, dict] | None = None, ends_run: bool = False) -> Path:
        """Save state and task as a checkpoint, see `CheckpointManager.save`, and return its file.

        `evaluations` are the results, by kind of weights, of the evaluation after the steps of the last checkpoint.

        Raises:
            NonFiniteError: the weights, or the loss of a step since the last row of metrics, are infinite or NaN.
            CheckpointError: the previous checkpoint could not be written.
        """
        started, content = time.perf_counter(), self.state.to_dict()
        check_loss({"loss": sum(float(state["sums"][1]) for state in content["meter"])})
        own = snapshot(self.task.rank_state_dict())
        gathered = dist.gather_objects(own)
        content["task"] = {"shared": self.task.state_dict(), "by_rank": gathered if own else []}
        content["finished"] = is_finished(self.cfg, self.state)
        if dist.is_distributed():
            from distribuuuu.distributed.replicas import gather_buffers

            packages = {base.__module__.partition(".")[0] for base in type(self.task).__mro__}
            is_own = packages <= {"distribuuuu", "builtins"} and type(self.task).train_mode is Task.train_mode
            content["buffers"] = gather_buffers(self.state.models, norms=not is_own)
        if evaluations:
            epoch = self.state.epoch - 1
            content |= {"evaluations": evaluations, "evaluated_at": (epoch, self.train_loader.steps_of(epoch))}
        path = self.checkpoints.save(content, ends_run=ends_run, write_results=self.results.write)
        self.log.spent["checkpoints"] += time.perf_counter() - started
        return path


def begin_epoch(run: Run) -> None:
    """Prepare the task for an epoch, also for what a resume has left of it, and set the model to training mode."""
    task, state = run.task, run.state
    stages = [task.begin_epoch(state.epoch), describe_augmentation(run.cfg, task, state.epoch)]
    run.log.set_stage(state.epoch, "; ".join(filter(None, stages)) or None)
    task.train_mode(run.model)
    # With progressive resizing, an epoch may compile again for a new image size: each one is a new phase.
    run.stop.begin_phase(f"training, epoch {state.epoch}" if run.cfg.TRAIN.IM_SIZE_START else "training")


def check_first_loss(run: Run) -> None:
    """Warn if the first step of a classification has a loss far above that of guessing, as a badly scaled head does."""
    cfg, loss, run.first_loss = run.cfg, run.first_loss, None
    is_plain = cfg.TASK.NAME in (AUTO, "classification") and cfg.LOSS.NAME == "cross_entropy" and dist.is_main()
    if loss is None or not is_plain or cfg.DISTILL.TEACHER or cfg.LOSS.CLASS_WEIGHTS:
        return
    if float(loss) > (guess := math.log(len(run.task.classes))) + 1:
        logger.warning("the loss of the first step is %.2f, that of guessing is %.2f: check the initial weights of "
                       "the head, DATA.MEAN and DATA.STD", loss, guess)  # fmt: skip


def describe_augmentation(cfg: Config, task: Task, epoch: int) -> str:
    """Return the options of the augmentation in an epoch that differ from those of the config; empty if none does."""
    stages = [options for first, options in sorted(task.augmentation_stages(cfg).items()) if first <= epoch]
    options = stages[-1] if stages else {}
    return ", ".join(f"{key} {value}" for key, value in options.items() if value != get_value(cfg, key))


def call_log_hook(run: Run, batch: Batch | None = None) -> None:
    """Let the task log what it wants after an evaluation, with its first batch; every process must call it."""
    task, state = run.task, run.state
    if type(task).log_epoch is not Task.log_epoch:
        run.stop.begin_phase("log_epoch")
        seed_step(derive_seed(state.seed, state.epoch, dist.rank()), task.device)
        context = contextlib.nullcontext() if task.eval_gradients else inference(state.model)
        with context, dist.unlimited_phase("log_epoch"):
            task.log_epoch(run.log, state.model, batch)


def expected_passes(run: Run) -> Iterator[Pass]:
    """Return the passes over the data after the steps of this epoch, as `train_model` takes them.

    Batches that are made ahead for a pass that does not follow are discarded.
    """
    cfg, train, plan, seed = run.cfg, run.train_loader, run.train_loader.plan, run.state.seed
    samples, sampler, evaluation = train.samples, train.sampler, Pass(run.val_loader.samples, run.val_loader.sampler)
    num_precise = -(-cfg.MODEL.PRECISE_BN // plan.global_batch) * plan.accum_steps
    epochs, kinds = range(run.state.epoch, cfg.OPTIM.MAX_EPOCH), tuple(run.state.models)

    def passes() -> Iterator[Pass]:  # without the loaders, whose workers keep it
        for epoch in epochs:
            steps = replace(sampler, seed=seed, epoch=epoch, first_step=0)
            if epoch > epochs[0]:
                yield Pass(samples, steps)
            whole = replace(steps, **WHOLE)
            precise = [Pass(samples, whole, num_precise)] if num_precise else []
            if is_evaluation_due(cfg, epoch):
                yield from [*precise, evaluation] * len(kinds)

    return passes()


# The epochs after which a model is evaluated, and the one after which a run ends: functions of the config and the
# state, so a resumed run decides as the run that it continues.


def is_evaluation_due(cfg: Config, epoch: int) -> bool:
    """Tell whether the model is evaluated after an epoch, from 0."""
    return (epoch + 1) % cfg.TRAIN.EVAL_PERIOD == 0 or epoch + 1 == cfg.OPTIM.MAX_EPOCH


def is_out_of_patience(cfg: Config, state: TrainState, epoch: int) -> bool:
    """Tell whether an epoch, from 0, is evaluated, and TRAIN.PATIENCE epochs or more after the best one."""
    if not cfg.TRAIN.PATIENCE or not is_evaluation_due(cfg, epoch):
        return False
    best = max(state.bests[kind].epoch for kind in state.models)
    return best >= 0 and epoch - best >= cfg.TRAIN.PATIENCE


def is_finished(cfg: Config, state: TrainState) -> bool:
    """Tell whether no epoch is left to train."""
    return state.epoch >= cfg.OPTIM.MAX_EPOCH or (state.step == 0 and is_out_of_patience(cfg, state, state.epoch - 1))


def is_recording_due(cfg: Config, state: TrainState, kind: str) -> bool:
    """Tell whether predictions are recorded: of the last kind of weights, after the epoch that may be the last one."""
    is_last_epoch = state.epoch + 1 == cfg.OPTIM.MAX_EPOCH or is_out_of_patience(cfg, state, state.epoch)
    return is_last_epoch and kind == list(state.models)[-1]
