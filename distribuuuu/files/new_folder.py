"""New folders of files that appear with all of their files or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from distribuuuu.files.locks import fcntl, lock_file


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `target`, which takes its name when the block ends; else it is deleted.

    Temporary folders that killed processes have left are deleted too: nobody holds their locks.

    Args:
        target: a path that does not exist, or is an empty folder.

    Raises:
        OSError: it cannot be written.
    """
    parent, prefix = target.absolute().parent, f".{target.absolute().name}."
    parent.mkdir(parents=True, exist_ok=True)
    for entry in sorted(parent.iterdir()) if fcntl else ():
        if entry.name.startswith(prefix) and entry.suffix == ".new" and entry.is_dir() and not entry.is_symlink():
            with contextlib.suppress(OSError), _locked(entry):
                shutil.rmtree(entry, ignore_errors=True)
    temporary = parent / f"{prefix}{os.urandom(8).hex()}.new"
    temporary.mkdir()
    try:
        with _locked(temporary):
            yield temporary
            os.replace(temporary, target.absolute())
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; raises BlockingIOError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not lock_file(descriptor, timeout_s=0.0):
            raise BlockingIOError(f"{folder} is in use")
        yield
    finally:
        os.close(descriptor)
