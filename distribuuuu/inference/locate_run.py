"""Location of the files that an argument RUN names. Imports no torch."""

import os
from pathlib import Path
from typing import NamedTuple

from distribuuuu.checkpoint.weights_files import HUB_NAMES, find_card
from distribuuuu.config import ConfigError, get_cfg
from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.locate import FoundConfig
from distribuuuu.config.model_names import is_published
from distribuuuu.config.run_files import RUN_KINDS, local_run

EXPORT_CONFIG, EXPORT_WEIGHTS = "config.json", HUB_NAMES[0]


class RunFiles(NamedTuple):
    """The files that RUN names.

    Attributes:
        name: RUN as a local path, or the name of published weights.
        folder: the OUT_DIR of the run, an exported folder, or None: a file of weights outside of both, or a name.
        weights: the file that was named, or the weights of an exported folder; None: the best ones of `folder`.
    """

    name: str
    folder: Path | None
    weights: Path | None
    is_export: bool = False

    @property
    def is_published(self) -> bool:
        """Whether it is the name of published weights."""
        return self.folder is None and self.weights is None

    @property
    def config(self) -> FoundConfig:
        """The config file of the run; ConfigError if there is none."""
        path = self.folder / get_cfg().CFG_DEST if self.folder else None
        if path is None or not path.is_file():
            what = f"RUN: no {get_cfg().CFG_DEST} in or above {self.name}"
            raise ConfigError(f"{what}; expected the OUT_DIR of a run, a checkpoint below it, or an exported folder")
        return FoundConfig(path)


def locate_run(run: str | os.PathLike) -> RunFiles:
    """Return the files of the OUT_DIR of a run, a checkpoint, an exported folder or published weights; see RUN_KINDS.

    Raises:
        ConfigError: there is no such file or folder, or it is another kind of folder.
    """
    name = local_run(run)
    path = Path(name.removeprefix("local-dir:")).expanduser()
    if path.is_file() and not find_card(path):
        above = path.absolute().parents[:2]  # a relative path need not name the folders above it
        return RunFiles(name, next((up for up in above if (up / get_cfg().CFG_DEST).is_file()), None), path)
    folder = path.parent if path.is_file() else path
    if (folder / EXPORT_CONFIG).is_file():
        if not find_card(folder):
            raise ConfigError(f"RUN: {folder} holds {EXPORT_CONFIG} but no {EXPORT_WEIGHTS}; fix: export it again")
        weights = next(folder / one for one in HUB_NAMES if (folder / one).is_file())
        return RunFiles(name, folder, weights, is_export=True)
    if path.is_dir():
        if found := sorted({"model.onnx", "sweep.json"} & {*os.listdir(path)}):
            table = f"distribuuuu table {run}, or open {run}/sweep.html"
            fix = table if "sweep.json" in found else "name the run that was exported"
            raise ConfigError(f"RUN: {run} holds {found[0]}; expected {RUN_KINDS}; fix: {fix}")
        return RunFiles(name, path, None)
    if is_published(name):
        return RunFiles(name, None, None)
    beside = os.listdir(path.parent) if path.parent.is_dir() else []
    raise ConfigError(f"RUN: no such file or folder: {run}{did_you_mean(path.name, beside)}; expected {RUN_KINDS}")
