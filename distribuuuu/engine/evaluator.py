"""Evaluation: every image once, whatever the number of processes and the batch size."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from distribuuuu.config.errors import counted
from distribuuuu.data.loader import Loader
from distribuuuu.distributed.ddp import broadcast_buffers
from distribuuuu.distributed.fsdp import inference, is_sharded
from distribuuuu.tasks.metrics import ClassificationMeter, MultilabelMeter


class PaddedBatches:
    """An evaluation loader with as many batches on every process: a black image without labels where it has no more.

    A sharded model needs it: each of its forward passes is every process's.
    """

    def __init__(self, loader: Loader):
        self.max_num_batches = loader.max_num_batches
        self._loader = loader

    def __len__(self) -> int:
        return self.max_num_batches

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        yield from self._loader
        for _ in range(len(self._loader), self.max_num_batches):
            yield self._loader.zero_images(1), None


def evaluate(
    model: nn.Module,
    loader: Loader,
    criterion: Callable,
    meter: ClassificationMeter | MultilabelMeter,
    progress: Callable = iter,
    autocast: Callable = contextlib.nullcontext,
    flip: bool = False,
) -> dict:
    """Return what the meter reads of a model over a whole set: count, loss and its percentages.

    Args:
        model: the bare model, without a wrapper: processes may have different numbers of batches. May be sharded.
        loader: the evaluation loader; each process sees its share, and may see nothing.
        criterion: (logits, labels) to the mean loss.
        meter: the counters to use.
        progress: wraps the loader, to show a bar.
        autocast: the context of a forward pass.
        flip: average the logits of each image and its mirror image.

    Raises:
        RuntimeError: the number of images seen is not the size of the set.
    """
    broadcast_buffers(model)
    model.eval()
    with inference(model):
        for images, labels in progress(PaddedBatches(loader) if is_sharded(model) else loader):
            with autocast():
                logits = model(images)
                if flip:  # a compiled model's second answer may take the place of its first
                    logits = (logits.clone() + model(images.flip(-1))) / 2
            if labels is not None:
                meter.update(criterion(logits, labels), logits, labels)
    result = meter.read()
    if result["count"] != len(loader.images):
        raise RuntimeError(f"evaluation saw {counted(result['count'], 'image')} of a set of {len(loader.images):,}")
    return result
