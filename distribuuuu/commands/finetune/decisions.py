"""Decisions and measurements of a fine-tuning, stored when they are made: a rerun repeats none and takes the same."""

import contextlib
import itertools
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distribuuuu.checkpoint.weights_files import best_path
from distribuuuu.config import ConfigError
from distribuuuu.config.json_file import load_json
from distribuuuu.config.run_files import CHECKPOINTS, DECISIONS
from distribuuuu.files.atomic_file import replacing


class Decisions:
    """The content of finetune.json in a folder.

    Args:
        folder: the folder, which exists.
        job: what the decisions depend on; a file of another job is refused.
    """

    def __init__(self, folder: Path, job: dict[str, Any]):
        self.path = folder / DECISIONS
        self.content: dict[str, Any] = {"job": job}
        if not os.path.lexists(self.path):  # the first decision writes it: images that cannot be divided may be mended
            return
        self.content = load_json(self.path)
        if not isinstance(self.content, dict):
            raise ConfigError(f"--out: {self.path} is no record of a fine-tuning; fix: {name_another(folder)}")
        if (known := self.content.get("job")) != (job := json.loads(json.dumps(job))):
            if not any(folder.glob("features*")):  # nothing is lost: a correction of images or options begins anew
                shutil.rmtree(folder / "lists", ignore_errors=True)
                self.content = {"job": job}
                return
            differing = [key for key in job if isinstance(known, dict) and known.get(key, job[key]) != job[key]]
            what = f"with other {', '.join(differing)}" if differing else "of another version"
            raise ConfigError(f"--out: {folder} holds a fine-tuning {what}; fix: {name_another(folder)}, or delete it")

    def once(self, name: str, decide: Callable[[], Any]) -> Any:
        """Return a decision as JSON; it is made and stored at the first call."""
        if name not in self.content:
            content = {**self.content, name: decide()}
            with replacing(self.path, "w", encoding="utf-8") as file:
                file.write(json.dumps(content, indent=1) + "\n")
            self.content = json.loads(json.dumps(content))
        return self.content[name]


def name_another(folder: Path) -> str:
    """Return the advice to name another folder, with one that does not exist."""
    free = next(path for number in itertools.count(2) if not os.path.lexists(path := f"{folder}_{number}"))
    return f"name another folder, e.g. --out {shlex.quote(free)}"


def check_other_run(folder: Path) -> None:
    """Raise ConfigError if a folder holds a run of another command; a fine-tuning writes its decisions first."""
    if not os.path.lexists(folder / DECISIONS):
        for name in (CHECKPOINTS, best_path(folder).name, "config.yaml"):
            if os.path.lexists(folder / name):
                raise ConfigError(f"--out: {folder} holds another run, {name}; fix: {name_another(folder)}")


@contextlib.contextmanager
def explaining_disk(out: Path, is_new: bool = False) -> Iterator[None]:
    """Raise an error of a file in the block as ConfigError: a full disk, a folder that is not writable.

    After another ConfigError, e.g. of an option, a new folder without features is removed.
    """
    try:
        yield
    except ConfigError:
        if is_new and not any(out.glob("features*")):
            shutil.rmtree(out)
        raise
    except OSError as error:
        fix = "make room or name another folder, then rerun the same command: finished stages are kept"
        reason = f"{error.filename or out} cannot be used: {error.strerror or error}"
        raise ConfigError(f"--out: {reason}; fix: {fix}") from error
