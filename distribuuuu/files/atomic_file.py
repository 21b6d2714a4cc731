"""Atomic file replacement: a path always has either the complete new content or the previous one."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replacing(path: Path, mode: str = "wb", survives_power_failure: bool = True, **options: Any) -> Iterator[IO]:
    """Open a temporary file that replaces `path` when the block ends; after an exception it is deleted.

    Its name, `.NAME.RANDOM.tmp` beside `path`, is unique, so that several processes can write the same file.

    Args:
        path: the file to replace; its folder must exist.
        mode: mode of `open`, for writing.
        survives_power_failure: wait until the content is on the disk.
        options: other arguments of `open`.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        with open(temporary, mode, **options) as file:
            yield file
            if survives_power_failure:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk, so that files renamed in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
