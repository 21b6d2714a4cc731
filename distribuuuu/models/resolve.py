"""From a name in MODEL.ARCH to the function that builds the model."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torchvision
from torch import nn

from distribuuuu.config import ConfigError
from distribuuuu.registry import MODELS, near_matches


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
    sources = [source for source in _FINDERS if prefix in ("", source)]
    for source in sources:
        builder = _FINDERS[source](name)
        if builder is not None:
            return Architecture(name, source, builder)
    raise ConfigError(f"MODEL.ARCH: unknown model {arch!r}{_hint(prefix, name, sources)}")


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


def _timm_names() -> list[str]:
    import timm

    return [*timm.list_models(), *timm.list_models(include_tags=True)]


_FINDERS = {"distribuuuu": _find_registered, "timm": _find_timm, "torchvision": _find_torchvision}
_NAMES = {"distribuuuu": MODELS.names, "timm": _timm_names, "torchvision": _torchvision_names}


def _hint(prefix: str, name: str, sources: list[str]) -> str:
    """Return the end of the message: the near names, or where was looked."""
    near = near_matches(name, {known for source in sources or _NAMES for known in _NAMES[source]()})
    if prefix and not sources:
        forms = " or ".join(f"{source}/NAME" for source in _FINDERS)
        return f"; a prefix must be one of {forms}" + (f"; did you mean {', '.join(near)}?" if near else "")
    if near:
        return f"; did you mean {', '.join(f'{prefix}/{known}' if prefix else known for known in near)}?"
    return f"; nothing near it in {', '.join(sources)}"
