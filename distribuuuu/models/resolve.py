"""From a name in MODEL.ARCH to the function that builds the model."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torchvision
from torch import nn

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.model_names import SOURCES, NameTable, describe_unknown, keep_table
from distribuuuu.config.registry import MODELS


@dataclass(frozen=True)
class Architecture:
    """A model's name without prefix, the table that knows it, and its builder, called as builder(num_classes=...)."""

    name: str
    source: str
    builder: Callable[..., nn.Module]


def find_architecture(arch: str) -> Architecture:
    """Return the architecture of that name.

    The tables are asked in this order: this package's registry, timm, torchvision. `timm/NAME` and `torchvision/NAME`
    ask that one only, and so does `distribuuuu/NAME`. timm takes seconds to import, so it is imported only for a name
    that the registry does not know.

    Raises:
        ConfigError: no table knows the name; the message lists the nearest names of all of them.
    """
    prefix, _, name = arch.rpartition("/")
    sources = [source for source in SOURCES if prefix in ("", source)]
    for source in sources:
        builder = _FINDERS[source](name)
        keep_table(source, _TABLES[source])
        if builder is not None:
            return Architecture(name, source, builder)
    names = {source: _TABLES[source]().names for source in sources or SOURCES}
    raise ConfigError(Problem("MODEL.ARCH", describe_unknown(arch, names)))


def _find_registered(name: str) -> Callable[..., nn.Module] | None:
    return MODELS.get(name) if name in MODELS else None


def _find_timm(name: str) -> Callable[..., nn.Module] | None:
    import timm

    # is_model() looks at what stands before the dot only: resnet50.no_such_tag is a model to it.
    known = timm.is_model(name) and ("." not in name or name in timm.list_models(include_tags=True))
    return functools.partial(timm.create_model, name) if known else None


def _find_torchvision(name: str) -> Callable[..., nn.Module] | None:
    return torchvision.models.get_model_builder(name) if name in _torchvision_names() else None


def _torchvision_names() -> list[str]:
    """Return the classifiers only: detection, segmentation, video and quantized models live in sub-modules."""
    return torchvision.models.list_models(module=torchvision.models)


def _own_table() -> NameTable:
    return NameTable({name: _parameters_of(MODELS.get(name)) for name in MODELS.names()})


def _parameters_of(builder: Callable[..., nn.Module]) -> dict[str, bool] | None:
    """Return each parameter and whether it has a default; None where it passes others on."""
    parameters = inspect.signature(builder).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name: parameter.default is not parameter.empty for parameter in parameters}


def _timm_table() -> NameTable:
    import timm

    names = dict.fromkeys([*timm.list_models(), *timm.list_models(include_tags=True)])
    # is_model() knows them, list_models() does not.
    deprecated = getattr(timm.models, "get_deprecated_models", dict)()
    return NameTable(names, tuple(deprecated))


def _torchvision_table() -> NameTable:
    return NameTable(dict.fromkeys(_torchvision_names()))


_FINDERS = {"distribuuuu": _find_registered, "timm": _find_timm, "torchvision": _find_torchvision}
_TABLES = {"distribuuuu": _own_table, "timm": _timm_table, "torchvision": _torchvision_table}
