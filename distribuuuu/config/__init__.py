"""Configuration. Imports no torch.

- options.py: start reading here: the table of options. config_node.py: the tree that it becomes; derived.py: what
  several options decide. conflicts.py, feature_conflicts.py: options that contradict each other.
- reader.py: YAML files, their bases and KEY VALUE arguments to a checked tree. explain.py: --help-config.
- registry.py: tables of entries by name. settings.py: their KWARGS. plugins.py: code that PLUGINS names.
"""

from distribuuuu.config.config_node import Config, get_cfg
from distribuuuu.config.conflicts import check_cfg
from distribuuuu.config.errors import ConfigError, Problem
from distribuuuu.config.reader import load_cfg

__all__ = ["Config", "ConfigError", "Problem", "check_cfg", "get_cfg", "load_cfg"]
