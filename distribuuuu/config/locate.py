"""Location of config files, and of the other files of the repository that a wheel contains."""

import os
import re
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# Folders of configs that were once in another one, by that one.
_MOVED = {"imagenet": "imagenet2021", "transfer": "from_scratch"}
# The plug-ins of shipped recipes, below configs/, and the names of the entries that each registers.
RECIPE_PLUGINS = {
    "cifar10/airbench94.py": {"airbench94", "airbench", "lookahead"},
    "cifar10/airbench94_muon.py": {"airbench94_muon"},
    "imagenet/blurpool_resnet.py": {"resnet18_blurpool", "resnet50_blurpool"},
    "imagenet/deit.py": {"deit_tiny", "deit_small", "deit_base", "deit3_small"},
    "imagenet/imagenet.py": {"imagenet"},
    "imagenet2021/botnet.py": {"botnet50"},
    "imagenet/plain_vit.py": {"plain_vit_tiny", "plain_vit_small"},
}
# The folder and the name of a config in results, which may come from others.
_CONFIG_NAME = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)?")


class FoundConfig(str):
    """The path of a config that was found in the folder of a run, not named by the user: it may be of others."""


class ListedConfig(FoundConfig):
    """The path of a config in a folder that the user named: its bases are read; its plug-ins may be of others."""


def shipped_file(name: str) -> Path:
    """Return a file or folder of the repository, e.g. 'configs': in the package of a wheel, else in the checkout."""
    in_wheel = _PACKAGE / "shipped"
    return (in_wheel if in_wheel.is_dir() else _PACKAGE.parent) / name


def find_config(path: str) -> str:
    """Return the config file of a path or name: in the current folder, in ./configs, else shipped; else `path` itself.

    'shapes/resnet14', 'shapes/resnet14.yaml' and 'configs/shapes/resnet14.yaml' name the same shipped config.
    """
    name = os.path.normpath(path).removeprefix(f"configs{os.sep}")
    return _find_file(path, name, "configs", str(shipped_file("configs"))) or path


def _find_file(first: str, name: str, *roots: str) -> str | None:
    """Return `first`, or the file of a name, or of its new name if it was moved, in one of the folders."""
    folder, _, own = name.partition("/")
    names = [] if name.startswith("..") else [name, f"{_MOVED.get(folder, folder)}/{own}"]
    places = [first, *(os.path.join(root, each) for root in roots for each in names)]
    return next((file for place in places for file in (place, f"{place}.yaml") if os.path.isfile(file)), None)


def find_shipped(name: str) -> list[str]:
    """Return the shipped config files of a name in results, e.g. 'shapes/resnet14'; several are joined with '+'.

    Empty: one of them is not a shipped config.
    """
    parts, folder = [part.removeprefix("configs/") for part in name.split("+")], str(shipped_file("configs"))
    files = [find_base(part, folder) if _CONFIG_NAME.fullmatch(part) else None for part in parts]
    return [file for file in files if file] if all(files) else []


def find_base(name: str, folder: str) -> str | None:
    """Return the file of `_BASE_: NAME` in a config of `folder`: relative to it, else shipped; None: there is none."""
    return _find_file(os.path.join(folder, name), name, str(shipped_file("configs")))
