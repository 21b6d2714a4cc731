"""Call a model's constructor with what the config gives, and say it plainly when the two do not fit."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.model_names import OWN_KEYS, find_objection
from distribuuuu.models.resolve import Architecture

# What constructors here, in timm and in torchvision call the side of the image.
SIZE_NAMES = ("im_size", "img_size", "image_size")
# What lets some of timm's models take other sizes as well.
ANY_SIZE = "dynamic_img_size"


@dataclass(frozen=True)
class Keywords:
    """What a constructor can be given by name; when `is_open`, names that are not listed too."""

    parameters: dict[str, inspect.Parameter]
    is_open: bool = False


@dataclass(frozen=True)
class Construction:
    """An architecture with all that its builder is to be called with."""

    arch: Architecture
    num_classes: int
    # MODEL.KWARGS.
    kwargs: dict[str, Any]
    # TRAIN.IM_SIZE under the constructor's own name for it; empty when it has none or MODEL.KWARGS gives it.
    im_size: dict[str, int]

    def build(self, **more: Any) -> nn.Module:
        """Return the model, randomly initialised unless `more` says otherwise.

        Raises:
            ConfigError: the constructor refuses a value of the config. Where none is involved, its error is its own
                bug and passes through.
        """
        arguments = {"num_classes": self.num_classes, **self.im_size, **self.kwargs, **more}
        try:
            model = self.arch.builder(**arguments)
            has_more_heads = self.arch.source == "torchvision" and "aux_logits" not in self.kwargs
            return without_auxiliary_heads(model) if has_more_heads else model
        except TypeError as error:
            if not self.kwargs:
                raise
            raise self._refusal(error) from error
        except (ValueError, AssertionError) as error:  # timm and torchvision check values with asserts
            if not self.kwargs and not self.im_size:
                raise
            raise self._refusal(error) from error

    def build_on_meta(self) -> nn.Module | None:
        """Return the model without memory or random numbers; None when its constructor works only with real ones."""
        try:
            with torch.device("meta"):
                return self.build()
        except RuntimeError:
            return None

    def _refusal(self, error: Exception) -> ConfigError:
        keys = [f"MODEL.KWARGS.{name}" for name in self.kwargs] + ["TRAIN.IM_SIZE"] * len(self.im_size)
        given = ", ".join(f"{name}={value!r}" for name, value in {**self.kwargs, **self.im_size}.items())
        message = f"{self.arch.name} refuses {given}: {str(error) or type(error).__name__}"
        return ConfigError(Problem(tuple(keys), message))


def without_auxiliary_heads(model: nn.Module) -> nn.Module:
    """Return torchvision's GoogLeNet or Inception without what else they answer in training; others as they are."""
    if getattr(model, "aux_logits", False) is True:
        model.aux_logits = False
        for name, _ in list(model.named_children()):
            if name.lower().startswith("aux"):
                setattr(model, name, None)
    return model


def plan_construction(
    arch: Architecture, num_classes: int, kwargs: dict[str, Any], im_size: int, size_grows: bool = False
) -> Construction:
    """Check the names in `kwargs` and return the construction; nothing real is built.

    Raises:
        ConfigError: with a message for each unknown keyword, naming the near and the allowed ones; or, where the size
            of the images grows, for a model that takes one size only.
    """
    known = find_keywords(arch.builder, num_classes)
    objections = {name: _objection(name, arch.name, known) for name in kwargs}
    problems = [Problem(f"MODEL.KWARGS.{name}", message) for name, message in objections.items() if message]
    if problems:
        raise ConfigError(problems)
    size_names = [name for name in SIZE_NAMES if name in known.parameters]
    if size_grows and size_names and not kwargs.get(ANY_SIZE):
        remedy = f", or MODEL.KWARGS.{ANY_SIZE} True" if ANY_SIZE in known.parameters else ""
        message = f"{arch.name} takes images of one size only, its {size_names[0]}; set TRAIN.IM_SIZE_START 0{remedy}"
        raise ConfigError(Problem("TRAIN.IM_SIZE_START", message))
    if set(SIZE_NAMES) & set(kwargs):
        size_names = []
    return Construction(arch, num_classes, kwargs, dict.fromkeys(size_names[:1], im_size))


def _objection(name: str, model: str, known: Keywords) -> str | None:
    if known.is_open and name not in OWN_KEYS:
        return None
    # A parameter without a default is the entry function's to give.
    allowed = [parameter.name for parameter in known.parameters.values() if parameter.default is not parameter.empty]
    return find_objection(name, model, known.parameters, allowed)


def find_keywords(builder: Callable[..., nn.Module], num_classes: int) -> Keywords:
    """Return the keywords of `builder`: its own and, where it passes **kwargs on, those of the class that it builds."""
    named, is_open = _split(inspect.signature(builder).parameters)
    if not is_open:
        return Keywords(named)
    built = _find_class(builder, num_classes)
    if built is None:
        return Keywords(named, is_open=True)
    inherited = _class_keywords(built)
    return Keywords({**inherited.parameters, **named}, inherited.is_open)


def _find_class(builder: Callable[..., nn.Module], num_classes: int) -> type[nn.Module] | None:
    """Return the class of the model that `builder` makes, without making a real one."""
    try:
        with torch.device("meta"):
            return type(builder(num_classes=num_classes))
    except RuntimeError:  # it computes with real tensors: what it says it returns is the next best
        annotated = inspect.signature(builder).return_annotation
        is_model = inspect.isclass(annotated) and issubclass(annotated, nn.Module)
        return annotated if is_model and annotated is not nn.Module else None


def _class_keywords(built: type[nn.Module]) -> Keywords:
    """Follow **kwargs from __init__ to the parent's __init__, up to nn.Module, which takes none."""
    parameters: dict[str, inspect.Parameter] = {}
    is_open = False
    for owner in built.__mro__[: built.__mro__.index(nn.Module)]:
        if "__init__" not in vars(owner):
            continue
        named, is_open = _split(inspect.signature(owner.__init__).parameters)
        parameters = {**named, **parameters}
        if not is_open:
            break
    parameters.pop("self", None)
    return Keywords(parameters, is_open)


def _split(parameters: Mapping[str, inspect.Parameter]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the parameters that have a name, and whether there is a **kwargs besides."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name: parameter for name, parameter in parameters.items() if parameter.kind in by_name}
    return named, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
