"""The config tree: a yacs node that freezes for good and records where each value was set."""

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import yaml
from yacs.config import CfgNode

from distribuuuu.config.options import OPTIONS


class Config(CfgNode):
    """A config or a section of one: keys as attributes, nested with dots."""

    def __setitem__(self, key: str, value: Any) -> None:
        if self.is_frozen():
            raise AttributeError(f"cannot set {key}: the config is frozen; clone() and defrost() a copy")
        super().__setitem__(key, value)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AttributeError("a config cannot lose keys or be updated as a dict; set its keys one by one")

    __delitem__ = update = pop = popitem = clear = setdefault = _refuse

    @property
    def origins(self) -> dict[str, str]:
        """The origin of each value that is not a default: option -> 'FILE:LINE' or 'command line'."""
        return self.__dict__.setdefault("_origins", {})

    @property
    def replaced(self) -> dict[str, Any]:
        """The values that options of the command line have replaced: those of the files, or the defaults."""
        return self.__dict__.setdefault("_replaced", {})

    @property
    def notes(self) -> list[tuple[int, str]]:
        """Lines for the start of the log, each with its level: what other files have decided."""
        return self.__dict__.setdefault("_notes", [])

    def dump(self, **options: Any) -> str:
        """Return the tree as YAML in its own order, on which FINETUNE.LR_MULT depends."""
        return super().dump(**{"sort_keys": False, **options})

    def __reduce__(self):  # for copies too
        return _rebuild, (dict(self), dict(self.__dict__))


# A dict in a list is a Config too, which yacs passes on to yaml.
yaml.SafeDumper.add_representer(Config, yaml.SafeDumper.represent_dict)


def _rebuild(items: dict, attributes: dict) -> Config:
    """Return a Config from its items and attributes, which include the frozen state."""
    cfg = Config()
    dict.update(cfg, items)
    cfg.__dict__.update(attributes)
    return cfg


def get_cfg() -> Config:
    """Return a fresh, unfrozen tree of the defaults."""
    cfg = Config()
    for key, option in OPTIONS.items():
        section, _, name = key.rpartition(".")
        if section and section not in cfg:
            cfg[section] = Config()
        (cfg[section] if section else cfg)[name] = Config(new_allowed=True) if option.is_open else option.default
    return cfg


def changed(cfg: Config, options: Mapping[str, Any], origin: str | None = None) -> Config:
    """Return a frozen copy with other values of some options, by 'SECTION.KEY'; without `origin`, theirs remain."""
    copied = cfg.clone()
    copied.defrost()
    for key, value in options.items():
        section, _, name = key.rpartition(".")
        (get_value(copied, section) if section else copied)[name] = value
        if origin:
            copied.origins[key] = origin
    copied.freeze()
    return copied


def iter_options(cfg: CfgNode, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ('SECTION.KEY', value) for every option, in the order of the defaults."""
    for key, value in cfg.items():
        if isinstance(value, CfgNode):
            yield from iter_options(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def get_value(cfg: CfgNode, key: str) -> Any:
    """Return the value of 'SECTION.KEY'."""
    for part in key.split("."):
        cfg = cfg[part]
    return cfg
