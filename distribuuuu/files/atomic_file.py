"""Writing of files and new folders: atomically, and never through a link of an untrusted folder."""

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replacing(path: Path, mode: str = "wb", survives_power_failure: bool = True, **options: Any) -> Iterator[IO]:
    """Open a temporary file that replaces `path` when the block ends; after an exception it is deleted.

    Its name, `.NAME.RANDOM.tmp` beside `path`, is unique, so that several processes can write the same file.

    The folder must exist. With `survives_power_failure`, the end of the block waits until the content is on the disk.
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


def remove_temporary_files(folder: Path) -> None:
    """Remove what killed processes have left of `replacing` in a folder that no other process writes to."""
    for path in folder.glob(".*.tmp"):
        if re.fullmatch(r"\..+\.[0-9a-f]{16}\.tmp", path.name) and not path.is_dir():
            with contextlib.suppress(OSError):
                path.unlink()


def open_for_writing(path: str | os.PathLike, mode: str, **options: Any) -> IO:
    """Open a regular file for writing, as `open`; raise OSError for a link, e.g. of a downloaded run, or a device."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    file = open(path, mode, opener=lambda name, others: os.open(name, others | flags, 0o666), **options)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return file


def make_folder(root: Path, *names: str) -> Path:
    """Create a folder below another one and return it; raise OSError if it, or a folder between them, is a link."""
    for name in names:
        root = root / name
        if root.is_symlink():
            raise OSError(errno.ELOOP, "is a link, and files are not written through links", str(root))
        root.mkdir(exist_ok=True)
    return root


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk, so that files renamed in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
