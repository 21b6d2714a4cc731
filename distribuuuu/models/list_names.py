"""Names of the models of this package, of timm and of torchvision."""

from collections.abc import Callable

import torchvision

from distribuuuu.config.model_names import SOURCES
from distribuuuu.config.registry import MODELS
from distribuuuu.models.constructor_keywords import named_parameters, settable_parameters


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
    return {
        name: None if is_open else settable_parameters(parameters) for name, (parameters, is_open) in keywords.items()
    }
