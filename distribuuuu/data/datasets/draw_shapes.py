"""Draw the embedded data set `shapes`: ten classes of JPEGs in ImageFolder layout, with Pillow and nothing else."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

# Raise it with any change that changes a pixel: a folder drawn by another version is drawn anew.
VERSION = 1
MARKER = "README.txt"
HEADING = "shapes: a data set drawn by distribuuuu"
SPLITS = ("train", "val")
STALE_PART_S = 3600

Points = list[tuple[float, float]]
Colour = tuple[int, int, int]


def _regular(num_points: int, inner: float = 1.0) -> Points:
    """Return a regular polygon; every second point lies at the radius `inner`."""
    step = 2 * math.pi / num_points
    radii = (1.0, inner)
    return [(radii[i % 2] * math.sin(i * step), -radii[i % 2] * math.cos(i * step)) for i in range(num_points)]


def _disc(radius: float = 1.0, shift: float = 0.0) -> Points:
    return [(radius * x + shift, radius * y) for x, y in _regular(40)]


def _heart() -> Points:
    angles = [2 * math.pi * i / 48 for i in range(48)]
    heights = [13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t) for t in angles]
    return [(math.sin(t) ** 3, -height / 16 - 0.1) for t, height in zip(angles, heights, strict=True)]


def _arrow() -> Points:
    return [(0, -1), (0.75, -0.15), (0.25, -0.15), (0.25, 1), (-0.25, 1), (-0.25, -0.15), (-0.75, -0.15)]


def _cross() -> Points:
    near, far = 0.3, 0.95
    corner = [(near, -far), (near, -near), (far, -near)]
    half = corner + [(-y, x) for x, y in corner]
    return half + [(-x, -y) for x, y in half]


# Polygons in the unit circle: the shape, then the holes in it. No two classes look alike when turned, mirrored or
# stretched, for that is what the drawing and the augmentation do to them.
SHAPES: dict[str, Callable[[], list[Points]]] = {
    "arrow": lambda: [_arrow()],
    "circle": lambda: [_disc()],
    "crescent": lambda: [_disc(), _disc(0.85, shift=0.5)],
    "cross": lambda: [_cross()],
    "heart": lambda: [_heart()],
    "hourglass": lambda: [[(-0.75, -0.95), (0.75, -0.95), (-0.75, 0.95), (0.75, 0.95)]],
    "ring": lambda: [_disc(), _disc(0.55)],
    "square": lambda: [_regular(4)],
    "star": lambda: [_regular(10, inner=0.4)],
    "triangle": lambda: [_regular(3)],
}


def draw_shapes(
    root: str | os.PathLike, num_train: int = 2000, num_val: int = 500, size: int = 72, seed: int = 0
) -> Path:
    """Draw root/train/<class>/<nnnn>.jpg and root/val/<class>/<nnnn>.jpg once, and return root.

    A folder drawn with the same arguments is returned at once; a half or an older one is drawn anew. Any number of
    processes may make the same call at a time, and any of them may be killed: `root` appears whole or not at all.
    An image is a function of (seed, split, class, index, size).

    Args:
        root: the folder to make; its parents are made too. Other arguments need another folder.
        num_train, num_val: images of the split, all ten classes together.
        size: width and height of an image, in pixels.
        seed: selects the images.

    Raises:
        ValueError: a number of images is not a positive multiple of ten.
        OSError: the folder cannot be written, or holds files that are no such drawing; the message names it.
    """
    root = Path(root).expanduser().resolve()
    counts = {"train": num_train, "val": num_val}
    for split, count in counts.items():
        if count <= 0 or count % len(SHAPES):
            raise ValueError(f"num_{split} must be a positive multiple of {len(SHAPES)}, not {count}")
    marker = _marker_text(counts, size, seed)
    try:
        if not _is_whole(root, marker):
            _draw_and_install(root, counts, size, seed, marker)
    except OSError as error:
        message = f"cannot draw the data set shapes: {error.strerror or error}; name another folder or mend this one"
        raise OSError(error.errno or errno.EIO, message, str(root)) from error
    return root


def _marker_text(counts: dict[str, int], size: int, seed: int) -> str:
    return (
        f"{HEADING}\n\nversion {VERSION}\nseed {seed}\nsize {size} px\n"
        f"train {counts['train']} images\nval {counts['val']} images\nclasses {', '.join(SHAPES)}\n\n"
        "This file was written last: the folder is whole. Delete the folder and it will be drawn again.\n"
    )


def _is_whole(root: Path, marker: str) -> bool:
    try:
        return (root / MARKER).read_text(encoding="utf-8", errors="replace") == marker
    except FileNotFoundError:
        return False


def _draw_and_install(root: Path, counts: dict[str, int], size: int, seed: int, marker: str) -> None:
    """Draw into a sibling of `root` and give it the final name, unless another process was quicker."""
    root.parent.mkdir(parents=True, exist_ok=True)
    if root.exists() and not _looks_drawn(root):
        raise FileExistsError(errno.EEXIST, "the folder holds other files, which stay as they are")
    part = root.parent / f".{root.name}.{os.urandom(8).hex()}.part"
    try:
        part.mkdir()
        _draw_all(part, counts, size, seed)
        (part / MARKER).write_text(marker, encoding="utf-8")
        _empty_unless_whole(root, marker)
        _rename_unless_whole(part, root, marker)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    _sweep_parts(root)


def _looks_drawn(root: Path) -> bool:
    """Tell whether `root` holds nothing but what a drawing, perhaps a half one, is made of."""
    names = {path.name for path in root.iterdir()}
    if MARKER in names and not (root / MARKER).read_text(encoding="utf-8", errors="replace").startswith(HEADING):
        return False
    if MARKER in names or not names <= set(SPLITS):
        return names <= {MARKER, *SPLITS}
    files = (path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir())
    drawn = re.compile(rf"({'|'.join(SPLITS)})/({'|'.join(SHAPES)})/\d{{4,}}\.jpg")
    return all(drawn.fullmatch(file) for file in files)


def _empty_unless_whole(root: Path, marker: str) -> None:
    """Delete a half or older drawing, but leave the empty folder."""
    try:
        folder = os.open(root, os.O_RDONLY)
    except FileNotFoundError:
        return
    # What is deleted is in the folder opened above, whatever bears its name by now: looking for the marker after the
    # opening makes sure that this is never a whole drawing that another process has just put there.
    try:
        if not _is_whole(root, marker):
            for name in (MARKER, *SPLITS):
                _delete(name, folder)
    finally:
        os.close(folder)


def _delete(name: str, folder: int) -> None:
    """Delete a file or a tree in the open folder; other processes may be at the same work."""
    with contextlib.suppress(FileNotFoundError):
        for _, children, files, parent in os.fwalk(name, topdown=False, dir_fd=folder):
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file, dir_fd=parent)
            for child in children:
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(child, dir_fd=parent)
        try:
            os.rmdir(name, dir_fd=folder)
        except NotADirectoryError:
            os.unlink(name, dir_fd=folder)


def _rename_unless_whole(part: Path, root: Path, marker: str) -> None:
    # A rename onto a folder succeeds only while that folder is empty, so it never replaces a whole one.
    try:
        os.replace(part, root)
    except OSError:
        if not _is_whole(root, marker):
            raise


def _sweep_parts(root: Path) -> None:
    """Delete what killed processes left; a young part may still be in work."""
    for part in root.parent.glob(f".{root.name}.*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > STALE_PART_S:
                shutil.rmtree(part, ignore_errors=True)


def _draw_all(folder: Path, counts: dict[str, int], size: int, seed: int) -> None:
    for split, count in counts.items():
        for name in SHAPES:
            class_folder = folder / split / name
            class_folder.mkdir(parents=True)
            for index in range(count // len(SHAPES)):
                jpeg = _draw_jpeg(name, size, Random(f"{seed}/{split}/{name}/{index}"))
                (class_folder / f"{index:04d}.jpg").write_bytes(jpeg)


def _draw_jpeg(name: str, size: int, random: Random) -> bytes:
    from PIL import Image, ImageFilter

    ground, front = _two_colours(random)
    image = _background(size, ground, random)
    _distract(image, random, num=random.randint(0, 3))
    mask = _shape_mask(name, size, random)
    if random.random() < 0.35:
        image.paste(_any_colour(random), mask=mask.filter(ImageFilter.MaxFilter(3)))
    image.paste(_textured(size, front, random), mask=mask)
    _distract(image, random, num=random.randint(0, 1))
    image = Image.blend(image, _noise(size, random), random.uniform(0.0, 0.1))
    image = image.filter(ImageFilter.GaussianBlur(random.uniform(0.0, 0.8)))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=random.randint(60, 95))
    return buffer.getvalue()


def _shape_mask(name: str, size: int, random: Random) -> Image.Image:
    """Return where the shape is, turned, stretched, scaled and shifted at random, with soft edges."""
    from PIL import Image, ImageDraw

    fine = 4 * size
    radius = fine * random.uniform(0.28, 0.36)
    turn = math.radians(random.uniform(-30.0, 30.0))
    stretch = random.uniform(0.85, 1.0)
    room = 0.45 * fine - radius
    middle_x, middle_y = (fine / 2 + random.uniform(-room, room) for _ in range(2))
    cos, sin = radius * math.cos(turn), radius * math.sin(turn)
    mask = Image.new("L", (fine, fine))
    for hole, points in enumerate(SHAPES[name]()):
        moved = [(middle_x + cos * stretch * x - sin * y, middle_y + sin * stretch * x + cos * y) for x, y in points]
        ImageDraw.Draw(mask).polygon(moved, fill=0 if hole else 255)
    return mask.resize((size, size), Image.Resampling.BOX)


def _any_colour(random: Random) -> Colour:
    return random.randrange(256), random.randrange(256), random.randrange(256)


def _two_colours(random: Random) -> tuple[Colour, Colour]:
    """Return two colours that differ in hue and in brightness; either may be the brighter."""
    while True:
        one, other = _any_colour(random), _any_colour(random)
        difference = [a - b for a, b in zip(one, other, strict=True)]
        brighter = 0.299 * difference[0] + 0.587 * difference[1] + 0.114 * difference[2]
        if sum(map(abs, difference)) > 200 and abs(brighter) > 70:
            return one, other


def _noise(size: int, random: Random) -> Image.Image:
    from PIL import Image

    return Image.frombytes("RGB", (size, size), random.randbytes(3 * size * size))


def _textured(size: int, colour: Colour, random: Random) -> Image.Image:
    """Return an image of the colour, made uneven by coarse noise."""
    from PIL import Image

    coarse = _noise(random.randint(2, 8), random).resize((size, size), Image.Resampling.BICUBIC)
    return Image.blend(Image.new("RGB", (size, size), colour), coarse, random.uniform(0.05, 0.2))


def _background(size: int, colour: Colour, random: Random) -> Image.Image:
    """Return a texture of the colour that, half the time, fades towards black or white."""
    from PIL import Image

    image = _textured(size, colour, random)
    if random.random() < 0.5:
        # The middle of the turned square, without its corners.
        slope = Image.linear_gradient("L").rotate(random.uniform(0, 360)).crop((38, 38, 218, 218)).resize((size, size))
        image.paste(random.choice(((0, 0, 0), (255, 255, 255))), mask=slope.point(lambda level: level // 3))
    return image


def _distract(image: Image.Image, random: Random, num: int) -> None:
    """Draw thin lines and small dots that mean nothing."""
    from PIL import ImageDraw

    draw, size = ImageDraw.Draw(image), image.width
    for _ in range(num):
        x, y, end_x, end_y = (random.uniform(0, size) for _ in range(4))
        if random.random() < 0.5:
            draw.line((x, y, end_x, end_y), fill=_any_colour(random))
        else:
            radius = random.uniform(0.01, 0.05) * size
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_any_colour(random))
