"""Location of config files, and of the other files of the repository that a wheel contains."""

import os
import re
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# The folder and the name of a config in results, which may come from others.
_CONFIG_NAME = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)?")


def shipped_file(name: str) -> Path:
    """Return a file or folder of the repository, e.g. 'configs': in the package of a wheel, else in the checkout."""
    in_wheel = _PACKAGE / "shipped"
    return (in_wheel if in_wheel.is_dir() else _PACKAGE.parent) / name


def find_config(path: str) -> str:
    """Return the config file of a path or name: in the current folder, in ./configs, else shipped; else `path` itself.

    'shapes/resnet14', 'shapes/resnet14.yaml' and 'configs/shapes/resnet14.yaml' name the same shipped config.
    """
    name = os.path.normpath(path).removeprefix(f"configs{os.sep}")
    roots = [] if name.startswith("..") else ["configs", str(shipped_file("configs"))]
    places = [path, *(os.path.join(root, name) for root in roots)]
    return next((file for place in places for file in (place, f"{place}.yaml") if os.path.isfile(file)), path)


def find_shipped(name: str) -> list[str]:
    """Return the shipped config files of a name in results, e.g. 'shapes/resnet14'; several are joined with '+'.

    Empty: one of them is not a shipped config.
    """
    parts, folder = name.split("+"), shipped_file("configs")
    files = [str(folder / f"{part}.yaml") for part in parts if _CONFIG_NAME.fullmatch(part)]
    return files if len(files) == len(parts) and all(map(os.path.isfile, files)) else []


def find_base(name: str, folder: str) -> str | None:
    """Return the file of `_BASE_: NAME` in a config of `folder`: relative to it, else shipped; None: there is none."""
    places = [os.path.join(folder, name), *([] if name.startswith("..") else [str(shipped_file("configs") / name)])]
    return next((file for place in places for file in (place, f"{place}.yaml") if os.path.isfile(file)), None)
