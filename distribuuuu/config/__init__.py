"""Configuration. Imports no torch.

- options.py: start reading here: the table of options. declaration.py: the form of its lines.
- config_node.py: the tree that the table becomes. derived.py: values and conditions that several options decide.
- reader.py: YAML files, their bases and KEY VALUE arguments to a checked tree. yaml_file.py, json_file.py: files within
  limits. values.py: texts to values. locate.py: files by name. run_files.py: the names of a run's files.
- conflicts.py, feature_conflicts.py: options that contradict each other. errors.py: problems and their wording.
- explain.py: --help-config.
- registry.py: tables of entries by name. settings.py: their KWARGS. plugins.py: code that PLUGINS names.
- model_names.py: names of models and optimizers without torch, and arguments that no model may get.
"""

from distribuuuu.config.config_node import Config, get_cfg
from distribuuuu.config.conflicts import check_cfg
from distribuuuu.config.errors import ConfigError, Problem
from distribuuuu.config.reader import load_cfg

__all__ = ["Config", "ConfigError", "Problem", "check_cfg", "get_cfg", "load_cfg"]
