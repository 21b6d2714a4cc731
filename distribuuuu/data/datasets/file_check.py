"""A check of the image files before the first epoch, bounded in time; its progress is kept for later starts.

Of evaluation images the headers and the ends are read, since a broken one would stop a run only after its first epoch;
of training images the sizes are asked for. A file that was found sound is not looked at again.
"""

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from distribuuuu.data.datasets.array_file import read_arrays, write_arrays
from distribuuuu.data.datasets.base import ImageDataset, file_stamp, open_at_once, read_file
from distribuuuu.data.datasets.folder_index import identity_of, take_turn
from distribuuuu.data.datasets.folder_scan import NUM_THREADS
from distribuuuu.data.decode import DecodeOptions, build_decode_options, check_size, decode, open_image
from distribuuuu.data.jpeg_header import read_jpeg_header
from distribuuuu.data.samples import reason_of

KIND, VERSION = "checked files", 1
# Seconds after which the rest is left to the next start.
HEADERS_LIMIT_S, SIZES_LIMIT_S = 20.0, 5.0
# Bytes in which nearly every JPEG has its header.
_HEAD = 1 << 14
# First and last bytes of a file that is whole; one with another end is decoded.
_ENDS = {b"\xff\xd8": b"\xff\xd9", b"\x89P": b"IEND\xaeB`\x82"}
# Files that a thread looks at together, and the steps in which it goes through the set: a check that is not finished
# has looked at some of each part.
_CHUNK, _STRIDE = 64, 16
_MOST_NAMED = 5
# Broken files after which a check ends.
_MOST_BROKEN = 1000


def check_images(cfg, images: ImageDataset, train: bool) -> tuple[str, str]:
    """Return what is wrong with the files of a set, and what of it is not known yet; both empty if there is nothing."""
    if not images.has_files:
        return "", ""
    options, decoder = build_decode_options(cfg), cfg.DATA.DECODER

    def look(index: int) -> str | None:
        path = images.describe(index)
        try:
            return _size_problem(path) if train else check_file(path, decoder, options)
        except Exception as error:  # decoders raise nearly anything
            return f"{path}: {type(error).__name__}: {reason_of(error)}"

    if train:
        what, key, limit_s = "sizes", [], SIZES_LIMIT_S
    else:
        what, key, limit_s = "headers", [decoder, *options], HEADERS_LIMIT_S
    broken, num = _check_in_turn(images, what, key, look, limit_s)
    problem = rest = ""
    if broken:
        named = [broken[index] for index in sorted(broken)]
        more = f"; and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        problem = f"{len(named)} of {num} images are broken: {'; '.join(named[:_MOST_NAMED])}{more}"
    if num < len(images):
        rest = f"the {what} of {num} of {len(images)} files have been checked; the next start goes on"
    return problem, rest


def check_file(path: str, decoder: str, options: DecodeOptions) -> None:
    """Read the header and the end of an image file; decode it if its end is not that of a whole file.

    Raises:
        Exception: it is broken.
    """
    with open(path, "rb", opener=open_at_once) as file:
        head = file.read(_HEAD)
        if not head:
            raise ValueError("the file is empty")
        if header := read_jpeg_header(head):
            check_size(header.width, header.height, options.max_pixels)
        else:
            file.seek(0)
            open_image(file, options.max_pixels)
        end = _ENDS.get(head[:2], b"")
        file.seek(-min(len(head), len(end)), os.SEEK_END)
        is_whole = file.read() == end
    if not is_whole:
        decode(read_file(path), decoder, options)


def _size_problem(path: str) -> str | None:
    stamp = file_stamp(path)
    return None if stamp and stamp[0] else f"{path}: {'the file is empty' if stamp else 'the file cannot be found'}"


def _check_in_turn(
    images: ImageDataset, what: str, key: list, look: Callable[[int], str | None], limit_s: float
) -> tuple[dict[int, str], int]:
    """Return the broken files by number, and how many files have been checked; of several processes one does the work.

    Args:
        images: the set.
        what: is checked: another kind of check has a record of its own.
        key: what the answer depends on beside the files.
        look: returns what is wrong with a file.
        limit_s: seconds after which no more files are looked at.
    """
    place, scan = images.check_place()
    broken, done, num_chunks = {}, 0, -(-len(images) // _CHUNK)
    if place is not None:
        file, key = place.with_suffix(f".{what}"), [scan, *key]
        seen, (broken, done) = identity_of(file), _load(file, key, len(images))
    if done == num_chunks and not broken:
        return broken, len(images)
    with contextlib.ExitStack() as stack:
        try:
            if place is not None:
                stack.enter_context(take_turn(file))
        except OSError:  # nothing can be kept
            place = None
        if place is not None and identity_of(file) != seen:  # another process has gone on meanwhile
            broken, done = _load(file, key, len(images))
        else:
            done = _go_on(len(images), look, limit_s, broken, done)
            with contextlib.suppress(OSError):
                if place is not None:
                    meta = {"key": key, "done": done, "broken": list(broken.items())}
                    write_arrays(file, KIND, VERSION, meta, {})
    return broken, min(done * _CHUNK, len(images))


def _load(file: Path, key: list, num: int) -> tuple[dict[int, str], int]:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # a damaged record counts as none
        meta, _ = read_arrays(file, KIND, VERSION)
        broken, done = {int(index): str(problem) for index, problem in meta["broken"]}, int(meta["done"])
        if meta["key"] == key and done >= 0 and all(0 <= index < num for index in broken):
            return broken, done
    return {}, 0


def _go_on(num: int, look: Callable[[int], str | None], limit_s: float, broken: dict[int, str], done: int) -> int:
    """Look at the files in `broken` again, then at the chunks after the first `done`; return their new number."""
    end, num_found, again = time.monotonic() + limit_s, [0], sorted(broken)

    def look_at(numbers) -> dict[int, str] | None:
        if time.monotonic() > end or num_found[0] > _MOST_BROKEN:
            return None
        found = {index: problem for index in numbers if (problem := look(index))}
        num_found[0] += len(found)
        return found

    order = sorted(range(-(-num // _CHUNK)), key=lambda chunk: chunk % _STRIDE)[done:]
    groups = [again[first : first + _CHUNK] for first in range(0, len(again), _CHUNK)]
    num_again = len(groups)
    groups += [range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, num)) for chunk in order]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for position, (group, found) in enumerate(zip(groups, pool.map(look_at, groups), strict=True)):
            if found is None:  # and so are all that follow
                break
            for index in group:
                broken.pop(index, None)
            broken.update(found)
            done += position >= num_again
    return done
