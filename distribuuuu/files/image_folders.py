"""Images in folders and their sub-folders; imports no numpy."""

import contextlib
import os
from collections.abc import Iterator

from distribuuuu.files.image_files import EXTENSIONS, JUNK_FOLDERS, MAX_DEPTH, is_folder, is_image


def holds_images(folder: str | os.PathLike, depth: int = MAX_DEPTH, extensions: tuple[str, ...] = EXTENSIONS) -> bool:
    """Return whether a folder has an image in itself or, up to `depth` levels below, in its sub-folders."""
    return any(True for _ in walk_images(folder, depth, extensions))


def walk_images(
    folder: str | os.PathLike, depth: int = MAX_DEPTH, extensions: tuple[str, ...] = EXTENSIONS
) -> Iterator[str]:
    """Yield the images in a folder and in its sub-folders, `depth` levels in all, each folder once."""
    waiting, seen = [(os.fspath(folder), 1)], set()
    while waiting:
        path, level = waiting.pop()
        real = os.path.realpath(path)
        if real in seen:  # a circular link
            continue
        seen.add(real)
        with contextlib.suppress(OSError), os.scandir(real) as entries:
            for entry in entries:
                if is_image(entry.name, extensions) and not is_folder(entry):
                    yield entry.path
                elif level < depth and entry.name.lower() not in JUNK_FOLDERS and is_folder(entry):
                    waiting.append((entry.path, level + 1))
