"""Another value of some options of a config, as weights, stages and views have them."""

from collections.abc import Mapping
from typing import Any

from distribuuuu.config.config_node import Config
from distribuuuu.config.conflicts import find_problems
from distribuuuu.config.errors import ConfigError, Problem
from distribuuuu.config.reader import merge


def override(cfg: Config, options: Mapping[str, Any], origin: str, allowed: tuple[str, ...]) -> Config:
    """Return a frozen copy with other values of some options, whose keys begin with one of `allowed`.

    ConfigError, which names `origin`: a key is unknown or not allowed, or a value is invalid.
    """
    copied, found = cfg.clone(), list[Problem]()
    copied.defrost()
    merge(copied, [(key, value, origin) for key, value in options.items()], found)
    message = f"has no effect here; expected {', '.join(allowed)}"
    found += [Problem(key, message, {key: origin}) for key in options if not key.startswith(allowed)]
    if problems := found or find_problems(copied):
        raise ConfigError(problems)
    copied.freeze()
    return copied
