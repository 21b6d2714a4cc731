"""Keyword parameters of a model's constructor."""

import contextlib
import inspect
import itertools
from collections.abc import Callable

import torch
from torch import nn

from distribuuuu.config.model_names import OWN_KEYS

Parameters = dict[str, inspect.Parameter]


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
