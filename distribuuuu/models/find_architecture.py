"""Model constructors: from MODEL.ARCH to a function, from MODEL.KWARGS and TRAIN.IM_SIZE to its arguments."""

import contextlib
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
from torch import nn

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.derived import Size
from distribuuuu.config.model_names import OWN_KEYS, SOURCES, find_unknown_keywords, keep_names
from distribuuuu.config.options import IMAGENET_CLASSES
from distribuuuu.config.registry import MODELS

Constructor = Callable[..., nn.Module]
Parameters = dict[str, inspect.Parameter]

# Names of the image-size parameter in this package, timm and torchvision.
SIZE_NAMES = ("im_size", "img_size", "image_size")
# The parameter with which some timm models accept other image sizes too.
DYNAMIC_SIZE = "dynamic_img_size"
# Names of the parameter for the channels of an image.
CHANNEL_NAMES = ("in_channels", "in_chans")


@dataclass(frozen=True)
class Architecture:
    """A model name without its prefix, the source that has it, and its constructor, called with num_classes=..."""

    name: str
    source: str
    constructor: Constructor


@dataclass(frozen=True)
class ModelSpec:
    """An architecture and the arguments of its constructor.

    Attributes:
        kwargs: MODEL.KWARGS, without those that name weights, see `OWN_KEYS`.
        im_size: TRAIN.IM_SIZE under the constructor's name for it; empty if it has none or MODEL.KWARGS sets it.
        channels: DATA.CHANNELS. A constructor without a parameter for it builds a model of three, whose first
            convolution is replaced.
    """

    arch: Architecture
    num_classes: int
    kwargs: dict[str, Any]
    im_size: dict[str, Size]
    channels: int = 3

    def build(self, **overrides: Any) -> nn.Module:
        """Return the model, randomly initialized unless `overrides` ask for weights.

        Raises:
            ConfigError: the constructor rejects a value of the config; without such values, its own error.
        """
        arguments = {"num_classes": self.num_classes, **self.im_size, **self._inputs(), **self.kwargs, **overrides}
        # That of a plug-in may read any file: its author is trusted.
        is_own = self.arch.source == "distribuuuu" and self.arch.constructor.__module__.partition(".")[0] not in SOURCES
        try:
            with contextlib.nullcontext() if is_own else _plain_data_only():
                model = self.arch.constructor(**arguments)
            if self.channels != 3 and not any(name in arguments for name in CHANNEL_NAMES):
                from distribuuuu.models.input_channels import replace_input

                replace_input(model, self.arch.name, self.channels, overrides.keys() & {"pretrained", "weights"})
            return model
        except ConfigError:
            raise
        except Exception as error:
            if not (self.kwargs or self.im_size):
                raise
            keys = [f"MODEL.KWARGS.{name}" for name in self.kwargs] + ["TRAIN.IM_SIZE"] * len(self.im_size)
            given = ", ".join(f"{name}={value!r}" for name, value in {**self.kwargs, **self.im_size}.items())
            message = f"{self.arch.name} rejects {given}: {str(error) or type(error).__name__}"
            raise ConfigError(Problem(tuple(keys), message)) from error

    def build_on_meta(self) -> nn.Module | None:
        """Return the model without memory or random numbers; None if its constructor computes with real tensors."""
        try:
            with torch.device("meta"):
                return self.build()
        except (RuntimeError, ConfigError) as error:
            if isinstance(error, RuntimeError) or isinstance(error.__cause__, RuntimeError):
                return None
            raise

    def _inputs(self) -> dict[str, int]:
        """Return the number of channels under the constructor's name for it; empty for three, or if it has none."""
        named = inspect.signature(self.arch.constructor).parameters
        name = "in_chans" if self.arch.source == "timm" else next((one for one in CHANNEL_NAMES if one in named), "")
        return {name: self.channels} if name and self.channels != 3 else {}


@contextlib.contextmanager
def _plain_data_only() -> Iterator[None]:
    """Make every `torch.load` in the block unpickle plain data only, whatever its caller asks for.

    torchvision's builders, and timm's if the first attempt fails, ask to unpickle anything that they have downloaded.
    """
    forced, opposite = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
    saved = {name: os.environ.pop(name, None) for name in (forced, opposite)}
    os.environ[forced] = "1"
    try:
        yield
    finally:
        del os.environ[forced]
        os.environ.update({name: value for name, value in saved.items() if value is not None})


def find_architecture(arch: str) -> Architecture:
    """Return the architecture of a name, from the first source that has it: this package, timm, torchvision.

    A prefix, `distribuuuu/NAME`, `timm/NAME` or `torchvision/NAME`, selects one source. timm takes seconds to import
    and is imported only for names that this package does not have.

    Raises:
        ConfigError: no source has the name; the message lists the nearest names of all of them.
    """
    prefix, _, name = arch.rpartition("/")
    sources = [source for source in SOURCES if prefix in ("", source)]
    for source in sources:
        constructor = _find_constructor(source, name)
        keep_names(source, functools.partial(list_names, source))
        if constructor is not None:
            return Architecture(name, source, constructor)
    from distribuuuu.hints.words import describe_unknown_model

    names = {source: list_names(source) for source in sources or SOURCES}
    raise ConfigError(Problem("MODEL.ARCH", describe_unknown_model(arch, names, SOURCES)))


def _find_constructor(source: str, name: str) -> Constructor | None:
    if source == "timm":
        import timm

        # is_model() ignores the tag after the dot: it accepts resnet50.no_such_tag.
        known = timm.is_model(name) and ("." not in name or name in timm.list_models(include_tags=True))
        return functools.partial(timm.create_model, name) if known else None
    if source == "torchvision":
        return torchvision.models.get_model_builder(name.partition(".")[0]) if name in list_names(source) else None
    return MODELS.get(name) if name in MODELS else None


def list_names(source: str) -> dict[str, list[str] | None]:
    """Return the names that a source knows, those of this package with their keywords, as `load_names`.

    Models of plug-ins are left out: other processes do not know them.
    """
    if source == "timm":
        import timm

        # Names that is_model() accepts and list_models() omits.
        deprecated: Callable[[], dict] = getattr(timm.models, "get_deprecated_models", dict)
        return dict.fromkeys([*timm.list_models(), *timm.list_models(include_tags=True), *deprecated()])
    if source == "torchvision":
        # The classifiers, also with the name of their weights; models for other tasks are in sub-modules.
        names = torchvision.models.list_models(module=torchvision.models)
        tags = (f"{name}.{one.name}" for name in names for one in torchvision.models.get_model_weights(name))
        return dict.fromkeys([*names, *tags])
    own = {name: MODELS.get(name) for name in MODELS.names()}
    keywords = {name: named_parameters(one) for name, one in own.items() if one.__module__.partition(".")[0] in SOURCES}
    return {name: None if is_open else settable_parameters(given) for name, (given, is_open) in keywords.items()}


def settable_parameters(parameters: Parameters) -> list[str]:
    """Return the parameters that a user may set: the entry function passes those without a default."""
    names = [name for name, parameter in parameters.items() if parameter.default is not parameter.empty]
    return sorted(set(names) - OWN_KEYS.keys())


def find_keywords(constructor: Callable, num_classes: int) -> tuple[Parameters, bool]:
    """Return the keyword parameters of a constructor, and whether it accepts unlisted ones too.

    If it accepts **kwargs, they are followed into the class that it builds, from __init__ to the parent's __init__.
    """
    named, is_open = named_parameters(constructor)
    classes: tuple[type, ...] = ()
    if is_open:
        with contextlib.suppress(RuntimeError), torch.device("meta"):  # some compute with real tensors
            classes = type(constructor(num_classes=num_classes)).__mro__
    for owner in itertools.takewhile(lambda one: one is not nn.Module, classes):  # which accepts none itself
        if is_open and "__init__" in vars(owner):
            inherited, is_open = named_parameters(vars(owner)["__init__"])
            named = {**inherited, **named}
    named.pop("self", None)
    return named, is_open


def named_parameters(function: Callable) -> tuple[Parameters, bool]:
    """Return the parameters that can be passed by name, and whether **kwargs is among the parameters."""
    parameters = inspect.signature(function).parameters
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name: parameter for name, parameter in parameters.items() if parameter.kind in by_name}
    return named, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def _to_plain_dict(value: Any) -> Any:
    """Convert config nodes, which are frozen, to dicts."""
    return {key: _to_plain_dict(item) for key, item in value.items()} if isinstance(value, dict) else value


def build_model_spec(cfg) -> ModelSpec:
    """Check the names in MODEL.KWARGS and return the specification of MODEL.ARCH; no real model is built.

    Raises:
        ConfigError: MODEL.ARCH or a name in MODEL.KWARGS is unknown; or the image size grows (TRAIN.IM_SIZE_START) and
            the model has one fixed size.
    """
    arch, kwargs = find_architecture(cfg.MODEL.ARCH), _to_plain_dict(cfg.MODEL.KWARGS)
    num_classes = cfg.MODEL.NUM_CLASSES or IMAGENET_CLASSES  # 0: there is no data that would tell
    parameters, is_open = find_keywords(arch.constructor, num_classes)
    # A model of a plug-in may have parameters without a default.
    known = kwargs if is_open else parameters
    allowed = [*settable_parameters(parameters), *(name for name in kwargs if name in known and name not in OWN_KEYS)]
    if problems := [Problem(*one) for one in find_unknown_keywords("MODEL.KWARGS", kwargs, arch.name, allowed)]:
        raise ConfigError(problems)
    given = {*kwargs, *OWN_KEYS, *SIZE_NAMES}
    required = (name for name, one in named_parameters(arch.constructor)[0].items() if one.default is one.empty)
    if missing := [name for name in required if name not in given]:
        fix = f"fix: set MODEL.KWARGS.{missing[0]}"
        raise ConfigError(Problem("MODEL.KWARGS", f"{arch.name} has no default for {', '.join(missing)}; {fix}"))
    size_name = next((name for name in SIZE_NAMES if name in parameters), None)
    if cfg.TRAIN.IM_SIZE_START and size_name and not kwargs.get(DYNAMIC_SIZE):
        remedy = f", or MODEL.KWARGS.{DYNAMIC_SIZE} True" if DYNAMIC_SIZE in parameters else ""
        message = f"{arch.name} has one fixed image size, its {size_name}; fix: set TRAIN.IM_SIZE_START 0{remedy}"
        raise ConfigError(Problem("TRAIN.IM_SIZE_START", message))
    is_set = not kwargs.keys().isdisjoint(SIZE_NAMES)
    im_size = {size_name: cfg.TRAIN.IM_SIZE} if size_name and not is_set else {}
    return ModelSpec(arch, num_classes, kwargs, im_size, cfg.DATA.CHANNELS)
