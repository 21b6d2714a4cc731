"""The image files that the arguments of a command name: folders, patterns, files and lists of paths."""

import glob
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted, did_you_mean
from distribuuuu.files.image_files import ALL_EXTENSIONS, EXTENSIONS, JUNK_FILES, is_class, is_folder, is_image
from distribuuuu.files.untrusted import open_text, printable

logger = logging.getLogger(__name__)


def list_images(paths: Sequence[str]) -> list[str]:
    """Return the files that the arguments of a command name, in their order.

    A folder stands for the images below it, or, if there are none, for its .npy files, sorted by name in each folder; a
    pattern with `*`, `?` or `[` for its matches, sorted; a text file (.txt) for the paths in its lines, `-` for those
    in standard input.

    Raises:
        ConfigError: with every argument that does not exist, cannot be read, or stands for no file.
    """
    found: list[str] = []
    problems: list[str] = []
    for path in paths:
        try:
            own = list(_expand(path, EXTENSIONS)) or list(_expand(path, ALL_EXTENSIONS))
            is_text = len(paths) > 1 and path.lower().endswith(".txt")
            if is_text and not any(os.path.lexists(line) or is_image(line, ALL_EXTENSIONS) for line in own):
                logger.warning("%s is left out: a text whose lines name no image", printable(path))
                continue
            found += own
            if not own:
                problems.append(f"PATHS: {path}: holds no image{describe_left_out(path)}")
        except OSError as error:
            problems.append(f"PATHS: {error.filename or path}: {_describe(error, path)}")
        except UnicodeDecodeError:
            problems.append(f"PATHS: {path}: is not a text file of paths")
    if problems:
        raise ConfigError(problems)
    return found


def describe_left_out(path: str) -> str:
    """Return how many files below a folder are no images by their endings, e.g. '; 2 files left out: .heic (2)'."""
    counts: Counter[str] = Counter()
    for _, folders, names in os.walk(path):
        folders[:] = filter(is_class, folders)
        others = [name for name in names if not name.lower().endswith(ALL_EXTENSIONS) and name[0] != "."]
        counts.update(os.path.splitext(name)[1].lower() for name in others if name.lower() not in JUNK_FILES)
    shown = ", ".join(f"{ending or 'no ending'} ({number})" for ending, number in counts.most_common(6))
    return f"; {counted(counts.total(), 'file')} left out: {shown}" if counts else ""


def _describe(error: OSError, path: str) -> str:
    if not isinstance(error, FileNotFoundError):
        return error.strerror or str(error)
    parent = Path(path).parent
    return f"no such file or folder{did_you_mean(Path(path).name, os.listdir(parent) if parent.is_dir() else ())}"


def _expand(path: str, extensions: tuple[str, ...]) -> Iterator[str]:
    if path == "-":
        yield from _lines(sys.stdin)
    elif os.path.isdir(path):
        yield from _walk(path, (), extensions)
    elif os.path.lexists(path):
        if path.lower().endswith(".txt"):
            with open_text(path, errors="surrogateescape") as file:
                yield from _lines(file)
        else:
            yield path
    elif glob.has_magic(path):
        # A name may have brackets: [1] then stands for itself.
        matches = glob.glob(path, recursive=True) or glob.glob(path.replace("[", "[[]"), recursive=True)
        for match in sorted(matches):
            if not os.path.isdir(match):
                yield from [match] if is_image(os.path.basename(match), extensions) else ()
            elif "**" not in path:
                yield from _walk(match, (), extensions)
    else:
        raise FileNotFoundError(2, "no such file or folder", path)


def _lines(file: Any) -> Iterator[str]:
    for line in file:
        if "\0" in line:
            raise OSError(22, "is not a text file of paths")
        if text := line.strip("\r\n"):
            yield text


def _walk(folder: str, above: tuple[str, ...], extensions: tuple[str, ...]) -> Iterator[str]:
    """Yield the images below a folder; `above` are its parents, so that circular links end."""
    real = os.path.realpath(folder)
    if real in above:
        return
    with os.scandir(folder) as scanned:
        entries = sorted(scanned, key=lambda entry: entry.name)
    for entry in entries:
        if is_folder(entry):
            if is_class(entry.name):
                yield from _walk(entry.path, (*above, real), extensions)
        elif is_image(entry.name, extensions):
            yield entry.path
