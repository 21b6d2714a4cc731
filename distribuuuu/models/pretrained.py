"""Models with the weights that timm or torchvision publish for them."""

import inspect
import logging
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import counted
from distribuuuu.files.file_kinds import explain_no_weights
from distribuuuu.models.find_architecture import Architecture, ModelSpec, find_architecture
from distribuuuu.models.head import find_head_of, find_resized_layers, initialize_head, replace_layers

logger = logging.getLogger(__name__)


def find_published(arch: Architecture, key: str = "MODEL.PRETRAINED") -> tuple[str, dict[str, Any]]:
    """Return the URL of the published weights of an architecture, and the arguments of its constructor that load them.

    Nothing is downloaded. A registered constructor has some if it has a parameter `pretrained`. `key` is the option
    that asks for them.
    """
    parameters = inspect.signature(arch.constructor).parameters
    if arch.source == "timm":
        import timm

        published = timm.get_pretrained_cfg(arch.name)  # None for a deprecated name, which stands for another
        if published is None or published.has_weights:
            hub_id, url = (published.hf_hub_id, published.url) if published else ("", "")
            source = f"model.safetensors of https://huggingface.co/{hub_id}" if hub_id else str(url)
            return source or f"the weights of {arch.name}", {"pretrained": True}
    elif "weights" in parameters:
        weights = torchvision.models.get_model_weights(arch.constructor).DEFAULT
        return weights.url, {"weights": weights}
    elif "pretrained" in parameters:
        return f"the weights of {arch.name}", {"pretrained": True}
    remedy = "set MODEL.WEIGHTS or FINETUNE.WEIGHTS to the path of a weights file instead"
    raise ConfigError(Problem(key, f"{arch.name} has no published weights; fix: {remedy}"))


def check_published_head(arch: str, classes: Sequence[str], key: str) -> None:
    """Check that the head of published weights answers with the classes of the data, in their order.

    Names are compared with the synsets and words of ImageNet if it has their number; numbers are taken for its own.

    Raises:
        ConfigError: there are no weights, or their head is one of other classes; `key` asks for them.
    """
    from timm import get_pretrained_cfg
    from timm.data import ImageNetInfo, infer_imagenet_subset

    found = find_architecture(arch)
    weights = find_published(found, key)[1].get("weights")
    published = get_pretrained_cfg(found.name) if found.source == "timm" else None
    num, problem = len(weights.meta["categories"]) if weights else published.num_classes if published else None, ""
    fix = ""
    if num is None:  # of a plug-in
        return
    subset = infer_imagenet_subset({"num_classes": num})
    if num != len(classes):
        from distribuuuu.data.datasets.imagenet_labels import explain_more_classes

        problem = f"has {counted(num, 'class')}, the data has {len(classes):,}"
        fix = explain_more_classes({}, classes)
    elif subset and not getattr(published, "label_names", None):
        info = ImageNetInfo(subset)
        names = zip(classes, info.label_names(), info.label_descriptions(), strict=True)
        others = [
            f"{words!r} where the data has {name!r}"
            for number, (name, synset, words) in enumerate(names)
            if name != synset and not _is_named(name, words, number)
        ]
        problem = f"has other classes, e.g. {others[0]}" if 2 * len(others) > num else ""
    if problem:
        tune = "; fix: fine-tune them on this data first (FINETUNE.WEIGHTS pretrained), and use the weights of that run"
        raise ConfigError(Problem(key, f"the head of the published weights of {arch} {problem}{fix or tune}"))


def _is_named(name: str, words: str, number: int) -> bool:
    """Tell whether a name is the first of the words of a class, or ends with its number."""
    plain = name.lower().replace("_", " ")
    return plain == words.partition(",")[0].lower() or bool(re.search(rf"(^|\D)0*{number}$", plain))


def build_pretrained(spec: ModelSpec, key: str) -> nn.Module:
    """Return the model with its published weights; the head is randomly initialized if the classes differ.

    Raises:
        ConfigError: there are no weights, they cannot be downloaded, or they do not fit MODEL.KWARGS.
    """
    source, arguments = find_published(spec.arch, key)
    # torchvision loads them only into a head of their own classes.
    num_classes = len(arguments["weights"].meta["categories"]) if "weights" in arguments else spec.num_classes
    model: Any = _load(spec, source, {**arguments, "num_classes": num_classes}, key)
    of_head = model.pretrained_cfg["num_classes"] if spec.arch.source == "timm" else num_classes
    if num_classes != spec.num_classes:
        initial = spec.build()
        replace_layers(model, initial, find_resized_layers(model, initial))
    is_new = of_head != spec.num_classes
    if is_new:
        initialize_head(model, find_head_of(spec, model))
    note = "; the head is randomly initialized" if is_new else ""
    logger.info("pretrained weights: %s%s", source, note)
    return model


def _load(spec: ModelSpec, source: str, arguments: dict[str, Any], key: str) -> nn.Module:
    try:
        return spec.build(**arguments)
    except (ConfigError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        # With MODEL.KWARGS, an error of loading arrives as a rejection of the keyword arguments.
        cause = error.__cause__ if isinstance(error, ConfigError) else error
        if isinstance(error, ConfigError) and not isinstance(cause, (OSError, RuntimeError, pickle.UnpicklingError)):
            raise
        cached = Path(torch.hub.get_dir(), "checkpoints", source.rpartition("/")[2])
        if cached.is_file() and (what := explain_no_weights(cached, "")):
            raise ConfigError(Problem(key, what)) from None
        reason = f"cannot load {source} into {spec.arch.name}: {_one_line(cause) or type(cause).__name__}"
        others = "MODEL.PRETRAINED False and FINETUNE.WEIGHTS to its path, or MODEL.WEIGHTS for the same classes"
        own = others if key == "MODEL.PRETRAINED" else f"{key} to its path"
        fix = f"delete a damaged file; without a network, copy the file to this machine, and set {own}"
        # Without its cause, whose text may advise to unpickle the file.
        raise ConfigError(Problem(key, f"{reason}; fix: {fix}")) from None


def _one_line(error: BaseException | None) -> str:
    text = " ".join(str(error).split())
    if "weights_only" in text:  # torch's refusal of a file, with the advice to unpickle it
        named = re.search(r"GLOBAL ([\w.]*\w)", text)
        found = f"holds {named[1]}, which is not plain data" if named else "is damaged, or holds more than plain data"
        return f"it {found}"
    return text if len(text) <= 300 else f"{text[:300]} ..."


def read_published(arch: str) -> dict[str, Any]:
    """Return the options of the published weights of a model of timm or torchvision."""
    found = find_architecture(arch)
    if found.source == "timm":
        import timm

        published = timm.get_pretrained_cfg(found.name)
        return of_timm(published.to_dict()) if published else {}
    preset: Any = getattr(find_published(found)[1].get("weights"), "transforms", dict)()
    if not hasattr(preset, "crop_size"):
        return {}
    crop, resize, name = preset.crop_size[0], preset.resize_size[0], preset.interpolation.value
    statistics = {"DATA.MEAN": tuple(preset.mean), "DATA.STD": tuple(preset.std)}
    sizes = {"TRAIN.IM_SIZE": crop, "TEST.IM_SIZE": resize, "TEST.CROP": "center"}
    return {**statistics, **sizes, "DATA.INTERPOLATION": name, "TEST.INTERPOLATION": name}


def of_timm(published: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a `pretrained_cfg` of timm.

    The side before the crop is the crop divided by the crop percentage, rounded down, as in timm.

    Raises:
        LookupError, TypeError, ValueError, ArithmeticError, AttributeError: it is none.
    """
    channels, height, width = published["input_size"]
    crop_pct, mode = published.get("crop_pct", 0.875), published.get("crop_mode", "center")
    name = str(published.get("interpolation", "bicubic"))
    name = name if name in ("bilinear", "bicubic") else "bilinear"
    resize = [math.floor(side / crop_pct) for side in (height, width)]
    return {
        "DATA.CHANNELS": channels,
        **{f"DATA.{key.upper()}": tuple(map(float, published[key])) for key in ("mean", "std")},
        "DATA.INTERPOLATION": name,
        "TEST.INTERPOLATION": name,
        "TRAIN.IM_SIZE": height if height == width else (height, width),
        "TEST.IM_SIZE": resize[0] if height == width else tuple(resize),
        "TEST.CROP": "squash" if mode == "squash" else "center",
    }
