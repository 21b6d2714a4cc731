"""Training and evaluation of a model: read `train_model` from top to bottom for a whole run."""

import contextlib
import functools
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from distribuuuu.checkpoint.weights_files import RAW, kind_of
from distribuuuu.config.errors import NonFiniteError
from distribuuuu.config.run_files import TRAIN_LOG
from distribuuuu.data.batch import Batch
from distribuuuu.data.loader import build_loaders
from distribuuuu.data.seeding import derive_seed, locked_generators, seed_step
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.comm import begin_slow_phase, gradient_sync
from distribuuuu.distributed.process_group import pick_device
from distribuuuu.engine.build import build_run, find_weights, open_run
from distribuuuu.engine.evaluator import check_finite, evaluate, open_evaluation
from distribuuuu.engine.preflight import resolve_cfg
from distribuuuu.engine.run import (
    Run,
    Training,
    begin_epoch,
    call_log_hook,
    check_first_loss,
    expected_passes,
    is_evaluation_due,
    is_finished,
    is_recording_due,
)
from distribuuuu.engine.run_description import describe_end
from distribuuuu.launch.detect import detect_launch
from distribuuuu.launch.signals import RunStopped
from distribuuuu.optim.schedules import set_lr
from distribuuuu.records.predictions import Recorder, build_recorder
from distribuuuu.records.results import write_test_results
from distribuuuu.tasks.base import StepKey
from distribuuuu.tasks.metrics import StepOutput, check_loss

logger = logging.getLogger(__name__)


def train_model(cfg, stop_epoch: int | None = None, profile: int = 0) -> float:
    """Train a model, resuming from the newest valid checkpoint; return the best value of the first metric, in percent.

    With `stop_epoch`, the run ends after this epoch, from 1; the same call without it continues bitwise. With
    `profile`, a trace of that many steps is written, see engine/step_profile.py.

    Raises:
        ConfigError: the data, the model or a checkpoint contradicts the config.
        RunStopped: a signal or CHECKPOINT.MAX_HOURS stopped the run.
    """
    cfg = resolve_cfg(cfg, trains=True)
    launch = detect_launch()
    device = pick_device(launch.local_rank)
    train_loader, val_loader = build_loaders(cfg, launch, device)  # before the process group: workers fork
    with open_run(cfg, launch, device, TRAIN_LOG, locks=True) as started_at:
        run = build_run(cfg, train_loader, val_loader)  # restored from the newest checkpoint, if there is one
        profiling: contextlib.AbstractContextManager = contextlib.nullcontext()
        if profile:
            from distribuuuu.engine.step_profile import profile_steps

            profiling = profile_steps(run, profile, stop_epoch)
        with profiling, run.stop, run.log, save_on_stop(run):  # signals are handled while the last checkpoint is saved
            while not is_finished(cfg, run.state) and run.state.epoch < (stop_epoch or cfg.OPTIM.MAX_EPOCH):
                train_epoch(run)  # no step if the run was stopped after the last one
                finish_epoch(run)
            run.checkpoints.finish()
        describe_end(run, started_at)
    return run.state.best_value


def train_epoch(run: Run) -> None:
    """Train from the current step to the end of the epoch.

    Raises:
        RunStopped: a stop was requested; raised on all processes after the same step.
        NonFiniteError: the mean loss or, where a checkpoint is due, the weights are infinite or NaN.
    """
    state, loader, epoch = run.state, run.train_loader, run.state.epoch
    batches = open_batches(run)  # first: the task may choose images, and thereby the number of steps
    begin_epoch(run)
    num_steps, last_step = loader.num_steps, loader.steps_of(epoch)
    for number in run.log.steps(epoch, state.step, last_step):
        lr = set_rates(run, epoch + number / num_steps)
        step = take_step(run, batches, number)
        if epoch == number == 0:
            run.first_loss = step.loss
        state.finish_step()
        log_step(run, step, lr, last_step)
        if is_save_due(run.cfg, state.step) and state.step < last_step:
            run.save()
        run.stop.check(f"epoch {epoch + 1}, step {state.step}")


def finish_epoch(run: Run) -> None:
    """Evaluate the model, if that is due, count the epoch as done, and save."""
    if not is_evaluation_due(run.cfg, run.state.epoch):
        run.state.finish_epoch()
        run.save()
        return
    run.save()  # if the evaluation fails, no training step is lost
    evaluations = evaluate_epoch(run)
    epoch = run.state.finish_epoch(evaluations)
    run.log.add_evaluation_rows(epoch, evaluations, run.state.bests)
    run.save(evaluations)


def set_rates(run: Run, epoch: float) -> float:
    """Set the learning rates for a step at an epoch, e.g. 3.25; return the rate of OPTIM.LR_POLICY."""
    lr = run.lr_at(epoch)
    set_lr(run.state.optimizer, lr, functools.partial(run.lr_at, epoch))  # a group may have a schedule of its own
    return lr


def log_step(run: Run, step: "Step", lr: float, last_step: int) -> None:
    """Log the metrics since the last row, every TRAIN.PRINT_FREQ steps and at the end of the epoch; else show the step.

    Only a row of metrics waits for the device.
    """
    state = run.state
    if state.step % run.cfg.TRAIN.PRINT_FREQ and state.step < last_step:
        run.log.show_step(state.epoch, state.step, lr)
        return
    metrics = {name: float(value) for name, value in step.recorded.items()} | check_loss(state.pop_metrics())
    check_first_loss(run)
    run.log.add_train_row(state.epoch, state.step, lr, metrics, run.train_loader.pop_data_time(), state.clock.pop())


def is_save_due(cfg, step: int) -> bool:
    """Tell whether a checkpoint is due after a step: at multiples of CHECKPOINT.EVERY_STEPS and halfway between.

    Halfway too: while a checkpoint is being written, the one before is at most EVERY_STEPS steps old.
    """
    every = cfg.CHECKPOINT.EVERY_STEPS
    return every > 0 and step % every in (0, every // 2)


def open_batches(run: Run) -> Iterator[Batch]:
    """Return an iterator over the micro-batches of what is left of an epoch.

    The task chooses the images before the first step, and thereby the number of steps; a checkpoint holds its choice.
    """
    state, loader = run.state, run.train_loader
    if state.step == 0:
        generator = torch.Generator().manual_seed(derive_seed(state.seed, state.epoch))
        order = run.task.order_images(state.epoch, generator, loader.plan)
        state.ordered = order is not None
        chosen = order if state.ordered else run.task.choose_images(state.epoch)
        state.chosen = None if chosen is None else torch.as_tensor(chosen).cpu()
    loader.choose(state.chosen, state.ordered)
    loader.expect(expected_passes(run))  # for speed alone: at the end, workers go on with the batches of what follows
    return loader.batches_from(state.seed, state.epoch, state.step)


class Step:
    """One step of the training, as `Task.update` gets it.

    What `Task.update` draws from the global generators is equal on all processes; what a model draws in `gradients`,
    e.g. dropout, is not.

    Attributes:
        number: the step in the epoch, from 0.
        micro_batches: the key and the images of each micro-batch of the global batch, mixed: an iterator, or a list if
            the task computes gradients more than once.
        is_applied: whether the task has called `apply`.
    """

    def __init__(self, training: Training, batches: Iterator[Batch], number: int):
        self.training, self.number = training, number
        self.is_applied, self._num_passes = False, 0
        self.loss: torch.Tensor | None = None
        self.recorded: dict[str, Any] = {}
        self.micro_batches: Iterable[tuple[StepKey, Batch]] = self._prepare(batches)
        if training.task.gradient_passes > 1:
            self.micro_batches = list(self.micro_batches)

    def _prepare(self, batches: Iterator[Batch]) -> Iterator[tuple[StepKey, Batch]]:
        """Yield the micro-batches, made ready by the task, with their positions."""
        state = self.training.state
        for micro in range(self.training.train_loader.plan.accum_steps):
            key = StepKey(state.seed, state.epoch, self.number, micro)
            yield key, self.training.task.prepare_batch(next(batches), key)

    def gradients(self, all_reduce: bool = True, in_metrics: bool = True) -> None:
        """Replace the gradients of the weights by those of the global batch, micro-batch by micro-batch.

        Args:
            all_reduce: average them over the processes, with the last micro-batch; else each process keeps its own.
            in_metrics: show the loss and the metrics of this pass in the log.
        """
        task, state, model = self.training.task, self.training.state, self.training.model
        if self._num_passes and task.gradient_passes <= 1:
            fix = "set gradient_passes to 2 or more"
            raise TypeError(f"{type(task).__name__}: the images of this step are gone; fix: {fix}")
        accum_steps = self.training.train_loader.plan.accum_steps
        state.optimizer.zero_grad()
        for key, batch in self.micro_batches:
            is_last = key.micro + 1 == accum_steps
            seed_step(derive_seed(*key, dist.rank()), task.device)
            state.clock.mark()
            with gradient_sync(model, all_reduce and is_last):
                output = task.train_step(model, batch, key)
                state.clock.mark("forward")
                state.precision.backward(output.loss if accum_steps == 1 else output.loss / accum_steps)
            state.clock.mark("backward")
            if in_metrics:
                state.meter.update(output)
                self.loss = output.loss.detach()
        self._num_passes += 1
        self.seed()

    def seed(self) -> None:
        """Seed what `Task.update` and the optimizer draw, until the next call of `gradients`."""
        task, state = self.training.task, self.training.state
        seed_step(derive_seed(state.seed, state.epoch, self.number, self._num_passes), task.device)

    def apply(self) -> None:
        """Unscale and clip the gradients, and update the weights."""
        self.is_applied = True
        self.training.state.precision.step(self.training.state.optimizer, self.training.clip)
        self.training.state.clock.mark("optimizer")

    def record(self, **values: torch.Tensor | float) -> None:
        """Show values in the row of metrics of this step, if it has one; the main process writes its own."""
        self.recorded |= values


def take_step(training: Training, batches: Iterator[Batch], number: int) -> Step:
    """Let the task update the weights with one global batch, by default with its gradients; see `Task.update`."""
    with locked_generators():
        step = Step(training, batches, number)
        step.seed()
        training.task.update(step)
        for _ in step.micro_batches:  # if the task has not computed gradients, the next step still gets its own images
            pass
    training.state.num_skipped += not step.is_applied
    return step


def evaluate_epoch(run: Run) -> dict[str, dict]:
    """Return count, loss and metrics of each kind of weights, see checkpoint/weights_files.py.

    With MODEL.PRECISE_BN, the statistics of the batch norm layers are computed first.
    """
    cfg, task, state, results = run.cfg, run.task, run.state, {}
    first_batches: list[Batch] = []

    def check_stop(position: str) -> None:
        run.stop.check(f"epoch {state.epoch + 1}, {position}")

    for kind, model in state.models.items():
        run.stop.begin_phase(f"evaluation of {kind}")
        if cfg.MODEL.PRECISE_BN:
            from distribuuuu.engine.precise_bn import recompute_statistics

            recompute_statistics(run, model)
            run.stop.begin_phase()
        recorder = build_recorder(cfg, task, run.val_loader.images) if is_recording_due(cfg, state, kind) else None

        def keep(batch: Batch, output: StepOutput, recorder: Recorder | None = recorder) -> None:
            if not first_batches:
                first_batches.append(batch)
            if recorder:
                recorder.add(batch, output)

        results[kind] = evaluate(task, model, run.val_loader, keep, check_stop)
        begin_slow_phase()  # what is written or drawn until the next step may take longer than a step
        if recorder:
            recorder.write(task.device, kind, state.epoch + 1)
    call_log_hook(run, *first_batches)
    return results


@contextlib.contextmanager
def save_on_stop(run: Run) -> Iterator[None]:
    """Save a checkpoint if a stop is requested within the block; in any case, wait for a save in progress.

    Raises:
        NonFiniteError: as raised in the block, with the position and the newest checkpoint.
    """
    try:
        yield
    except RunStopped as stopped:
        try:
            path: Path | None = run.save(ends_run=True)
            run.checkpoints.finish()
        except NonFiniteError as error:
            logger.error("%s; the checkpoint is an older one", error)
            run.checkpoints.finish()
            path = run.checkpoints.find_latest()
        logger.info("%s: stopped in epoch %d after step %d; checkpoint: %s; run the same command again to resume",
                    stopped, run.state.epoch + 1, run.state.step, path)  # fmt: skip
        raise
    except NonFiniteError as error:
        run.checkpoints.close()
        position = f"in epoch {run.state.epoch + 1}, by step {run.state.step}"
        raise error.located(position, run.checkpoints.find_latest()) from None
    finally:
        run.checkpoints.close()


def evaluate_weights(cfg) -> dict:
    """Evaluate MODEL.WEIGHTS, else the best weights of the run, else published weights; return and write the result.

    Raises:
        ConfigError: there are no weights, or they do not match the model or the classes of the data.
    """
    weights = find_weights(cfg)
    kind = kind_of(weights) if Path(weights).resolve().parent == Path(cfg.OUT_DIR).resolve() else RAW
    with open_evaluation(cfg, weights) as (task, model, loader):
        recorder = build_recorder(task.cfg, task, loader.images)
        result = check_finite(evaluate(task, model, loader, recorder.add if recorder else None), str(weights))
        if recorder:
            recorder.write(task.device, kind)
        write_test_results(task.cfg, task, model, weights, {kind: result})
    return result


test_model = evaluate_weights  # alias of an earlier API, see docs/python_api.md
