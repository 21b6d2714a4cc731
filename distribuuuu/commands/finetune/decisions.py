"""Decisions and measurements of a fine-tuning, stored when they are made: a rerun repeats none and takes the same."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distribuuuu.config import ConfigError
from distribuuuu.config.json_file import load_json
from distribuuuu.files.atomic_file import replacing

FILE_NAME = "finetune.json"


class Decisions:
    """The content of finetune.json in a folder.

    Args:
        folder: the folder, which exists.
        job: what the decisions depend on; a file of another job is refused.
    """

    def __init__(self, folder: Path, job: dict[str, Any]):
        self.path = folder / FILE_NAME
        self.content: dict[str, Any] = {}
        if not os.path.lexists(self.path):
            self.once("job", lambda: job)
            return
        self.content = load_json(self.path)
        known = self.content.get("job")
        if known != (job := json.loads(json.dumps(job))):
            differing = [key for key in job if not isinstance(known, dict) or known.get(key) != job[key]]
            reason = f"{folder} holds a fine-tuning with other {', '.join(differing)}"
            raise ConfigError(f"--out: {reason}; fix: name another folder, or remove this one")

    def once(self, name: str, decide: Callable[[], Any]) -> Any:
        """Return a decision as JSON; it is made and stored at the first call.

        Raises:
            ConfigError: it cannot be stored.
        """
        if name not in self.content:
            content = {**self.content, name: decide()}
            try:
                with replacing(self.path, "w", encoding="utf-8") as file:
                    file.write(json.dumps(content, indent=1) + "\n")
            except OSError as error:
                raise cannot_write(self.path, error) from error
            self.content = json.loads(json.dumps(content))
        return self.content[name]


def cannot_write(path: Path, error: OSError) -> ConfigError:
    """Return the error of a file that cannot be written."""
    fix = "make room or name another folder, then rerun the same command: finished stages are kept"
    return ConfigError(f"--out: {error.filename or path} cannot be written: {error.strerror or error}; fix: {fix}")
