"""Evaluation: every image once, whatever the number of processes and the batch size."""

import contextlib
from collections.abc import Callable

import torch
from torch import nn

from distribuuuu.datasets.loader import Loader
from distribuuuu.metrics import ClassificationMeter, MultilabelMeter
from distribuuuu.parallel import broadcast_buffers


@torch.inference_mode()
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
        model: the bare model, without a wrapper: processes may have different numbers of batches.
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
    for images, labels in progress(loader):
        with autocast():
            logits = (model(images) + model(images.flip(-1))) / 2 if flip else model(images)
        meter.update(criterion(logits, labels), logits, labels)
    result = meter.read()
    if result["count"] != len(loader.images):
        raise RuntimeError(f"evaluation saw {result['count']} images of a set of {len(loader.images)}")
    return result
