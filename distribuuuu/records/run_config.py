"""Description of a config in results: its name, hash, overrides and preprocessing. Imports no torch."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from distribuuuu.config import Config
from distribuuuu.config.config_node import iter_options
from distribuuuu.config.declaration import AUTO
from distribuuuu.config.derived import eval_crop_size, eval_resize
from distribuuuu.config.options import option_of

# Version of results.json and test_results.json.
SCHEMA_VERSION = 1


def hash_config(cfg: Config) -> str:
    """Return the SHA-256 of `hashed` options that are not at their `hash_default`: equal for all seeds of a config.

    A `neutral` option of the command line is not meant to change results: the value that it replaces is hashed.
    """
    # Not sorted: the order of the patterns in FINETUNE.LR_MULT matters.
    options = [(key, value) for key, value in iter_options(cfg) if option_of(key).hashed]
    options = [(key, cfg.replaced.get(key, value) if option_of(key).neutral else value) for key, value in options]
    values = [(key, AUTO if is_found(cfg, key) else value) for key, value in options]
    values = [(key, value) for key, value in values if value != option_of(key).hash_default]
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()


def is_found(cfg: Config, key: str) -> bool:
    """Tell whether the value of an option was `auto` and has been found on this machine."""
    return cfg.origins.get(key, "").startswith(f"{AUTO}, ")


def config_name(cfg: Config) -> str | None:
    """Return the folder and the name of the YAML file, e.g. 'imagenet/resnet50'; None without a file.

    Of a file with bases, it is its own name; several files of --cfg are joined with '+'.
    """
    # The origin of a value of a base ends with the file of --cfg.
    files = (re.fullmatch(r"(.+):\d+", origin.rpartition(", base of ")[2]) for origin in cfg.origins.values())
    paths = dict.fromkeys(Path(match[1]) for match in files if match)
    return "+".join("/".join([*path.absolute().parts[-2:-1], path.stem]) for path in paths) or None


def list_overrides(cfg: Config) -> dict[str, Any]:
    """Map the options of the command line to their values, except `neutral` ones and those that are not `hashed`."""
    given = [(key, value) for key, value in iter_options(cfg) if cfg.origins.get(key) == "command line"]
    return {key: value for key, value in given if option_of(key).hashed and not option_of(key).neutral}


def describe_evaluation(cfg: Config) -> dict[str, Any]:
    """Return the preprocessing of evaluation images; sizes in pixels."""
    return {
        "resize": eval_resize(cfg),
        "crop": eval_crop_size(cfg),
        "interpolation": cfg.TEST.INTERPOLATION,
        **({"labels": cfg.TEST.LABELS} if cfg.TEST.LABELS else {}),
        **({"crop_mode": cfg.TEST.CROP} if cfg.TEST.CROP != "center" else {}),
        **({"flip": True} if cfg.TEST.FLIP else {}),  # logits averaged with those of the mirrored image
        **({"shift": cfg.TEST.SHIFT} if cfg.TEST.SHIFT else {}),  # and with those of shifted images, in pixels
    }
