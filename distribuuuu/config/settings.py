"""Settings of registered entries: the names, types and ranges of TASK.KWARGS, LOSS.KWARGS, DATA.KWARGS and DATA.TABLE.

An entry declares them in a dataclass of the name `Settings`:

    @TASKS.register("sam")
    class Sam(Classification):
        @dataclass
        class Settings:
            rho: float = setting(0.05, "radius of the perturbation", least=0)
"""

import dataclasses
from typing import Any

from distribuuuu.config.config_node import Config, get_value
from distribuuuu.config.errors import ConfigError
from distribuuuu.config.registry import SETTINGS


def setting(
    default: Any, help: str = "", least: float | None = None, most: float | None = None, choices: tuple[str, ...] = ()
) -> Any:
    """Return the declaration of a field of `Settings`.

    Args:
        default: a number, text, True, False, None or a tuple of numbers or texts.
        help: its meaning, for --help-config.
        least: the lowest value of a number, or of each number in a tuple.
        most: the highest one.
        choices: the allowed texts.
    """
    limits = {"help": help, "least": least, "most": most, "choices": choices}
    return dataclasses.field(default=default, metadata=limits)


@dataclasses.dataclass
class LoraSettings:
    """The values of FINETUNE.LORA."""

    rank: int = setting(8, "rank of the update of a weight", least=1)
    alpha: float = setting(16.0, "the update is scaled by alpha / rank", least=0)
    targets: tuple[str, ...] = setting(("*",), "patterns of the names of linear layers")


def build_settings(cfg: Config, key: str, entry: Any) -> Any:
    """Return the settings of an entry as it declares them, or a dict; raise ConfigError if a value is not allowed."""
    declared, given = getattr(entry, SETTINGS[key], None), get_value(cfg, key)
    if declared is None:
        return dict(given)
    from distribuuuu.config.read_settings import read_settings

    settings, problems = read_settings(key, declared, given)
    if problems:
        raise ConfigError(problems, cfg.origins)
    return settings
