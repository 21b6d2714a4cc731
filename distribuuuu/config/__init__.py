"""Configuration: defaults, reading, checking, registries. Imports no torch."""

from distribuuuu.config.errors import ConfigError
from distribuuuu.config.reader import (
    Config,
    check_cfg,
    get_cfg,
    load_cfg,
)

__all__ = ["Config", "ConfigError", "check_cfg", "get_cfg", "load_cfg"]
