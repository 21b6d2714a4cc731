"""Files of the repository that the wheel contains too: configs, Slurm scripts, published results."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def shipped_file(name: str) -> Path:
    """Return the path of a file or folder, e.g. 'configs': in the package of a wheel, else in the checkout."""
    in_wheel = _PACKAGE / "files"
    return (in_wheel if in_wheel.is_dir() else _PACKAGE.parent) / name
