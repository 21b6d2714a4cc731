"""New folders of files that appear with all of their files or not at all."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from distribuuuu.files.atomic_file import sync_folder
from distribuuuu.files.locks import try_lock_folder


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `target`, which takes its name when the block ends; else it is deleted.

    Temporary folders that killed processes have left are deleted too: those of a dead process without a lock, which a
    process of another machine may hold.

    Args:
        target: a path that does not exist, or is an empty folder.

    Raises:
        OSError: it cannot be written.
    """
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    for folder, pid in _list_temporary(target):
        if pid == os.getpid() or not _is_running(pid):
            with contextlib.suppress(OSError), try_lock_folder(folder) as is_left:
                if is_left:
                    shutil.rmtree(folder, ignore_errors=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(8).hex()}.new")
    temporary.mkdir()
    try:
        with try_lock_folder(temporary):
            yield temporary
            sync_folder(temporary)
            os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def delete_temporary_folders(target: Path) -> None:
    """Delete the temporary folders of this process for `target`, before it exits on a signal."""
    for folder, pid in _list_temporary(target.absolute()):
        if pid == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)


def _list_temporary(target: Path) -> list[tuple[Path, int]]:
    """Return the temporary folders of a target, each with the pid of its process."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(\d+)\.[0-9a-f]{{16}}\.new")
    found = [(entry, pattern.fullmatch(entry.name)) for entry in target.parent.iterdir()]
    return [(entry, int(name[1])) for entry, name in found if name and entry.is_dir() and not entry.is_symlink()]


def _is_running(pid: int) -> bool:
    """Tell whether a process of this machine may be running: it may not have locked its folder yet."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        pass
    return True
