"""What a model would fail at in its first step or its first evaluation, said before either."""

import contextlib
import logging
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.config.reader import with_origin
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.fsdp import inference, is_sharded
from distribuuuu.engine.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

# Enough for batch norm, and little to compute.
MOST_IMAGES = 2
_TORCH = str(Path(torch.__file__).parent) + os.sep  # not torchvision


def dry_run(
    cfg, model: nn.Module, train_images: torch.Tensor, test_images: torch.Tensor, num_outputs: int | None
) -> tuple[list[str], bool]:
    """Rehearse an evaluation and steps of the first and the last size; returns what `dry_run_training` does."""
    dry_run_evaluation(cfg, model, test_images, num_outputs)
    if start := cfg.TRAIN.IM_SIZE_START:
        small_images = torch.zeros_like(train_images[:MOST_IMAGES, :, :start, :start])
        dry_run_training(cfg, model, small_images, num_outputs, "TRAIN.IM_SIZE_START")
    return dry_run_training(cfg, model, train_images, num_outputs)


def dry_run_training(
    cfg, model: nn.Module, images: torch.Tensor, num_outputs: int | None, size_key: str = "TRAIN.IM_SIZE"
) -> tuple[list[str], bool]:
    """Take a few images forward and backward, without a trace on the model.

    Returns the names of the parameters that never get a gradient, and whether others get none in some steps: a model
    may skip layers at random in training, so a parameter counts as unused if evaluation does not use it either.

    Args:
        cfg: the config.
        model: the model on its device, not wrapped; if it is sharded every process must call it.
        images: (N, 3, H, W) on the device, of which two are used.
        num_outputs: expected columns of the output; None: any number.
        size_key: the option that says how large they are.

    Raises:
        ConfigError: the model does not take them, or its answer is not one row of logits an image.
    """
    model.train()
    with _untouched(model), _explained(cfg, (size_key, "TRAIN.BATCH_SIZE"), images):
        logits = model(images[:MOST_IMAGES])
        _check_logits(cfg, logits, len(images[:MOST_IMAGES]), num_outputs)
        logits.sum().backward()
        skipped = unused = _without_gradient(model)
        if unused and not is_sharded(model):
            model.eval()
            model(images[:1]).sum().backward()  # adds to the gradients that are there
            unused = _without_gradient(model)
    if unused:
        names = ", ".join(unused[:4]) + ", ..." * (len(unused) > 4)
        logger.warning("%s without a gradient, not trained: %s", counted(len(unused), "parameter"), names)
    return unused, len(skipped) > len(unused)


def _without_gradient(model: nn.Module) -> list[str]:
    return [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]


def dry_run_evaluation(cfg, model: nn.Module, images: torch.Tensor, num_outputs: int | None) -> None:
    """Take images (N, 3, H, W) of an evaluation through a model; raises and asks as `dry_run_training`."""
    model.eval()
    with _explained(cfg, ("TEST.CROP_SIZE", "TRAIN.IM_SIZE"), images), inference(model):
        _check_logits(cfg, model(images), len(images), num_outputs)


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Give a model its buffers back after a block, and no gradients."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        model.zero_grad()
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)


@contextlib.contextmanager
def _explained(cfg, keys: tuple[str, ...], images: torch.Tensor) -> Iterator[None]:
    """Say what a model's error in the block has to do with the config."""
    try:
        yield
    except ConfigError:
        raise
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        if dist.is_communication_error(error) or is_out_of_memory(error):
            raise
        where = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_TORCH)]
        place = f"{'/'.join(Path(where[-1].filename).parts[-3:])}:{where[-1].lineno}"
        about = ", ".join(with_origin(cfg, key) for key in ("MODEL.ARCH", *keys))
        what = f"{len(images)} of {images.shape[-2]} x {images.shape[-1]} px"
        message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{about}: {cfg.MODEL.ARCH} fails on images, {what} at a time: {message} ({place})"
        ) from error


def _check_logits(cfg, logits: object, num: int, num_outputs: int | None) -> None:
    expected = (num, num_outputs)
    if isinstance(logits, torch.Tensor) and (logits.shape == expected or (num_outputs is None and len(logits) == num)):
        return
    got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else f"a {type(logits).__name__}"
    remedy = "; heads beside the last one have to be off, see MODEL.KWARGS" * (not isinstance(logits, torch.Tensor))
    arch = with_origin(cfg, "MODEL.ARCH")
    raise ConfigError(f"{arch}: {cfg.MODEL.ARCH} answers {got}, not logits {expected}{remedy}")
