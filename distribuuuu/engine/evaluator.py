"""Evaluation of every image exactly once, on any number of processes and with any batch size."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from distribuuuu.config import Config
from distribuuuu.config.errors import counted
from distribuuuu.config.run_files import TEST_LOG
from distribuuuu.data.batch import Batch
from distribuuuu.data.loader import Loader, build_loader, check_same_data
from distribuuuu.data.normalize import pad_batch
from distribuuuu.distributed.ddp import broadcast_buffers
from distribuuuu.distributed.fsdp import inference, is_sharded
from distribuuuu.distributed.process_group import pick_device
from distribuuuu.distributed.watchdog import marked
from distribuuuu.engine.build import build_test_model, open_run
from distribuuuu.engine.out_of_memory import explain_out_of_memory
from distribuuuu.engine.preflight import resolve_num_classes
from distribuuuu.engine.run_description import describe_images, describe_model
from distribuuuu.launch.detect import Launch, detect_launch
from distribuuuu.optim.precision import build_precision
from distribuuuu.records.run_log import evaluation_bar
from distribuuuu.tasks.base import Task, build_task
from distribuuuu.tasks.meter import Meter


class PaddedBatches:
    """An evaluation loader padded to the same number of batches on every process.

    The padding is a batch of one zero image. A sharded model needs it, because all processes take
    part in each forward pass.
    """

    def __init__(self, loader: Loader):
        self.max_num_batches = loader.max_num_batches
        self._loader = loader

    def __len__(self) -> int:
        return self.max_num_batches

    def __iter__(self) -> Iterator[Batch]:
        yield from self._loader
        for _ in range(len(self._loader), self.max_num_batches):
            yield Batch(self._loader.zero_images(1), self._loader.zero_targets(1))


class PaddedModel(nn.Module):
    """A model that gets each batch with zero images up to `num` images, whose outputs are cut off.

    The last batch of an evaluation then compiles nothing and measures no algorithms. It does not change the outputs of
    the other images: in evaluation mode, a model treats each image by itself.
    """

    def __init__(self, model: nn.Module, num: int):
        super().__init__()
        self.unpadded, self._num = model, num

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # a task may use other attributes of the model
            return getattr(super().__getattr__("unpadded"), name)

    def forward(self, images: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the output for the images (N, C, H, W); with further arguments, nothing is padded."""
        num = len(images)
        if num >= self._num or args or kwargs:
            return self.unpadded(images, *args, **kwargs)

        def cut(output: torch.Tensor) -> torch.Tensor:
            return output[:num] if output.shape[:1] == (self._num,) else output

        return tree_map_only(torch.Tensor, cut, self.unpadded(pad_batch(images, self._num)))


def evaluate(task: Task, model: nn.Module, loader: Loader, progress: Callable = iter) -> dict[str, float]:
    """Return count, loss and the evaluation metrics of a model over a data set. Every process must call it.

    Args:
        task: the task that evaluates a batch.
        model: the model, possibly sharded, without the DDP wrapper: processes may have different numbers of batches.
        loader: the evaluation loader; each process reads its share, which may be empty.
        progress: a function that wraps the loader, e.g. to show a progress bar.

    Raises:
        RuntimeError: the number of evaluated images is not the size of the data set.
    """
    broadcast_buffers(model)
    model = task.begin_evaluation(model)
    model.eval()
    meter = Meter(task.eval_metrics, len(task.classes), loader.device)
    # Other CPU kernels round differently for each number of images, and gain nothing from padding.
    pads, most = loader.device.type == "cuda" or model._compiled_call_impl is not None, 0
    with contextlib.nullcontext() if task.eval_gradients else inference(model):
        for number, batch in enumerate(progress(PaddedBatches(loader) if is_sharded(model) else loader)):
            most = max(most, len(batch.images))
            called = PaddedModel(model, most) if pads and len(batch.images) < most else model
            output = task.eval_step(called, batch)
            if number < len(loader):
                meter.update(output)
    result = meter.read()
    if result["count"] != len(loader.images):
        raise RuntimeError(f"evaluation saw {counted(int(result['count']), 'image')} of {len(loader.images):,}")
    return result


@dataclass
class Evaluation:
    """The objects of an evaluation; the weights of `model` may be replaced between two calls of `evaluate`."""

    cfg: Config
    launch: Launch
    loader: Loader
    task: Task
    model: nn.Module

    @explain_out_of_memory("the evaluation", batch="test")
    def evaluate(self, task: Task) -> dict[str, float]:
        """Return count, loss and metrics of the model as it is."""
        bar = evaluation_bar(self.cfg.TEST.PRINT_FREQ)
        return evaluate(task, self.model, self.loader, lambda batches: marked(bar(batches), "evaluation"))


@contextlib.contextmanager
def open_evaluation(cfg, weights: str = "") -> Iterator[Evaluation]:
    """Open process group, OUT_DIR and log for the block, and build loader, task and model; on every process.

    Args:
        cfg: the config.
        weights: a file, or 'pretrained'; empty: the weights are random.

    Raises:
        ConfigError: the data, the model or the weights contradict the config.
    """
    cfg = resolve_num_classes(cfg)
    launch = detect_launch()
    device = pick_device(launch.local_rank)
    loader = build_loader(cfg, launch, device, train=False)
    with open_run(cfg, launch, device, TEST_LOG):
        check_same_data(loader)
        task = build_task(cfg, loader.images.classes, device, build_precision(cfg, device))
        model = build_test_model(cfg, task, weights, loader.zero_images(1))
        describe_model(cfg, model, loader)
        describe_images(cfg, loader)
        yield Evaluation(cfg, launch, loader, task, model)
