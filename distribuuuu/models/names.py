"""Names of the models of each source, for suggestions and for checks without torch."""

import inspect
from collections.abc import Callable

import torchvision

from distribuuuu.config.model_names import SOURCES, NameTable
from distribuuuu.config.registry import MODELS


def list_names(source: str) -> NameTable:
    """Return the names that a source knows; of this package without those of plug-ins, which other processes lack."""
    if source == "timm":
        import timm

        names = dict.fromkeys([*timm.list_models(), *timm.list_models(include_tags=True)])
        # Names that is_model() accepts and list_models() omits.
        deprecated: Callable[[], dict] = getattr(timm.models, "get_deprecated_models", dict)
        return NameTable(names, tuple(deprecated()))
    if source == "torchvision":
        return NameTable(dict.fromkeys(torchvision.models.list_models(module=torchvision.models)))
    models = ((name, MODELS.get(name)) for name in MODELS.names())
    return NameTable({name: _defaults(model) for name, model in models if model.__module__.split(".")[0] in SOURCES})


def _defaults(constructor: Callable) -> dict[str, bool] | None:
    """Return whether each parameter has a default; None if the constructor accepts **kwargs."""
    parameters = inspect.signature(constructor).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name: parameter.default is not parameter.empty for parameter in parameters}
