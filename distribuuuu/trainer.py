"""A run from start to end: read `train_model` top to bottom and you know it whole."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from distribuuuu.checkpoint.io import CheckpointError, find_class_mismatch, read_checkpoint
from distribuuuu.checkpoint.load import load_state_dict
from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.config import ConfigError
from distribuuuu.config.tree import iter_options
from distribuuuu.data.loader import Loader, TrainLoader, build_loader
from distribuuuu.data.seeding import derive_seed, draw_seed, seed_cpu, seed_step
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.activation_checkpoint import build_act_checkpoint
from distribuuuu.distributed.ddp import compile_model, without_gradient_sync, wrap_model
from distribuuuu.distributed.fsdp import build_parallelize_fn
from distribuuuu.distributed.process_group import pick_device
from distribuuuu.distributed.sync_batchnorm import convert_sync_batchnorm
from distribuuuu.distributed.watchdog import marked
from distribuuuu.engine.dry_run import dry_run, dry_run_evaluation
from distribuuuu.engine.evaluator import evaluate
from distribuuuu.engine.out_of_memory import explain_out_of_memory
from distribuuuu.engine.precise_bn import compute_precise_statistics
from distribuuuu.engine.preflight import resolve_num_classes
from distribuuuu.engine.setup import (
    RunResults,
    describe_end,
    describe_model,
    describe_training,
    open_run,
    write_config,
    write_test_results,
)
from distribuuuu.engine.state import TrainState, list_changes
from distribuuuu.engine.stop import StopRequest
from distribuuuu.launch.detect import detect_launch, is_restart
from distribuuuu.launch.signals import RunStopped
from distribuuuu.models import build_model
from distribuuuu.models.finetune import build_initial_model, freeze_parts
from distribuuuu.optim.ema import build_ema
from distribuuuu.optim.optimizer import build_optimizer, set_lr
from distribuuuu.optim.precision import build_precision
from distribuuuu.report.run_log import RunLog, evaluation_bar
from distribuuuu.tasks.classification import Recipe, build_recipe
from distribuuuu.tasks.losses import build_loss
from distribuuuu.tasks.metrics import NonFiniteLoss, build_meter, finite, metric_names

logger = logging.getLogger(__name__)


def train_model(cfg) -> float:
    """Train from scratch or from the newest sound checkpoint; return the best top-1, or map, in percent.

    Raises:
        ConfigError: the data, the model or a checkpoint contradicts the config.
    """
    cfg = resolve_num_classes(cfg)
    launch = detect_launch()
    device = pick_device(launch.local_rank)
    train_loader, val_loader = (build_loader(cfg, launch, device, train) for train in (True, False))
    with open_run(cfg, launch, device, "train.log", locks=True) as started:
        checkpoints = build_checkpoints(cfg)
        latest = find_latest(cfg, checkpoints)
        state = build_state(cfg, device, train_loader, pretrained=latest is None)
        restore(cfg, state, latest)
        recipe = build_recipe(cfg, train_loader, device, state.precision)
        model = prepare_model(cfg, state.model, train_loader, val_loader)
        describe_training(cfg, state, train_loader, val_loader)
        begin_writing(cfg, checkpoints, latest)
        results = RunResults(cfg, device, state, train_loader, val_loader)
        with StopRequest(cfg.CHECKPOINT.MAX_HOURS) as stop, open_log(cfg, state, train_loader) as log:
            with saved_when_stopped(state, checkpoints):
                while state.epoch < cfg.OPTIM.MAX_EPOCH:
                    try:
                        train_epoch(cfg, state, model, train_loader, recipe, checkpoints, log, stop)
                    except NonFiniteLoss as trouble:
                        roll_back(cfg, state, checkpoints, log, trouble)
                    else:
                        checkpoints.save_in_background(state)  # an evaluation that fails is repeated alone
                        evaluations = evaluate_epoch(cfg, state, train_loader, val_loader, stop)
                        new_bests = state.finish_epoch(
                            {kind: read[log.primary_metric] for kind, read in evaluations.items()}
                        )
                        log.evaluation(state.epoch - 1, evaluations, state.bests)
                        results.write(state, state.timing.images_per_s, evaluations)
                        checkpoints.save_in_background(state, new_bests)
            checkpoints.finish()
            results.finish()
        describe_end(cfg, state, checkpoints.bests, started)
    return max(state.best_top1.values())


@explain_out_of_memory("a training step")
def train_epoch(
    cfg,
    state: TrainState,
    model: nn.Module,
    loader: TrainLoader,
    recipe: Recipe,
    checkpoints: CheckpointManager,
    log: RunLog,
    stop: StopRequest,
) -> None:
    """Train from the state's position to the end of its epoch.

    Raises:
        RunStopped: the run was asked to stop; all processes leave after the same step.
        NonFiniteLoss: a loss was infinite or not a number.
    """
    epoch, seed, accum_steps = state.epoch, state.stream_seed, loader.plan.accum_steps
    meter, precision = state.meter, state.precision
    batches = loader.batches_from(seed, epoch, state.step)
    model.train()
    # Images of another size may be compiled for anew.
    stop.begin_phase(f"training, epoch {epoch}" if cfg.TRAIN.IM_SIZE_START else "training")
    for step in log.steps(epoch, state.step):
        lr = recipe.lr_at(epoch + step / loader.num_steps)
        set_lr(state.optimizer, lr)
        state.optimizer.zero_grad()
        for micro in range(accum_steps):
            images, targets = recipe.mix(*next(batches), seed, epoch, step, micro)
            seed_step(derive_seed(seed, epoch, step, micro, dist.rank()), loader.device)
            with without_gradient_sync(model, micro + 1 < accum_steps):
                with precision.autocast():
                    logits = model(images)
                loss = recipe.objective(images, logits, targets)
                precision.backward(loss / accum_steps)
            meter.update(loss, logits, targets)
        precision.step(state.optimizer, recipe.clip)
        state.finish_step(loader.num_steps)
        is_last = state.step == loader.num_steps
        if state.step % cfg.TRAIN.PRINT_FREQ == 0 or is_last:
            log.train(epoch, state.step, lr, finite(meter.read()), loader.pop_data_time())
        else:
            log.show_step(epoch, state.step, lr)
        if checkpoints.is_due(state.step) and not is_last:
            checkpoints.save_in_background(state)
        stop.check(f"epoch {epoch + 1}, step {state.step}")


@explain_out_of_memory("the evaluation", batch="test")
def evaluate_epoch(
    cfg, state: TrainState, train_loader: TrainLoader, val_loader: Loader, stop: StopRequest
) -> dict[str, dict]:
    """Return the result of each kind of weights; with MODEL.PRECISE_BN their statistics are made precise before."""
    criterion, meter = build_loss(cfg, train=False), build_meter(cfg, val_loader.device)
    results, autocast, flip = {}, state.precision.autocast, cfg.TEST.FLIP
    for kind, model in state.models.items():
        stop.begin_phase(f"evaluation of {kind}")
        if cfg.MODEL.PRECISE_BN:
            images = train_loader.iter_images(state.stream_seed, state.epoch, cfg.MODEL.PRECISE_BN)
            compute_precise_statistics(model, images, autocast)
        results[kind] = evaluate(model, val_loader, criterion, meter, watched_bar(cfg, state, stop), autocast, flip)
    return results


@explain_out_of_memory("building the model", batch=None)
def build_state(cfg, device: torch.device, loader: TrainLoader, pretrained: bool) -> TrainState:
    """Return the state at the very start, from what MODEL.PRETRAINED or FINETUNE.WEIGHTS name if it is `pretrained`."""
    seed = dist.broadcast_object(draw_seed()) if cfg.RNG_SEED is None else cfg.RNG_SEED
    seed_cpu(derive_seed(seed))
    model = build_initial_model(cfg, loader.images.classes, pretrained)
    if cfg.MODEL.SYNCBN:
        model = convert_sync_batchnorm(model, device)
    freeze_parts(cfg, model)
    ema, place = build_ema(cfg, build_act_checkpoint(cfg, model)), build_parallelize_fn(cfg, device)
    place(model)
    if ema:
        place(ema.model)
        ema.pair_with(model)
    return TrainState(
        model=model,
        optimizer=build_optimizer(cfg, model, loader.plan.global_batch),
        seed=seed,
        arch=cfg.MODEL.ARCH,
        classes=loader.images.classes,
        global_batch=loader.plan.global_batch,
        precision=build_precision(cfg, device),
        ema=ema,
        config=dict(iter_options(cfg)),
        meter=build_meter(cfg, device),
    )


@explain_out_of_memory("the first passes")
def prepare_model(cfg, model: nn.Module, train_loader: TrainLoader, val_loader: Loader) -> nn.Module:
    """Return the model ready for steps: after a dry run, wrapped for several processes, compiled."""
    example, settings = train_loader.dummy_batch(), cfg.DIST
    unused = dry_run(cfg, model, example, val_loader.zero_images(1))
    model = wrap_model(model, train_loader.device, example, settings.BUCKET_MB, settings.COMPRESS,
                       unused=unused.names, find_unused=unused.varies)  # fmt: skip
    compile_model(model, cfg.MODEL.COMPILE)
    return model


def build_checkpoints(cfg) -> CheckpointManager:
    """Return the checkpoints of the run."""
    settings = cfg.CHECKPOINT
    return CheckpointManager(cfg.OUT_DIR, settings.KEEP_LAST, settings.KEEP_EVERY, settings.EVERY_STEPS)


def find_latest(cfg, checkpoints: CheckpointManager) -> Path | None:
    """Return the newest sound checkpoint; None with TRAIN.AUTO_RESUME False, unless the launcher restarts the run."""
    return checkpoints.find_latest() if cfg.TRAIN.AUTO_RESUME or is_restart() else None


def begin_writing(cfg, checkpoints: CheckpointManager, latest: Path | None) -> None:
    """Make OUT_DIR this run's own, now that its start has been accepted: until here an older run's files are whole.

    Where the run does not resume, the older run's files are set aside.
    """
    checkpoints.remove_temporary_files()
    begins_anew = latest is None and not cfg.TRAIN.AUTO_RESUME
    if begins_anew and (aside := checkpoints.archive((cfg.CFG_DEST, "metrics.jsonl"))):
        logger.info("TRAIN.AUTO_RESUME is False: checkpoints and config of the previous run were moved to %s", aside)
    write_config(cfg)


@explain_out_of_memory("restoring a checkpoint", batch=None)
def restore(cfg, state: TrainState, latest: Path | None) -> None:
    """Bring the state to the newest checkpoint, else to MODEL.WEIGHTS, else leave it at the start."""
    if latest:
        resume(state, latest)
    elif cfg.MODEL.WEIGHTS:
        load_weights(cfg, state)
    if cfg.RNG_SEED not in (None, state.seed):
        logger.warning("RNG_SEED: the checkpoint has seed %d; the run continues with %d", state.seed, cfg.RNG_SEED)
        state.seed = cfg.RNG_SEED


def resume(state: TrainState, latest: Path) -> None:
    """Bring the state to the newest checkpoint of OUT_DIR, and log which options were changed since.

    Raises:
        CheckpointError: the checkpoint does not fit the config; says which options differ.
    """
    content = read_checkpoint(latest)
    before = content.get("config", {"MODEL.ARCH": content.get("arch", state.arch)})
    try:
        state.load_dict(content, latest)
    except CheckpointError as error:
        changed = ", ".join(list_changes(before, state.config, ("MODEL.", "FINETUNE.", "OPTIM.", "EMA.", "DATA.")))
        differs = f"; changed since the checkpoint: {changed}; fix: set them back, or" if changed else "; fix:"
        remedy = "set another OUT_DIR, or TRAIN.AUTO_RESUME False to begin a new run in this one"
        raise CheckpointError(f"{error}{differs} {remedy}") from error
    logger.info("resumed from %s: epoch %d, step %d", latest, state.epoch + 1, state.step)
    if changed := list_changes(before, state.config):
        logger.info("options changed since the checkpoint: %s", ", ".join(changed))


def watched_bar(cfg, state: TrainState, stop: StopRequest) -> Callable[[Loader], Iterator]:
    """Return what shows an evaluation loader behind a bar and lets it be stopped between two batches."""
    bar, position = evaluation_bar(cfg.TEST.PRINT_FREQ), f"epoch {state.epoch + 1}, evaluation"
    return lambda loader: stop.checked(bar(loader), loader.max_num_batches, position)


@contextlib.contextmanager
def saved_when_stopped(state: TrainState, checkpoints: CheckpointManager) -> Iterator[None]:
    """Save the state if the run is asked to stop within the block; the processes leave together once that is done.

    An error leaves after the save at hand, which may be of the steps that it would cost.
    """
    try:
        yield
    except ConfigError:
        checkpoints.join_or_abandon()
        raise
    except RunStopped as stopped:
        path = checkpoints.save(state)
        logger.info("%s: stopped in epoch %d after step %d; checkpoint: %s; run the same command again to resume",
                    stopped, state.epoch + 1, state.step, path)  # fmt: skip
        raise


def roll_back(cfg, state: TrainState, checkpoints: CheckpointManager, log: RunLog, trouble: NonFiniteLoss) -> None:
    """Return to the newest checkpoint, to go on with other randomness; raise the trouble again if that is not to be.

    Checkpoints hold finite numbers only. TRAIN.ON_NAN decides, TRAIN.MAX_ROLLBACKS limits.
    """
    checkpoints.wait()
    latest, num = checkpoints.find_latest(), state.num_rollbacks + 1
    where = f"in epoch {state.epoch + 1}, by step {state.step}"
    if latest is None:
        remedy = "set CHECKPOINT.EVERY_STEPS, so that the next start has checkpoints within the epoch"
        raise trouble.located(f"{where}; there is no checkpoint", remedy) from None
    if cfg.TRAIN.ON_NAN == "stop" or num > cfg.TRAIN.MAX_ROLLBACKS:
        remedy = "set TRAIN.ON_NAN rollback" if cfg.TRAIN.ON_NAN == "stop" else "raise TRAIN.MAX_ROLLBACKS"
        raise trouble.located(f"{where}; the newest checkpoint, {latest}, is finite", remedy) from None
    logger.warning("the loss is not finite in epoch %d, by step %d: rollback %d of %d, to %s", state.epoch + 1,
                   state.step, num, cfg.TRAIN.MAX_ROLLBACKS, latest)  # fmt: skip
    state.load_dict(read_checkpoint(latest), latest)
    state.drop_row()
    state.num_rollbacks = num
    log.rewind(state.epoch, state.step)


def load_weights(cfg, state: TrainState) -> None:
    """Start from MODEL.WEIGHTS: with TRAIN.LOAD_OPT and a whole checkpoint, also from its optimizer and position."""
    path = cfg.MODEL.WEIGHTS
    content = read_checkpoint(path)
    if cfg.TRAIN.LOAD_OPT and "optimizer" in content:
        state.load_dict(content, path)
        logger.info("resumed from %s: epoch %d; TRAIN.LOAD_OPT False loads its weights only", path, state.epoch + 1)
    else:
        state.start_from(content, path)
        logger.info("initial weights: %s", path)


def open_log(cfg, state: TrainState, loader: TrainLoader) -> RunLog:
    """Return the log of the run from the state's position on, begun with a picture of the augmented images."""
    log = RunLog(
        cfg.OUT_DIR,
        tensorboard=cfg.LOG.TENSORBOARD,
        measures=metric_names(cfg),
        num_epochs=cfg.OPTIM.MAX_EPOCH,
        num_steps=loader.num_steps,
        images_per_step=loader.plan.global_batch,
        epoch=state.epoch,
        step=state.step,
        timing=state.timing,
    )
    if log.has_tensorboard and (state.epoch, state.step) == (0, 0):
        log.images("train/augmented", loader.preview(state.seed, cfg.LOG.NUM_IMAGES))
    return log


def test_model(cfg) -> dict:
    """Evaluate MODEL.WEIGHTS, else the run's best, else the published weights; return and write the result.

    Raises:
        ConfigError: there are no weights, or they do not fit the model or the data.
    """
    cfg = resolve_num_classes(cfg)
    launch = detect_launch()
    device = pick_device(launch.local_rank)
    loader = build_loader(cfg, launch, device, train=False)
    with open_run(cfg, launch, device, "test.log"):
        weights = find_weights(cfg)
        model = build_model(cfg, pretrained=weights == "pretrained").to(device)
        if weights != "pretrained":
            content = read_checkpoint(weights)
            load_state_dict(model, content["state_dict"], weights)
            if other := find_class_mismatch(content, loader.images.classes):
                raise CheckpointError(f"{weights}: was trained on other classes: {other}")
        describe_model(cfg, model, loader)
        result = evaluate_weights(cfg, model, loader)
        kind = "ema" if Path(weights) == build_checkpoints(cfg).bests["ema"] else "raw"
        write_test_results(cfg, device, model, weights, {kind: result})
    return result


@explain_out_of_memory("the evaluation", batch="test")
def evaluate_weights(cfg, model: nn.Module, loader: Loader) -> dict:
    """Return the result of a model, tried out on one image before."""
    dry_run_evaluation(cfg, model, loader.zero_images(1))
    criterion, bar = build_loss(cfg, train=False), evaluation_bar(cfg.TEST.PRINT_FREQ)
    meter, autocast = build_meter(cfg, loader.device), build_precision(cfg, loader.device).autocast
    watched = lambda batches: marked(bar(batches), "evaluation")  # noqa: E731
    return evaluate(model, loader, criterion, meter, watched, autocast, cfg.TEST.FLIP)


def find_weights(cfg) -> str:
    """Return the file that `test_model` evaluates, or 'pretrained'."""
    bests = build_checkpoints(cfg).bests
    best = bests["ema"] if cfg.EMA.HALF_LIFE and bests["ema"].exists() else bests["raw"]
    if cfg.MODEL.WEIGHTS or not best.exists() and cfg.MODEL.PRETRAINED:
        return cfg.MODEL.WEIGHTS or "pretrained"
    if not best.exists():
        raise CheckpointError(f"MODEL.WEIGHTS: is not set, and {best} is not there; name a file to evaluate")
    return str(best)
