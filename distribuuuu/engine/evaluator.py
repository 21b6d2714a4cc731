"""Evaluation of every image exactly once, on any number of processes and with any batch size."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator

import torch
from torch import nn

from distribuuuu.config.errors import NonFiniteError, counted
from distribuuuu.config.run_files import TEST_LOG
from distribuuuu.data.batch import Batch, map_leaves
from distribuuuu.data.loader import Loader, build_loader, check_same_data
from distribuuuu.distributed.comm import gather_objects, is_distributed, mark_position
from distribuuuu.distributed.process_group import pick_device
from distribuuuu.distributed.sharding import inference, is_sharded
from distribuuuu.engine.build import build_test_model, open_run
from distribuuuu.engine.preflight import resolve_cfg
from distribuuuu.engine.run_description import describe_images, describe_model
from distribuuuu.launch.detect import detect_launch
from distribuuuu.optim.precision import build_precision
from distribuuuu.records.run_log import progress
from distribuuuu.tasks.base import Task, build_task, deploy_copy
from distribuuuu.tasks.metrics import Meter, StepOutput

logger = logging.getLogger(__name__)


def evaluate(
    task: Task,
    model: nn.Module,
    loader: Loader,
    on_output: Callable[[Batch, StepOutput], None] | None = None,
    check: Callable[[str], None] = mark_position,
) -> dict[str, float]:
    """Return count, loss and the evaluation metrics of a model over a data set. Every process must call it.

    An image that cannot be read counts as wrong or is left out, see `Task.wrong_output`; `broken` is their number.

    Args:
        model: the model, possibly sharded, without the DDP wrapper: processes may have different numbers of batches.
        loader: the evaluation loader; each process reads its share, which may be empty.
        on_output: called with each batch and the output of the task.
        check: called with the position after each batch, equally often on every process, e.g. to stop the run.

    Raises:
        RuntimeError: the number of evaluated images is not the size of the data set.
        ConfigError: the processes have other weights than the first one.
    """
    if is_distributed():
        from distribuuuu.distributed.replicas import broadcast_buffers, check_replicas

        check_replicas(model)
        broadcast_buffers(model)
    model = task.begin_evaluation(deploy_copy(task, model)).eval()
    meter, batches = Meter(task.eval_metrics, len(task.classes), loader.device), iter(loader)
    num_broken = num_left_out = 0
    with contextlib.nullcontext() if task.eval_gradients else inference(model):
        for number in progress(range(loader.max_num_batches), "validation", every=task.cfg.TEST.PRINT_FREQ):
            if batch := next(batches, None):  # else other processes have more images
                readable, broken = split_broken(batch)
                output = task.eval_step(model, readable or batch)
                answers = [(readable, output)] if readable else []  # else the output shows the form of an answer
                if broken:
                    num_broken += len(broken.images)
                    if wrong := task.wrong_output(broken, output):
                        answers.append((broken, wrong))
                    else:
                        num_left_out += len(broken.images)
                for part, answer in answers:
                    meter.update(answer)
                    if on_output:
                        on_output(part, answer)
            elif is_sharded(model):  # all processes take part in each forward pass
                task.eval_step(model, Batch(loader.zero_images(1), loader.zero_targets(1)))
            check(f"evaluation, batch {number + 1}")
    return count_images(meter.read(), len(loader.images), num_broken, num_left_out)


def check_finite(result: dict[str, float], source: str) -> dict[str, float]:
    """Return the result of an evaluation; raise NonFiniteError if its loss, so its scores, are infinite or NaN."""
    if not math.isfinite(result["loss"]):
        fix = "fix: name another checkpoint, or set TRAIN.AMP to none or bf16 if the scores exceed fp16"
        raise NonFiniteError(f"{source}: the model has scores that are not finite (loss {result['loss']}); {fix}")
    return result


def count_images(result: dict[str, float], num_images: int, num_broken: int, num_left_out: int) -> dict[str, float]:
    """Return a result with the number of broken images, if any, over all processes; RuntimeError: some are missing."""
    num_broken, num_left_out = (sum(counts) for counts in zip(*gather_objects((num_broken, num_left_out)), strict=True))
    if result["count"] + num_left_out != num_images:
        raise RuntimeError(f"evaluation saw {counted(int(result['count']), 'image')} of {num_images:,}")
    if num_broken:
        fate = "are left out" if num_left_out else "count as wrong"
        logger.warning("%s of the evaluation cannot be read and %s", counted(num_broken, "image"), fate)
    return result | ({"broken": num_broken} if num_broken else {})


def split_broken(batch: Batch) -> tuple[Batch | None, Batch | None]:
    """Return the images of a batch that could be read, and those that could not; None for none."""
    if batch.broken is None:
        return batch, None

    def take(rows: torch.Tensor) -> Batch | None:
        return map_leaves(torch.Tensor, lambda part: part[rows], batch._replace(broken=None)) if len(rows) else None

    return take((~batch.broken).nonzero()[:, 0]), take(batch.broken.nonzero()[:, 0])


@contextlib.contextmanager
def open_evaluation(cfg, weights: str = "") -> Iterator[tuple[Task, nn.Module, Loader]]:
    """Open process group, OUT_DIR and log for the block, and build task, model (`build_test_model`) and loader.

    Raises:
        ConfigError: the data, the model or the weights contradict the config.
    """
    cfg = resolve_cfg(cfg, weights)
    launch = detect_launch()
    device = pick_device(launch.local_rank)
    loader = build_loader(cfg, launch, device, train=False)
    with open_run(cfg, launch, device, TEST_LOG):
        check_same_data(loader)
        task = build_task(cfg, loader.images.classes, device, build_precision(cfg, device))
        model = build_test_model(cfg, task, weights, loader.zero_images(1))
        describe_model(cfg, model, loader)
        describe_images(cfg, loader)
        yield task, model, loader
