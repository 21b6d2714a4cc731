"""New folders of files that appear with all of their files or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from distribuuuu.files.atomic_file import sync_folder


def temporary_folder(target: Path) -> Path:
    """Return the folder in which this process writes the files of a new folder."""
    target = target.absolute()
    return target.with_name(f".{target.name}.{os.getpid()}.new")


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `target` when the block ends; after an exception it is deleted.

    `target` does not exist, or is an empty folder.
    """
    temporary = temporary_folder(target)
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed process with this number
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_folder(temporary)
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
