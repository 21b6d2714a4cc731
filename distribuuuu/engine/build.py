"""Set-up of a run: processes, OUT_DIR, model, state and checkpoints."""

import contextlib
import importlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distribuuuu.checkpoint.io import CheckpointError, find_class_mismatch, load_state_dict, read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager, find_nonfinite, hash_tensors, weights_of
from distribuuuu.checkpoint.weights_files import best_path, find_best, find_card, find_weights_file, list_bests
from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.config_node import changed, iter_options
from distribuuuu.config.derived import total_steps
from distribuuuu.config.model_names import PUBLISHED, is_published, names_backbone
from distribuuuu.config.options import TEST_SETS, UNCOMPILED
from distribuuuu.config.run_files import METRICS, PREDICTIONS, RESULTS, RUN_FILES, TRACKERS_FOLDER, url_of
from distribuuuu.data.build_transform import statistics_of
from distribuuuu.data.loader import Loader, TrainLoader, check_same_data
from distribuuuu.data.seeding import derive_seed, seed_cpu
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.comm import StopRequest
from distribuuuu.distributed.process_group import process_group
from distribuuuu.distributed.sharding import build_parallelize_fn
from distribuuuu.engine.dry_run import dry_run, dry_run_evaluation
from distribuuuu.engine.resume import check_task_state, restore_task, resume_or_load_weights
from distribuuuu.engine.run import Run, Training, is_finished
from distribuuuu.engine.run_description import describe_machine, describe_training
from distribuuuu.engine.run_lock import lock_out_dir
from distribuuuu.engine.state import TrainState
from distribuuuu.files.atomic_file import remove_temporary_files, replacing
from distribuuuu.launch.detect import Launch, list_jobs
from distribuuuu.launch.host import count_cores
from distribuuuu.models.build import build_model
from distribuuuu.optim.optimizer import build_optimizer
from distribuuuu.optim.precision import Precision, build_clipper, build_precision
from distribuuuu.optim.schedules import build_lr
from distribuuuu.records.metric_writers import format_duration
from distribuuuu.records.results import RunResults
from distribuuuu.records.run_log import Log, append_to_log, logging_to
from distribuuuu.tasks.base import Task, build_task
from distribuuuu.tasks.metrics import Meter, display_names

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def open_run(cfg, launch: Launch, device: torch.device, log_name: str, locks: bool = False) -> Iterator[float]:
    """Open the process group, OUT_DIR and the log for the duration of the block; yield the time of its start.

    Args:
        log_name: name of the log file in OUT_DIR, which also gets a ConfigError that ends the block; empty: no file.
        locks: lock OUT_DIR against other runs that lock it.

    Raises:
        ConfigError: OUT_DIR cannot be created, or another run has locked it.
    """
    set_backends(cfg, device)
    settings = cfg.DIST
    limits = {"timeout_s": settings.TIMEOUT_S, "startup_timeout_s": settings.STARTUP_TIMEOUT_S}
    group = process_group(launch, device, backend=settings.BACKEND, report_dir=cfg.OUT_DIR, **limits)
    mirror: Any = None
    if locks and url_of(cfg.OUT_DIR):
        mirror = importlib.import_module("distribuuuu.mirror.sync").MirrorClient(cfg.OUT_DIR)
    has_log = False
    with mirror or contextlib.nullcontext():  # the mirror ends last: other processes do not wait for it
        try:
            with group:
                start = time.perf_counter()
                dist.on_main(lambda: make_out_dir(cfg.OUT_DIR))
                with lock_out_dir(cfg.OUT_DIR) if locks else contextlib.nullcontext():
                    if mirror:
                        dist.on_main(mirror.start)
                    has_log = bool(log_name)
                    with logging_to(cfg.OUT_DIR, log_name), explaining_out_of_memory(cfg.MODEL.ARCH):
                        describe_machine(launch, device)
                        yield start
                        duration = format_duration(time.perf_counter() - start)
                        logger.info("finished in %s; files: %s", duration, cfg.OUT_DIR)
        except ConfigError as error:  # after the group, which knows whose error it is
            if has_log and (launch.rank == 0 or error.one_process):  # the command prints it to the terminal
                append_to_log(cfg.OUT_DIR, log_name, *map(str, error.problems))
            raise


@contextlib.contextmanager
def explaining_out_of_memory(arch: str) -> Iterator[None]:
    """Raise out-of-memory errors of the block as `OutOfMemory`, see out_of_memory.py."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        importlib.import_module("distribuuuu.engine.out_of_memory").explain(error, arch)
        raise


def set_backends(cfg, device: torch.device) -> None:
    """Apply CUDNN.BENCHMARK, CUDNN.DETERMINISTIC and, on CUDA, TRAIN.MATMUL_PRECISION; and a quota of CPU cores."""
    if "OMP_NUM_THREADS" not in os.environ and (cores := count_cores()) < torch.get_num_threads():
        torch.set_num_threads(cores)  # torch does not know the quotas of containers
    if device.type == "cuda":  # not on CPUs: torch would lower the precision on some of them, and change the results
        torch.set_float32_matmul_precision(cfg.TRAIN.MATMUL_PRECISION)
    deterministic = cfg.CUDNN.DETERMINISTIC
    torch.backends.cudnn.benchmark = cfg.CUDNN.BENCHMARK and not deterministic
    torch.backends.cudnn.deterministic = deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def make_out_dir(out_dir: str, key: str = "OUT_DIR") -> None:
    """Create OUT_DIR; raise ConfigError if that fails, or if a file that a run writes is a link."""
    try:
        Path(out_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{key}: cannot create {out_dir}: {error.strerror}; fix: name another folder") from error
    if links := [name for name in RUN_FILES if Path(out_dir, name).is_symlink()]:
        fix = "remove it, or name the folder that it refers to"
        raise ConfigError(f"{key}: {Path(out_dir, links[0])} is a link, and a run writes through no link; fix: {fix}")


def write_config(cfg) -> None:
    """Write all options to OUT_DIR/CFG_DEST, from which the run can be repeated."""
    with replacing(Path(cfg.OUT_DIR) / cfg.CFG_DEST, "w", encoding="utf-8", newline="") as file:
        # Of a run at a URL it can be read on any machine.
        file.write(changed(cfg, {"OUT_DIR": url_of(cfg.OUT_DIR) or cfg.OUT_DIR}).dump())


def build_training(
    cfg, loader: TrainLoader, val_images: torch.Tensor, latest: Path | None, data: dict[str, Any] | None = None
) -> Training:
    """Return the objects of a training step, restored from a checkpoint or initialized.

    Args:
        val_images: an evaluation batch for the dry run, with the shape of later ones.
        latest: the newest checkpoint; None: start from MODEL.WEIGHTS, MODEL.PRETRAINED, FINETUNE.WEIGHTS or at random.
        data: the number of images and the digest of each split, which a checkpoint holds.

    Raises:
        ConfigError: the model, its weights, the batch size or the task contradicts the config.
    """
    precision = build_precision(cfg, loader.device)
    task = build_task(cfg, loader.images.classes, loader.device, precision)
    # The tensors that checkpoints leave out come from where they came from at the first start.
    leaves_out = type(task).unsaved_tensors is not Task.unsaved_tensors or cfg.FINETUNE.LORA
    is_pretrained = latest is None or bool(leaves_out)
    is_drawn = latest and leaves_out and cfg.RNG_SEED is None  # again, by the seed of the first start
    seed = read_checkpoint(latest, to_resume=True).get("seed") if latest and is_drawn else cfg.RNG_SEED
    state = task.state = build_state(cfg, task, loader, precision, is_pretrained, seed)
    state.data = data or {}
    content = resume_or_load_weights(cfg, state, latest)
    if state.images_seen < 0:  # the checkpoint does not tell
        state.images_seen = (state.epoch * loader.num_steps + state.step) * state.global_batch
    task.prepare_training(loader.plan, loader.images, loader.num_steps)
    if content:  # only now, for `prepare_training` may have made the tensors of the task
        restore_task(task, content.get("task"), latest or cfg.MODEL.WEIGHTS)
    check_task_state(task)
    model = prepare_model(cfg, task, state.model, loader, val_images)
    for evaluated in set(state.models.values()) - {model}:  # evaluations use neither the wrapper nor its compiled code
        _compile(cfg, evaluated)
    training = Training(cfg, task, state, model, loader, build_lr(cfg, loader.plan.global_batch), build_clipper(cfg))
    if cfg.MODEL.COMPILE == "step":
        importlib.import_module("distribuuuu.engine.static_step").use_static_steps(training)
    return training


def build_run(cfg, train_loader: TrainLoader, val_loader: Loader) -> Run:
    """Return the run of a config, resumed from the newest checkpoint of OUT_DIR or new; errors as `build_training`."""
    check_same_data(train_loader, val_loader)
    keep = cfg.CHECKPOINT
    checkpoints = CheckpointManager(cfg.OUT_DIR, keep.KEEP_LAST, keep.KEEP_EVERY)
    # With TRAIN.AUTO_RESUME False, a job that was restarted resumes its own run.
    latest = checkpoints.find_latest(None if cfg.TRAIN.AUTO_RESUME else _gather(list_jobs(only_restarted=True)))
    if latest is None:
        dist.on_main(lambda: check_warmup(cfg))  # which prints the problem once
    sets = {"train": train_loader.images, "val": val_loader.images}
    data = {name: {"images": len(images), "digest": images.digest} for name, images in sets.items()}
    training = build_training(cfg, train_loader, val_loader.zero_images(1), latest, data)
    check_finite_weights(training.state)
    describe_training(cfg, training.state, train_loader, val_loader)
    if dist.is_main():
        prepare_out_dir(cfg, checkpoints, latest, training.state)
    log = open_log(cfg, training.task, training.state, train_loader)
    stop = StopRequest(cfg.CHECKPOINT.MAX_HOURS)
    results = RunResults(training, val_loader.images, _hash_weights)
    return Run(**vars(training), val_loader=val_loader, checkpoints=checkpoints, results=results, log=log, stop=stop)


def _hash_weights(content: dict[str, Any], kind: str) -> str:
    return hash_tensors(weights_of(content, kind)["state_dict"])


def _gather(jobs: list[str]) -> list[str]:
    """Return the jobs of all processes: those of several nodes have several agents, of which some may be lost."""
    return sorted(set(itertools.chain(*dist.gather_objects(jobs))))


def check_finite_weights(state: TrainState) -> None:
    """Raise ConfigError, on every process, for weights that no checkpoint could hold, before the first step."""
    name = find_nonfinite({kind: model.state_dict() for kind, model in state.models.items()})
    if name := next(filter(None, dist.gather_objects(name)), None):
        message = f"got {state.arch}, whose tensor {name} is not finite; fix: other weights, or persistent=False for it"
        raise ConfigError(Problem("MODEL.ARCH", message))


def check_warmup(cfg) -> None:
    """Raise ConfigError if a new run would end before its warm-up; a run that is resumed keeps its schedule."""
    optim = cfg.OPTIM
    follows = optim.LR_UPDATE == "epoch" and optim.LR_POLICY in ("tri", "cos_after_warmup")  # an epoch later
    if 0 < optim.MAX_EPOCH < optim.WARMUP_EPOCHS + follows:
        limit = f"OPTIM.MAX_EPOCH {optim.MAX_EPOCH}{f' - 1 with {optim.LR_POLICY}' if follows else ''}"
        message = f"got {optim.WARMUP_EPOCHS:g}; expected at most {limit}, to reach OPTIM.BASE_LR; fix: set it to 0"
        raise ConfigError(Problem("OPTIM.WARMUP_EPOCHS", message, cfg.origins))


def build_state(
    cfg, task: Task, loader: TrainLoader, precision: Precision, pretrained: bool, seed: int | None = None
) -> TrainState:
    """Return the state before the first step; with published weights or FINETUNE.WEIGHTS if `pretrained`."""
    seed = dist.broadcast_object(secrets.randbits(31)) if seed is None else seed
    seed_cpu(derive_seed(seed))
    model = task.adapt_model(build_initial_model(cfg, loader.images.classes, pretrained))
    if cfg.DIST.SHARD == "fsdp":
        importlib.import_module("distribuuuu.checkpoint.unsaved").check_whole_weights(task, Task)
    if cfg.MODEL.SYNCBN:
        model = importlib.import_module("distribuuuu.distributed.sync_batchnorm").convert_sync_batchnorm(model)
    unsaved_names = list(task.unsaved_tensors(model))
    if cfg.FINETUNE.LORA:
        unsaved_names += importlib.import_module("distribuuuu.models.lora").add_adapters(cfg, model, task)
    if cfg.FINETUNE.FREEZE:
        importlib.import_module("distribuuuu.models.freeze").freeze_parts(cfg, model, task)
    if cfg.MODEL.ACT_CHECKPOINT:
        importlib.import_module("distribuuuu.distributed.activation_checkpoint").recompute_blocks(model)
    unsaved: dict[str, Any] = {}
    if unsaved_names:
        describe_unsaved = importlib.import_module("distribuuuu.checkpoint.unsaved").describe_unsaved
        unsaved = describe_unsaved(unsaved_names, model.state_dict(), cfg.MODEL.WEIGHTS)
    averages = task.averages(model)
    if cfg.EMA.HALF_LIFE or averages:
        averages = importlib.import_module("distribuuuu.optim.ema").build_averages(cfg, model, averages)
    parallelize = build_parallelize_fn(cfg, loader.device)
    parallelize(model)
    for average in averages.values():
        parallelize(average.model)
        average.pair_with(model)
    optimizer = build_optimizer(cfg, model, loader.plan.global_batch, lambda groups: task.param_groups(model, groups))
    best_metric, higher_is_better = task.primary_metric
    mean, std = (tuple(values) for values in statistics_of(cfg, loader.images))
    return TrainState(
        model=model,
        optimizer=optimizer,
        seed=seed,
        arch=cfg.MODEL.ARCH,
        classes=loader.images.classes,
        global_batch=loader.plan.global_batch,
        precision=precision,
        averages=averages,
        unsaved=unsaved,
        config={**dict(iter_options(cfg)), "DATA.MEAN": mean, "DATA.STD": std},
        plugins=importlib.import_module("distribuuuu.config.plugins").hash_plugins(cfg.PLUGINS) if cfg.PLUGINS else {},
        meter=Meter(task.train_metrics, len(task.classes), loader.device),
        best_metric=best_metric,
        higher_is_better=higher_is_better,
        jobs=_gather(list_jobs()),
    )


def build_initial_model(cfg, classes: Sequence[str], pretrained: bool) -> nn.Module:
    """Return the model at the start of a run, on the CPU, with the weights and the head of FINETUNE if `pretrained`.

    Raises:
        ConfigError: the model cannot be built, or the weights cannot be loaded.
    """
    model = build_model(cfg)
    if pretrained and (cfg.FINETUNE.WEIGHTS or cfg.MODEL.PRETRAINED):
        importlib.import_module("distribuuuu.models.finetune").load_initial(cfg, model, classes)
    return model


def prepare_model(cfg, task: Task, model: nn.Module, loader: TrainLoader, val_images: torch.Tensor) -> nn.Module:
    """Return the model for training steps: checked by a dry run, wrapped for several processes, compiled."""
    dummy_batch = loader.zero_images(loader.plan.micro_batch)
    unused, find_unused = dry_run(cfg, model, dummy_batch, val_images, task.num_outputs)
    if dist.is_distributed():
        ddp = importlib.import_module("distribuuuu.distributed.ddp")
        model = ddp.wrap_model(model, loader.device, dummy_batch, unused, find_unused)
    _compile(cfg, model)
    return model


def _compile(cfg, model: nn.Module) -> None:
    """Compile a model in place, as MODEL.COMPILE says."""
    if cfg.MODEL.COMPILE not in UNCOMPILED:
        importlib.import_module("distribuuuu.distributed.ddp").compile_model(model, cfg.MODEL.COMPILE)


def find_weights(cfg) -> str:
    """Return the file or the name of the weights that `evaluate_weights` evaluates, or 'pretrained'."""
    if given := cfg.MODEL.WEIGHTS:
        return given if is_published(given) else str(find_weights_file(given))
    named = cfg.MODEL.ARCH if names_backbone(cfg.MODEL.ARCH) else PUBLISHED if cfg.MODEL.PRETRAINED else ""
    return str(find_best(cfg.OUT_DIR, cfg.EMA.HALF_LIFE > 0) or named or best_path(cfg.OUT_DIR))


def build_test_model(cfg, task: Task, weights: str, images: torch.Tensor) -> nn.Module:
    """Return the model to evaluate, on the device, after a dry run of a batch of images.

    `weights` is a file, a run or the name of published ones; if it is empty, they are random. With a test set of
    TEST.LABELS, the logits are those of its labels alone.

    Raises:
        CheckpointError: the weights do not match the model or the classes of the data.
    """
    classes = task.classes
    if cfg.TEST.LABELS in TEST_SETS:
        from distribuuuu.data.datasets.imagenet_labels import read_classes

        classes = tuple(read_classes())
    model = build_model(cfg)
    if is_published(weights):
        from distribuuuu.models.finetune import load_weights

        load_weights(cfg, model, weights, classes, "MODEL.PRETRAINED", needs_head=True)
    model = task.adapt_model(model).to(task.device)
    if weights and not is_published(weights):
        weights = str(find_weights_file(weights))
        if find_card(weights):
            content = importlib.import_module("distribuuuu.models.pretrained").read_weights(Path(weights))
        else:
            content = read_checkpoint(weights)
        try:
            load_state_dict(model, content["state_dict"], weights)
        except CheckpointError as error:
            from distribuuuu.data.datasets.imagenet_labels import explain_more_classes

            raise CheckpointError(f"{error}{explain_more_classes(content, classes)}") from error
        if mismatch := find_class_mismatch(content, classes):
            raise CheckpointError(f"{weights}: was trained on other classes: {mismatch}")
        restore_task(task, content.get("task"), weights, in_training=False)
    if cfg.TEST.LABELS in TEST_SETS:
        from distribuuuu.models.head import select_outputs

        columns = torch.tensor(list(read_classes(cfg.TEST.LABELS).values()), device=task.device)
        select_outputs(model, columns, cfg.MODEL.NUM_CLASSES)
    dry_run_evaluation(cfg, model, images, task.num_outputs)
    _compile(cfg, model)
    return model


def prepare_out_dir(cfg, checkpoints: CheckpointManager, latest: Path | None, state: TrainState) -> None:
    """Archive the files of the previous run if this one does not resume it, and write the config; on the main process.

    It is called once the run is certain to start. Before that, the previous run in OUT_DIR is not changed.
    """
    for folder in (checkpoints.folder.parent, checkpoints.folder):
        remove_temporary_files(folder)  # of a killed run: this one holds the lock
    if latest and is_finished(cfg, state):  # its files stay as they are
        return
    for kind, path in list_bests(cfg.OUT_DIR).items() if latest else ():
        if kind not in state.models:  # of an earlier part of the run, which readers would take
            os.replace(path, checkpoints.folder / path.name)
    if latest is None and (list_bests(cfg.OUT_DIR) or not cfg.TRAIN.AUTO_RESUME):
        from distribuuuu.checkpoint.archive import archive_run

        names = [path.name for path in Path(cfg.OUT_DIR).glob(f"{Path(PREDICTIONS).stem}*.npz")]
        if archive := archive_run(checkpoints, (cfg.CFG_DEST, METRICS, RESULTS, *names, TRACKERS_FOLDER)):
            text = "a new run begins: checkpoints, best weights and config of the previous one were moved to %s"
            logger.info(text, archive)
    write_config(cfg)


def open_log(cfg, task: Task, state: TrainState, loader: TrainLoader) -> Log:
    """Return the log of the run from the position of the state; a new run logs a grid of augmented images."""
    writers: list[Any] = []
    if dist.is_main() and (cfg.LOG.TENSORBOARD or "tensorboard" in cfg.LOG.TRACKERS):
        writers.append(importlib.import_module("distribuuuu.records.tensorboard").EventFile(cfg.OUT_DIR))
    if dist.is_main() and (names := [name for name in cfg.LOG.TRACKERS if name != "tensorboard"]):
        trackers = importlib.import_module("distribuuuu.records.trackers.base")
        writers.append(trackers.TrackerProcesses(cfg.OUT_DIR, names, cfg.PLUGINS))
    log = Log(
        out_dir=cfg.OUT_DIR,
        train_metrics=display_names(task.train_metrics),
        eval_metrics=display_names(task.eval_metrics),
        num_epochs=cfg.OPTIM.MAX_EPOCH,
        num_steps=loader.num_steps,
        total_steps=total_steps(cfg, loader.num_steps),
        images_per_step=loader.plan.global_batch,
        timing=state.timing,
        writers=writers,
    )
    log.rewind(state.epoch, state.step)
    if writers and cfg.LOG.NUM_IMAGES and (state.epoch, state.step) == (0, 0):
        log.images("train/augmented", loader.preview(state.seed, cfg.LOG.NUM_IMAGES))
    return log
