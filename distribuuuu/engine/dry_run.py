"""Dry run: one forward and backward pass and one evaluation batch before training, to fail early."""

import contextlib
import importlib
import logging
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import counted, first_few
from distribuuuu.distributed.comm import is_communication_error
from distribuuuu.distributed.sharding import inference, is_sharded, restored, sum_output

logger = logging.getLogger(__name__)

# Batch norm needs two.
MAX_IMAGES = 2
_TORCH = str(Path(torch.__file__).parent) + os.sep  # not torchvision


def dry_run(
    cfg, model: nn.Module, train_images: torch.Tensor, test_images: torch.Tensor, num_outputs: int | None
) -> tuple[list[str], bool]:
    """Run an evaluation batch, then a training step of the first and of the last image size, see `dry_run_training`."""
    dry_run_evaluation(cfg, model, test_images, num_outputs)
    if start := cfg.TRAIN.IM_SIZE_START:
        small_images = torch.zeros_like(train_images[:MAX_IMAGES, :, :start, :start])
        dry_run_training(cfg, model, small_images, num_outputs, "TRAIN.IM_SIZE_START")
    return dry_run_training(cfg, model, train_images, num_outputs)


def dry_run_training(
    cfg, model: nn.Module, images: torch.Tensor, num_outputs: int | None, size_key: str = "TRAIN.IM_SIZE"
) -> tuple[list[str], bool]:
    """Run a forward and a backward pass of two images; the model is restored.

    Return the names of the trainable parameters that neither training nor evaluation uses, and whether training has
    skipped others, which may get a gradient in other steps: a model may skip layers at random. If the model is sharded,
    every process must call it. `size_key` is the option that sets the image size.

    Raises:
        ConfigError: the model fails on the images, or does not return one row of logits per image.
    """
    model.train()
    images = images[:MAX_IMAGES]
    with restored(model), _explained(cfg, (size_key, "TRAIN.BATCH_SIZE"), images):
        output = model(images)
        _check_output(cfg, output, len(images), num_outputs)
        sum_output(output).backward()
        skipped = unused = _without_gradient(model)
        if unused and not is_sharded(model):
            model.eval()
            sum_output(model(images[:1])).backward()  # adds to the gradients of training
            unused = _without_gradient(model)
    if cfg.FINETUNE.LORA and (lost := [name for name in unused if ".lora_" in name]):
        message = f"{cfg.MODEL.ARCH} reads the weight of a layer without a call: {lost[0]}; fix: leave this layer out"
        raise ConfigError(Problem("FINETUNE.LORA.targets", message, cfg.origins))
    if unused:
        logger.warning("%s without a gradient, not trained: %s", counted(len(unused), "parameter"), first_few(unused))
    return unused, len(skipped) > len(unused)


def _without_gradient(model: nn.Module) -> list[str]:
    return [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]


def dry_run_evaluation(cfg, model: nn.Module, images: torch.Tensor, num_outputs: int | None) -> None:
    """Run a forward pass of evaluation images (N, 3, H, W); arguments and errors as for `dry_run_training`."""
    model.eval()
    with _explained(cfg, ("TEST.CROP_SIZE", "TRAIN.IM_SIZE"), images), inference(model):
        _check_output(cfg, model(images), len(images), num_outputs)


@contextlib.contextmanager
def _explained(cfg, keys: tuple[str, ...], images: torch.Tensor) -> Iterator[None]:
    """Raise the errors of a model within the block as a ConfigError that names the options."""
    try:
        yield
    except ConfigError:
        raise
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        is_out_of_memory = importlib.import_module("distribuuuu.engine.out_of_memory").is_out_of_memory
        if is_communication_error(error) or is_out_of_memory(error):
            raise
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_TORCH)]
        place = f"{'/'.join(Path(frames[-1].filename).parts[-3:])}:{frames[-1].lineno}"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        message = f"{cfg.MODEL.ARCH} fails on an input of shape {tuple(images.shape)}: {reason} ({place})"
        raise ConfigError(Problem(("MODEL.ARCH", *keys), message), cfg.origins) from error


def _check_output(cfg, logits: object, num_images: int, num_outputs: int | None) -> None:
    expected = (num_images, num_outputs)
    if num_outputs is None or (isinstance(logits, torch.Tensor) and logits.shape == expected):
        return
    got = f"has shape {tuple(logits.shape)}" if isinstance(logits, torch.Tensor) else f"is a {type(logits).__name__}"
    message = f"{cfg.MODEL.ARCH}: model output {got}; expected logits {expected}; fix: turn off auxiliary heads"
    raise ConfigError(Problem("MODEL.ARCH", f"{message} in MODEL.KWARGS"), cfg.origins)
