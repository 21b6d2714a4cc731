"""Configuration: defaults, reading, rules, registries and errors. Imports no torch."""

from distribuuuu.config.config_node import Config, get_cfg
from distribuuuu.config.conflicts import check_cfg
from distribuuuu.config.errors import ConfigError, Problem
from distribuuuu.config.reader import load_cfg

__all__ = ["Config", "ConfigError", "Problem", "check_cfg", "get_cfg", "load_cfg"]
