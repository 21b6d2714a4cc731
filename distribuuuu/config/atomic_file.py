"""Atomic file replacement: a file is whole under its name, or the one before is still there."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replacing(path: Path, mode: str = "wb", **options: Any) -> Iterator[IO]:
    """Open a temporary file that replaces `path` when the block ends; after an exception it is removed.

    Its name, `.NAME.RANDOM.tmp` beside `path`, is unique: processes that write the same file never share one.

    Args:
        path: the file to replace; its folder must exist.
        mode: of `open`, for writing.
        options: of `open`.

    Raises:
        OSError: the disk refuses it.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        with open(temporary, mode, **options) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
