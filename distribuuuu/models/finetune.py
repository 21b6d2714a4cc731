"""Start from weights that were trained on other data: all that fits the model is taken; the head may start fresh."""

import argparse
import logging
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from distribuuuu.checkpoint.io import CheckpointError, find_class_mismatch, is_state_dict, read_checkpoint
from distribuuuu.checkpoint.locate import PUBLISHED, find_weights_file
from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import counted
from distribuuuu.distributed import comm as dist
from distribuuuu.models import as_finetune_problems, build_model, count_parameters, find_head
from distribuuuu.models.freeze import count_frozen, freeze

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]

# What wrappers put before the names of a model's tensors: DDP, lightning and others, detectors, torch.compile.
PREFIXES = ("module.", "model.", "backbone.", "_orig_mod.")
# Where a checkpoint keeps the moving average of the weights: ours, timm's.
EMA_KEYS = ("ema_state_dict", "state_dict_ema")


class IncompatibleWeightsError(ValueError):
    """Weights of another model: less than half of the tensors below the head, or of its matrices and kernels, fit."""


@dataclass(frozen=True)
class LoadReport:
    """What became of the tensors: those of the model, loaded or fresh, and those of the file that were not used."""

    loaded: list[str]
    fresh: list[str]
    unused: list[str]
    # How many of the fresh ones are below the head.
    num_misfits: int

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.fresh)
        parts = f"{len(self.loaded)} of {counted(total, 'tensor')} loaded; left fresh: {_some(self.fresh)}"
        return f"{parts}; of the file not used: {_some(self.unused)}"


def _some(names: list[str], num: int = 4) -> str:
    """Return how many names there are, and the first of them."""
    return f"{len(names)} ({', '.join(names[:num])}{', ...' * (len(names) > num)})" if names else "none"


def build_initial_model(cfg, classes: Sequence[str], pretrained: bool) -> nn.Module:
    """Return the model that a run begins with, on the CPU.

    Args:
        cfg: the config.
        classes: the names of the data's classes.
        pretrained: start from what MODEL.PRETRAINED or FINETUNE.WEIGHTS say; else from random weights.

    Raises:
        ConfigError: the model cannot be built, or the weights cannot be had or do not fit.
    """
    weights = cfg.FINETUNE.WEIGHTS if pretrained else ""
    if not weights:
        published = pretrained and cfg.MODEL.PRETRAINED
        return dist.local_main_first(lambda: build_model(cfg, True)) if published else build_model(cfg, False)
    if weights != PUBLISHED:
        model = build_model(cfg, pretrained=False)
        load_weights_file(cfg, model, classes)
        return model
    try:
        model = dist.local_main_first(lambda: build_model(cfg, pretrained=True))
    except ConfigError as error:
        raise ConfigError(as_finetune_problems(error), cfg.origins) from error
    if cfg.FINETUNE.HEAD_RESET:
        fresh, layers = build_model(cfg, pretrained=False).state_dict(), find_head(cfg, model)
        head = {name: tensor for name, tensor in fresh.items() if _is_in(name, layers)}
        model.load_state_dict(head, strict=False)
        logger.info("FINETUNE.HEAD_RESET: the head starts fresh: %s", _some(list(head)))
    return model


def freeze_parts(cfg, model: nn.Module) -> None:
    """Freeze what FINETUNE.FREEZE names, and log how much that is; call it when the layers are what they will be.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    if cfg.FINETUNE.FREEZE:
        freeze(model, cfg.FINETUNE.FREEZE)
        (numbers, norms), total = count_frozen(model), count_parameters(model)
        logger.info("frozen: %.3f of %.3f M parameters, %d batch norms", numbers / 1e6, total / 1e6, norms)


def load_weights_file(cfg, model: nn.Module, classes: Sequence[str]) -> None:
    """Load what fits of the file that FINETUNE.WEIGHTS names into a model that is as its constructor leaves it.

    Raises:
        ConfigError: there is no such file, it is not sound, or it is of another model.
    """
    settings = cfg.FINETUNE
    try:
        path = find_weights_file(settings.WEIGHTS)
        with torch.serialization.safe_globals([argparse.Namespace]):  # timm and torchvision keep their flags
            content = read_checkpoint(path)
    except CheckpointError as error:
        raise CheckpointError(Problem("FINETUNE.WEIGHTS", str(error)), cfg.origins) from error
    except ConfigError as error:
        raise ConfigError(Problem("FINETUNE.WEIGHTS", str(error)), cfg.origins) from error
    averages = [content.get(name) for name in EMA_KEYS if settings.EMA]
    average = next((tensors for tensors in averages if tensors and is_state_dict(tensors)), None)
    made_by = f" of MODEL.ARCH {content['arch']}" if content.get("arch") else ""
    try:
        transfer = load_backbone(model, average or content["state_dict"], find_head(cfg, model), settings.HEAD_RESET)
    except IncompatibleWeightsError as error:
        problem = f"{path}{made_by} does not fit {cfg.MODEL.ARCH}: {error}; was MODEL.ARCH another one?"
        raise ConfigError(Problem("FINETUNE.WEIGHTS", problem), cfg.origins) from error
    logger.info("fine-tuning from %s%s: %s", path, ", its moving average" * bool(average), transfer)
    if transfer.num_misfits:
        logger.warning("%s below the head randomly initialized: is the file%s of another MODEL.ARCH, MODEL.KWARGS or "
                       "TRAIN.IM_SIZE?", counted(transfer.num_misfits, "tensor"), made_by)  # fmt: skip
    if not settings.HEAD_RESET:
        other = find_class_mismatch(content, classes)
        if other:
            logger.warning("the head was trained on other classes: %s; FINETUNE.HEAD_RESET True starts it fresh", other)


def load_backbone(model: nn.Module, state_dict: Tensors, head: Collection[str], reset_head: bool = False) -> LoadReport:
    """Load every tensor whose name and shape fit; names may differ by what wrappers put before them.

    A layer of the head is loaded whole or not at all. Where timm has a conversion for the model it is tried, which also
    resamples position embeddings to another size of the image.

    Args:
        model: the model; what is not loaded stays as it is.
        state_dict: the weights.
        head: the names of the layers of the head.
        reset_head: load none of them.

    Raises:
        IncompatibleWeightsError: less than half of what is below the head fits; the model is as it was.
    """
    mine = model.state_dict()
    backbone = [name for name in mine if not _is_in(name, head)]
    taken, unused = match_tensors(mine, state_dict)
    if any(name not in taken for name in backbone):
        converted = match_tensors(mine, convert_by_timm(model, _without_prefixes(state_dict, mine)))
        if len(converted[0]) > len(taken):
            taken, unused = converted
    whole = {layer for layer in head if not reset_head and all(name in taken for name in mine if _is_in(name, [layer]))}
    dropped = [name for name in taken if _is_in(name, head) and not _is_in(name, whole)]
    loaded = {name: taken[name] for name in mine if name in taken and name not in dropped}
    kernels = [name for name in backbone if mine[name].ndim > 1]
    for names in (backbone, kernels):  # vectors fit soon, those of norms even between a ResNet-50 and a ResNet-18
        misfits = [name for name in names if name not in loaded]
        if 2 * len(misfits) > len(names):
            raise IncompatibleWeightsError(_misfit(misfits, mine, state_dict, len(names)))
    model.load_state_dict(loaded, strict=False)
    fresh = [name for name in mine if name not in loaded]
    return LoadReport(list(loaded), fresh, [*dropped, *unused], sum(name in backbone for name in fresh))


def _is_in(name: str, layers: Collection[str]) -> bool:
    return name.rpartition(".")[0] in layers


def _misfit(misfits: list[str], mine: Tensors, theirs: Tensors, num: int) -> str:
    named = _without_prefixes(theirs, mine)
    shapes = {name: tuple(named[name].shape) if name in named else "missing" for name in misfits[:2]}
    examples = ", ".join(f"{name} is {tuple(mine[name].shape)} here, {shape} there" for name, shape in shapes.items())
    others = [name for name in named if name not in mine][:2]
    instead = f", with {', '.join(others)} instead" if others else ""
    return f"{len(misfits)} of {counted(num, 'tensor')} below its head not in it, e.g. {examples}{instead}"


def match_tensors(mine: Tensors, theirs: Tensors) -> tuple[Tensors, list[str]]:
    """Return those of `theirs` that fit, under our names, and the names of the others."""
    named = _without_prefixes(theirs, mine)
    taken = {name: named[name] for name in mine if name in named and named[name].shape == mine[name].shape}
    return taken, [name for name in named if name not in taken]


def _without_prefixes(theirs: Tensors, known: Iterable[str]) -> Tensors:
    """Return tensors under the names that we know them by, the others under their names without prefixes."""
    known = set(known)
    by_core = {_core(name): name for name in known}
    renamed = {name: tensor for name, tensor in theirs.items() if name in known}
    for name, tensor in theirs.items():
        if name not in known:
            target = by_core.get(_core(name), _core(name))
            renamed[name if target in renamed else target] = tensor
    return renamed


def _core(name: str) -> str:
    """Return a name without all that wrappers put before it."""
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name


def convert_by_timm(model: nn.Module, state_dict: Tensors) -> Tensors:
    """Return weights as the conversion of a model of timm makes them; as they are where there is none or it fails."""
    home = type(model).__module__
    convert = getattr(sys.modules[home], "checkpoint_filter_fn", None) if home.startswith("timm.") else None
    if convert is None:
        return state_dict
    try:
        converted = convert(dict(state_dict), model)
    except (AssertionError, AttributeError, KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
        logger.warning("timm's conversion of the weights failed, so they are taken as they are: %r", error)
        return state_dict
    return {name: tensor for name, tensor in converted.items() if isinstance(tensor, torch.Tensor)}
