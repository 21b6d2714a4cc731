"""Models that start from the weights that timm or torchvision publish for them."""

import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torchvision
from torch import nn

from distribuuuu.config import ConfigError, Problem
from distribuuuu.models.construction import Construction
from distribuuuu.models.resolve import Architecture

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublishedWeights:
    """Where weights are kept and which arguments make the builder load them."""

    where: str
    arguments: dict[str, Any]
    # Classes of the head that must be built to load them; None: the builder fits a head of any size itself.
    num_classes: int | None = None


def find_published(arch: Architecture) -> PublishedWeights:
    """Return the published weights of an architecture; nothing is fetched.

    A registered builder of your own has some when it takes `pretrained: bool`.

    Raises:
        ConfigError: there are none.
    """
    if arch.source == "timm":
        return _find_timm(arch)
    parameters = inspect.signature(arch.builder).parameters
    if "weights" in parameters:
        weights = torchvision.models.get_model_weights(arch.builder).DEFAULT
        return PublishedWeights(weights.url, {"weights": weights}, len(weights.meta["categories"]))
    if "pretrained" in parameters:
        return PublishedWeights(f"the weights of {arch.name}", {"pretrained": True})
    raise _no_weights(arch)


def _find_timm(arch: Architecture) -> PublishedWeights:
    import timm

    published = timm.get_pretrained_cfg(arch.name)  # None for a deprecated name, which stands for another
    if published is not None and not published.has_weights:
        raise _no_weights(arch)
    hub_id, url = (published.hf_hub_id, published.url) if published else ("", "")
    where = f"model.safetensors of https://huggingface.co/{hub_id}" if hub_id else url
    return PublishedWeights(where or f"the weights of {arch.name}", {"pretrained": True})


def _no_weights(arch: Architecture) -> ConfigError:
    remedy = "if you have a file of your own, give its path as MODEL.WEIGHTS or FINETUNE.WEIGHTS instead"
    return ConfigError(Problem("MODEL.PRETRAINED", f"{arch.name} has no published weights; {remedy}"))


def build_pretrained(construction: Construction) -> nn.Module:
    """Return the model with its published weights; a head for another number of classes starts fresh, and is logged.

    Raises:
        ConfigError: there are no weights, they cannot be fetched, or they do not fit MODEL.KWARGS.
    """
    published = find_published(construction.arch)
    num_classes = published.num_classes or construction.num_classes
    model = _load(construction, published, num_classes)
    fresh = _timm_head(model, construction.num_classes) if construction.arch.source == "timm" else []
    if num_classes != construction.num_classes:
        fresh = transplant_head(model, construction.build())
    if fresh:
        logger.info("weights from %s; left fresh: %s", published.where, ", ".join(fresh))
    else:
        logger.info("weights from %s", published.where)
    return model


def _load(construction: Construction, published: PublishedWeights, num_classes: int) -> nn.Module:
    try:
        return construction.build(**published.arguments, num_classes=num_classes)
    except (OSError, RuntimeError) as error:
        why = _one_line(error) or type(error).__name__
        if isinstance(error, OSError) or "invalid hash" in why:
            problem = (
                f"cannot fetch {published.where}: {why}; without a network, bring the file here and give its path as "
                "FINETUNE.WEIGHTS, or as MODEL.WEIGHTS if the classes are the same, instead"
            )
        elif "state_dict" in why:
            what = f"{construction.arch.name} with MODEL.KWARGS {construction.kwargs}"
            problem = f"{published.where} does not fit {what}: {why}"
        else:
            raise
        raise ConfigError(Problem("MODEL.PRETRAINED", problem)) from error


def _one_line(error: Exception, most: int = 300) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= most else f"{text[:most]} ..."


def transplant_head(model: nn.Module, fresh: nn.Module) -> list[str]:
    """Move the layers whose shapes differ from `fresh`, the same net for other classes, to `model`; return their names.

    The rest of `model`, its attributes included, stays as its builder made it for the weights.
    """
    donors = dict(fresh.named_modules())
    names = find_resized(model, fresh)
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, donors[name])
    return names


def find_resized(model: nn.Module, other: nn.Module) -> list[str]:
    """Return the layers of `model` whose own parameters have other shapes in `other`, the same net in another size."""
    others = dict(other.named_modules())
    return [name for name, layer in model.named_modules() if _shapes(layer) != _shapes(others[name])]


def _shapes(layer: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in layer.parameters(recurse=False)]


def _timm_head(model: nn.Module, num_classes: int) -> list[str]:
    """Return the layers that timm leaves fresh when the classes are not those of the weights."""
    published = model.pretrained_cfg
    if published["num_classes"] == num_classes or not published.get("classifier"):
        return []
    classifier = published["classifier"]
    return [classifier] if isinstance(classifier, str) else list(classifier)
