"""Fine-tuning: weights of other data, loaded as far as names and shapes match."""

import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distribuuuu.checkpoint import io as checkpoint_io
from distribuuuu.checkpoint.foreign_files import OrderError, Tensors, match_in_order, strip_wrappers
from distribuuuu.checkpoint.io import AVERAGE, CheckpointError, find_class_mismatch, load_state_dict, read_checkpoint
from distribuuuu.checkpoint.weights_files import EMA, find_weights_file, tensors_key
from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import counted, first_few
from distribuuuu.config.model_names import PUBLISHED, is_published
from distribuuuu.config.run_files import PROBE
from distribuuuu.distributed import comm as dist
from distribuuuu.models.build import find_weights_key
from distribuuuu.models.head import find_head, initialize_head, layer_of
from distribuuuu.models.input_channels import adapt_input
from distribuuuu.models.pretrained import check_published_head, read_backbone, read_weights, resolve_backbone

logger = logging.getLogger(__name__)

# Checkpoint entries with an average of the weights: this package's, timm's, those of others.
AVERAGES = (tensors_key(EMA), "state_dict_ema", AVERAGE)


class IncompatibleWeightsError(ValueError):
    """Weights of another model: more than half of the backbone's tensors, or of its matrices and kernels, mismatch."""


def load_initial(cfg, model: nn.Module, classes: Sequence[str]) -> None:
    """Load FINETUNE.WEIGHTS or MODEL.PRETRAINED, and FINETUNE.HEAD, into a newly built model."""
    load_weights(cfg, model, cfg.FINETUNE.WEIGHTS or PUBLISHED, classes, find_weights_key(cfg))
    if cfg.FINETUNE.HEAD:
        load_head(cfg, model, classes)


def load_head(cfg, model: nn.Module, classes: Sequence[str]) -> None:
    """Load FINETUNE.HEAD, the `weight` (classes, features) and the `bias` of a linear classifier, into the head.

    Raises:
        ConfigError: there is no such file, or it is the head of other classes or of another backbone.
    """
    path = Path(cfg.FINETUNE.HEAD).expanduser()
    fix = f"fix: name the {PROBE} of a fine-tuning of this backbone, or leave the option empty"
    try:
        if not path.is_file():
            raise ConfigError(f"no such file: {path}")
        content = read_checkpoint(path)
        if other := find_class_mismatch(content, classes):
            raise ConfigError(f"{path} is the head of other classes: {other}")
        for name in find_head(cfg, model):
            layer = model.get_submodule(name)
            for key in ("weight", "bias"):
                own, given = getattr(layer, key, None), content["state_dict"].get(key)
                if own is None or given is None or own.numel() != given.numel():
                    raise ConfigError(f"{path} does not fit the layer {name} of {cfg.MODEL.ARCH}")
                own.data.copy_(given.reshape(own.shape))
    except ConfigError as error:
        raise type(error)(Problem("FINETUNE.HEAD", f"{error}; {fix}"), cfg.origins) from error
    logger.info("the head is that of %s", path)


def load_weights(
    cfg, model: nn.Module, weights: str, classes: Sequence[str], key: str, needs_head: bool = False
) -> None:
    """Load the matching tensors of a file or of published weights into a newly built model. Every process must call it.

    Args:
        weights: a name, see models/pretrained.py, or `pretrained`: those of MODEL.ARCH.
        key: the option that names the weights.
        needs_head: all tensors of a file must match, and a head of other classes is an error; else it is drawn anew.

    Raises:
        ConfigError: the weights do not exist, are damaged, cannot be downloaded, or belong to another model.
    """
    is_file = not is_published(weights)
    try:
        if needs_head and not is_file:
            check_published_head(cfg.MODEL.ARCH if weights == PUBLISHED else weights, classes)
        path, content = _read_named(cfg, weights)
        averages = filter(None, map(content.get, AVERAGES))
        average = next((tensors for tensors in averages if checkpoint_io.is_state_dict(tensors)), None)
        tensors = average or content["state_dict"]
        if needs_head and is_file:
            load_state_dict(model, tensors, path)
            if mismatch := find_class_mismatch(content, classes):
                remedy = "if they mean the same, use a file that holds only the state dict"
                raise CheckpointError(f"{path}: was trained on other classes: {mismatch}; fix: {remedy}")
            return
        reset = cfg.FINETUNE.HEAD_RESET and not needs_head
        theirs = () if needs_head else content.get("classes") or ()
        report, num_missing = load_backbone(model, tensors, find_head(cfg, model), reset, (classes, theirs))
    except IncompatibleWeightsError as error:
        arch = f" of MODEL.ARCH {content['arch']}" if content.get("arch") else ""
        problem = f"{path}{arch} does not fit {cfg.MODEL.ARCH}: {error}; fix: set MODEL.ARCH to that of the file"
        raise ConfigError(Problem(key, problem), cfg.origins) from error
    except ConfigError as error:  # or a CheckpointError
        raise type(error)(Problem(key, str(error)), cfg.origins) from error
    logger.info("%s %s%s: %s", "weights:" if needs_head else "fine-tuning from", path,
                " (moving average)" if average else "", report)  # fmt: skip
    if num_missing:
        logger.warning("%s of the backbone randomly initialized: was the file trained with another MODEL.ARCH%s, "
                       "MODEL.KWARGS or TRAIN.IM_SIZE?", counted(num_missing, "tensor"),
                       f" ({content['arch']})" if content.get("arch") else "")  # fmt: skip
    mismatch = find_class_mismatch(content, classes)
    if mismatch and not reset and not {*classes} & {*theirs}:
        logger.warning("the head was trained on other classes: %s; to reset it set FINETUNE.HEAD_RESET True", mismatch)


def _read_named(cfg, weights: str) -> tuple[str, dict[str, Any]]:
    """Return where weights are from, and their content, see `read_checkpoint`."""
    if not is_published(weights):
        path = find_weights_file(weights)
        return str(path), read_weights(path)
    backbone = resolve_backbone(cfg.MODEL.ARCH if weights == PUBLISHED else weights)
    return backbone.source, dist.local_main_first(lambda: read_backbone(backbone, cfg.MODEL.NUM_CLASSES))


def load_backbone(
    model: nn.Module,
    state_dict: Tensors,
    head: Collection[str],
    reset_head: bool = False,
    classes: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> tuple[str, int]:
    """Load every tensor whose name and shape match, see `_rename`.

    A layer of the head, of which `head` has the names, is loaded completely or, as with `reset_head`, drawn anew.
    `classes` are the names of those of the model and of the file. If they differ, the head keeps the rows of the
    classes that both have.

    Returns:
        What was loaded, in words, and the number of tensors of the backbone that were not.

    Raises:
        IncompatibleWeightsError: more than half of the backbone does not match; the model is unchanged.
    """
    own = model.state_dict()
    theirs, order = _rename(model, state_dict, head)
    matched = _match(own, theirs)
    rows = {} if reset_head else _find_shared_rows(*classes)
    skipped = {layer_of(name) for name in own if reset_head or rows or name not in matched} & {*head}
    loaded = {name: tensor for name, tensor in matched.items() if layer_of(name) not in skipped}
    backbone = [name for name in own if layer_of(name) not in head]
    kernels = [name for name in backbone if own[name].ndim > 1]
    for names in (backbone, kernels):  # vectors match by chance: those of norms even between ResNet-50 and ResNet-18
        missing = [name for name in names if name not in loaded]
        if 2 * len(missing) > len(names):
            name, num = missing[0], counted(len(names), "tensor")
            got = tuple(theirs[name].shape) if name in theirs else "missing"
            first = f"{name}: expected {tuple(own[name].shape)}, got {got}"
            raise IncompatibleWeightsError(f"{len(missing)} of {num} of the backbone do not match, e.g. {first}{order}")
    model.load_state_dict(loaded, strict=False)
    initialize_head(model, skipped)
    new_head = {name: tensor for name, tensor in own.items() if layer_of(name) in skipped and name in theirs}
    is_kept = [_copy_rows(tensor, theirs[name], rows, *classes) for name, tensor in new_head.items()]

    kept = f"; the head keeps {len(rows)} of {counted(len(classes[0]), 'class')}" if any(is_kept) else ""
    drawn, unused = ([name for name in names if name not in loaded] for names in (own, theirs))
    text = f"{len(loaded)} of {counted(len(own), 'tensor')} loaded; randomly initialized: {first_few(drawn) or 'none'}"
    return f"{text}{kept}; unused in the file: {first_few(unused) or 'none'}", sum(name in backbone for name in drawn)


def _rename(model: nn.Module, state_dict: Tensors, head: Collection[str]) -> tuple[Tensors, str]:
    """Return the tensors of a file under the names of a model, and why they do not match in order, for an error.

    Prefixes of wrappers are ignored. If tensors of the backbone are missing, timm's conversion for the model is tried
    too: it also resamples position embeddings. If most are missing, the tensors are matched by their order.
    """
    own = model.state_dict()
    backbone = {name for name in own if layer_of(name) not in head}
    theirs = adapt_input_of(model, strip_wrappers(state_dict, own))
    if not backbone <= _match(own, theirs).keys():
        converted = adapt_input_of(model, strip_wrappers(convert_by_timm(model, theirs), own))
        theirs = max(theirs, converted, key=lambda tensors: len(_match(own, tensors)))
    if 2 * len(backbone & _match(own, theirs).keys()) < len(backbone):
        try:
            return adapt_input_of(model, match_in_order(model, state_dict, head)), ""
        except OrderError as error:
            return theirs, f"; {error}"
    return theirs, ""


def _match(own: Tensors, other: Tensors) -> Tensors:
    """Return the tensors of `other` that match `own` by name and shape, in its order."""
    return {name: other[name] for name in own if name in other and other[name].shape == own[name].shape}


def _find_shared_rows(classes: Sequence[str], others: Sequence[str]) -> dict[int, int]:
    """Return, by the index of each class that is among the others, its index there; empty if they are the same."""
    index = {name: row for row, name in enumerate(others)}
    return {} if [*classes] == [*others] else {row: index[name] for row, name in enumerate(classes) if name in index}


def _copy_rows(own: torch.Tensor, given: torch.Tensor, rows: Mapping[int, int], *classes: Sequence[str]) -> bool:
    """Copy the rows of shared classes into a tensor of a new head with a row for each class; tell whether it has."""
    shapes = [(len(names), *given.shape[1:]) for names in classes]
    if not rows or [tuple(own.shape), tuple(given.shape)] != shapes:
        return False
    own[[*rows]] = given[[*rows.values()]].to(own)
    return True


def adapt_input_of(model: nn.Module, tensors: Tensors) -> Tensors:
    """Return the tensors of a file of RGB images, the first convolutions adapted to the channels of the model."""
    own = model.state_dict()
    stems = [name for name, given in tensors.items() if name in own and given.ndim == own[name].ndim == 4
             and given.shape[1] == 3 != own[name].shape[1] and given[:, 0].shape == own[name][:, 0].shape]  # fmt: skip
    return {**tensors, **{name: adapt_input(tensors[name], own[name].shape[1]) for name in stems}}


def convert_by_timm(model: nn.Module, state_dict: Tensors) -> Tensors:
    """Return weights converted by the timm module of the model; unchanged if it has no conversion or that fails."""
    module = type(model).__module__
    convert = getattr(sys.modules[module], "checkpoint_filter_fn", None) if module.startswith("timm.") else None
    if convert is None:
        return state_dict
    try:
        converted = convert(dict(state_dict), model)
    except (AssertionError, AttributeError, KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
        logger.warning("timm's conversion of the weights failed, they are loaded unconverted: %r", error)
        return state_dict
    return {name: tensor for name, tensor in converted.items() if isinstance(tensor, torch.Tensor)}
