"""Content of results.json, of a training run, and of test_results.json, of an evaluation."""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from distribuuuu.checkpoint.snapshot import hash_tensors
from distribuuuu.checkpoint.weights_files import KINDS
from distribuuuu.config.derived import show_size
from distribuuuu.config.errors import counted
from distribuuuu.config.plugins import hash_plugins
from distribuuuu.config.registry import dataset_name
from distribuuuu.distributed import comm as dist
from distribuuuu.engine.run import Run, is_finished
from distribuuuu.engine.state import TrainState
from distribuuuu.models import count_parameters
from distribuuuu.records import results
from distribuuuu.records.environment import describe_environment, describe_hardware, find_commit, list_versions
from distribuuuu.records.log_table import format_result
from distribuuuu.tasks.base import Task
from distribuuuu.tasks.metrics import display_names

logger = logging.getLogger(__name__)


def collect_metadata(cfg, task: Task, model: nn.Module) -> dict:
    """Return the entries of results.json that are known before training. Every process must call it."""
    is_synthetic = dataset_name(cfg) in ("dummy", "shapes")
    return {
        "config": results.config_name(cfg),
        "overrides": results.list_overrides(cfg),
        "config_hash": results.hash_config(cfg),
        "model": {"arch": cfg.MODEL.ARCH, "params_m": count_parameters(model) / 1e6},
        "data": {
            "name": dataset_name(cfg),
            "folder": None if is_synthetic else Path(cfg.TRAIN.DATASET).absolute().name,
            "num_classes": cfg.MODEL.NUM_CLASSES,
        },
        "evaluation": {**results.describe_evaluation(cfg), **describe_metrics(task)},
        "hardware": describe_hardware(task.device),
        "environment": describe_environment(task.device),
        "versions": list_versions(),
        "commit": find_commit() if dist.is_main() else None,
        **({"plugins": hash_plugins(cfg.PLUGINS)} if cfg.PLUGINS else {}),
    }


def describe_metrics(task: Task) -> dict:
    """Return the entries of results.json about the metrics: display names, k of top-k, and the kind of targets."""
    topk = task.eval_metrics.get("topk")
    return {
        "metrics": display_names(task.eval_metrics),
        **({"k": topk.topk} if topk else {}),
        **({"multilabel": True} if task.multilabel else {}),
    }


def describe_class_weights(cfg, task: Task) -> dict:
    """Return the weights of the classes that LOSS.CLASS_WEIGHTS auto has found; empty if they are set."""
    weights = getattr(getattr(task, "criterion", None), "weights", None)
    return {} if weights is None or not isinstance(cfg.LOSS.CLASS_WEIGHTS, str) else {"class_weights": weights.tolist()}


class RunResults:
    """OUT_DIR/results.json of a training run, rewritten after every evaluation. Every process must create one."""

    def __init__(self, run: Run):
        self.cfg = cfg = run.cfg
        state, plan = run.state, run.train_loader.plan
        self.out_dir = cfg.OUT_DIR
        metadata = collect_metadata(cfg, run.task, state.model)
        images = {"num_train": len(run.train_loader.images), "num_val": len(run.val_loader.images)}
        self.metadata = {
            **metadata,
            "seed": state.seed,
            "data": {**metadata["data"], **images},
            "training": {
                "px": cfg.TRAIN.IM_SIZE,
                "epochs_planned": cfg.OPTIM.MAX_EPOCH,
                "global_batch": plan.global_batch,
                "processes": plan.world_size,
                **describe_class_weights(cfg, run.task),
            },
            "peak_memory": {"of": "cuda" if run.task.device.type == "cuda" else "host"},
        }
        self._unwritten: tuple[results.Progress, dict[str, dict], dict[str, Any]] | None = None
        if dist.is_main() and (state.epoch, state.step) == (0, 0):
            results.archive_results(self.out_dir)

    def prepare(self, state: TrainState, evaluations: dict[str, dict]) -> Callable[[dict[str, Any]], None]:
        """Return a function that writes the evaluations of an epoch with its checkpoint. Every process must call it.

        It may run in another thread, after that of the epoch before. If it cannot write, the error is logged, and
        `finish` tries again.

        Args:
            state: the state after `finish_epoch`.
            evaluations: the result of `evaluate` for each kind of weights, e.g. {"raw": ..., "ema": ...}.
        """
        progress = results.Progress(
            epochs=state.epoch,
            is_finished=is_finished(self.cfg, state),
            hours=state.seconds / 3600,
            images_per_s=state.timing.images_per_s,
            peak_memory_mib=state.peak_memory_mib(),
            metric=state.best_metric,
            bests={
                kind: (best.value, best.epoch + 1 if best.epoch >= 0 else None)
                for kind, best in state.bests.items()
                if best.epoch >= 0 or best.value > 0
            },
        )
        return functools.partial(self._write, progress, evaluations)

    def _write(self, progress: results.Progress, evaluations: dict[str, dict], content: dict[str, Any]) -> None:
        if not dist.is_main():
            return
        metadata = self.metadata
        if progress.is_finished:
            metadata = {**metadata, "weights_sha256": {k: hash_tensors(content[KINDS[k].tensors]) for k in evaluations}}
        is_written = results.write_results(self.out_dir, metadata, progress, evaluations)
        self._unwritten = None if is_written else (progress, evaluations, content)

    def finish(self) -> None:
        """Write the results that could not be written so far, if any."""
        if self._unwritten:
            self._write(*self._unwritten)


def write_test_results(cfg, task: Task, model: nn.Module, weights: str, evaluations: dict[str, dict]) -> None:
    """Log evaluations and write them to OUT_DIR/test_results.json. Every process must call it.

    Args:
        cfg: the config.
        task: the task that computed the metrics.
        model: the evaluated model.
        weights: the file of its weights.
        evaluations: the result of `evaluate` for each kind of weights, e.g. {"raw": ...}.
    """
    metadata = collect_metadata(cfg, task, model)
    size = metadata["evaluation"]
    sides = [show_size(size[name]) for name in ("resize", "crop")]
    logger.info("weights: %s; images: resized to %s px, cropped to %s px", weights, *sides)
    for kind, result in evaluations.items():
        images = counted(result["count"], "image") + ("" if kind == "raw" else f", {kind} weights")
        logger.info("validation of %s: %s", images, format_result(result, display_names(task.eval_metrics), 3))
    if dist.is_main():
        results.write_evaluation(cfg.OUT_DIR, metadata, weights, evaluations)
