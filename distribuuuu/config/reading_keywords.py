"""Keyword arguments of constructors that name a file or an address: these do not come from a config."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from distribuuuu.config.model_names import OWN_KEYS

# They read whatever their value is.
_READING_KEYS = ("weights_backbone", "pretrained_backbone", "pretrained_cfg", "pretrained_cfg_overlay",
                 "cache_dir", "model_dir", "state_dict", "custom_load")  # fmt: skip
# Words in the names of such keywords, if the value is text or a mapping: a drop_path_rate is a number.
_READING_WORDS = {"file", "files", "filename", "path", "paths", "url", "urls", "uri", "dir", "directory", "folder",
                  "hub", "repo", "cache", "checkpoint", "ckpt", "weights", "pretrained"}  # fmt: skip
# Text that is a path, an address, a model of the Hugging Face Hub, or a file of weights.
_PLACE = re.compile(r"[/\\]|^~|^[\w-]+:|\.(pth|pt2?|tar|bin|npz|npy|pkl|pickle|ckpt|safetensors)$", re.IGNORECASE)


def find_reading_keywords(section: str, kwargs: Mapping) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each keyword in a section, nested ones too, that reads a file or the network."""
    for name, value in kwargs.items():
        key = f"{section}.{name}"
        if name in OWN_KEYS and name != "num_classes":
            yield key, f"set {OWN_KEYS[name]} instead"
        elif _reads(str(name), value):
            what = "names a file or an address, which no constructor may read"
            fix = "remove it; weights are set by MODEL.PRETRAINED, MODEL.WEIGHTS, FINETUNE.WEIGHTS or DISTILL.WEIGHTS"
            yield key, f"{what}; fix: {fix}"
        elif isinstance(value, (Mapping, list, tuple)):
            yield from find_reading_keywords(key, value if isinstance(value, Mapping) else dict(enumerate(value)))


def _reads(name: str, value: Any) -> bool:
    items = value if isinstance(value, (list, tuple)) else (value,)
    holds_text = any(isinstance(item, (str, Mapping)) for item in items)
    words = {word.lower() for word in re.findall(r"[A-Z]*[a-z]+|[A-Z]+", name)}
    is_switch = value is True and "pretrained" in words
    is_place = isinstance(value, str) and _PLACE.search(value)
    return bool(name.lower() in _READING_KEYS or (words & _READING_WORDS and (holds_text or is_switch)) or is_place)
