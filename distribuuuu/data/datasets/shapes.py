"""The built-in data set `shapes`: ten classes of small JPEGs, drawn once into the cache folder with Pillow."""

from __future__ import annotations

import errno
import io
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset, SplitDataset
from distribuuuu.data.datasets.imagefolder import ImageFolder
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.locks import take_turn

if TYPE_CHECKING:
    from PIL import Image

# To be increased with any change of a pixel: a folder of another version is drawn again.
VERSION = 1
MARKER = "README.txt"
HEADING = "shapes: a data set drawn by distribuuuu"

Points = list[tuple[float, float]]
Color = tuple[int, int, int]


@DATASETS.register("shapes")
class Shapes(ImageFolder):
    """The drawn images, read like any other folder of images."""

    num_classes, num_images = 10, 2000
    has_splits = False
    mean, std = (0.489, 0.495, 0.491), (0.233, 0.256, 0.229)

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield a wrong number of classes; an incomplete folder is drawn again and needs no check."""
        return super(SplitDataset, cls).find_problems(cfg, train)

    @classmethod
    def count_images(cls, cfg, most: int) -> int:
        """Return the number of training images."""
        return cls.num_images

    @classmethod
    def open_split(cls, cfg, name: str, trained: ImageDataset | None = None) -> Shapes:
        """Return the set; draw it if it does not exist yet."""
        root = draw_shapes(cache_folder(cfg.DATA.CACHE_DIR) / "shapes")
        return cls(root, "train" if name == "TRAIN" else "val", cache_dir=cfg.DATA.CACHE_DIR)


# --------------------------------------------------------------------------------- the folder


def draw_shapes(
    root: str | os.PathLike, num_train: int = 2000, num_val: int = 500, size: int = 72, seed: int = 0
) -> Path:
    """Draw root/train/<class>/<nnnn>.jpg and root/val/<class>/<nnnn>.jpg once, and return root.

    A complete folder with the same arguments is returned at once; any other drawing is replaced. Any number of
    processes may call this at the same time and may be killed: `root` is complete or does not exist. An image depends
    only on (seed, split, class, index, size).

    Args:
        root: the folder to create, with its parents.
        num_train, num_val: images of the split over all classes.
        size: width and height of an image in pixels.
        seed: seed of the images.

    Raises:
        ValueError: a number of images is not a positive multiple of ten.
        OSError: the folder cannot be written, or holds other files; the message names it.
    """
    root = Path(root).expanduser().resolve()
    counts = {"train": num_train, "val": num_val}
    for split, count in counts.items():
        if count <= 0 or count % len(SHAPES):
            raise ValueError(f"num_{split} must be a positive multiple of {len(SHAPES)}, not {count}")
    marker = (
        f"{HEADING}\n\nversion {VERSION}\nseed {seed}\nsize {size} px\n"
        f"train {num_train} images\nval {num_val} images\nclasses {', '.join(SHAPES)}\n\n"
        "This file was written last: the folder is whole. Delete the folder and it will be drawn again.\n"
    )
    try:
        if _read_marker(root) != marker:
            with take_turn(root):
                _draw_and_install(root, counts, size, seed, marker)
    except OSError as error:
        message = f"cannot draw the data set shapes: {error.strerror or error}; use another folder or repair this one"
        raise OSError(error.errno or errno.EIO, message, str(root)) from error
    return root


def _read_marker(root: Path) -> str:
    try:
        return (root / MARKER).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _draw_and_install(root: Path, counts: dict[str, int], size: int, seed: int, marker: str) -> None:
    """Draw into a sibling of `root` and rename it, unless another process has done so."""
    if (existing := _read_marker(root)) == marker:
        return
    if root.exists() and os.listdir(root) and not existing.startswith(HEADING):
        raise FileExistsError(errno.EEXIST, "the folder holds other files, which are not changed")
    for left in root.parent.glob(f".{root.name}.*.part"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    part = root.parent / f".{root.name}.{os.urandom(8).hex()}.part"
    try:
        part.mkdir()
        _draw_all(part, counts, size, seed)
        (part / MARKER).write_text(marker, encoding="utf-8")
        shutil.rmtree(root, ignore_errors=True)
        os.replace(part, root)
    finally:
        shutil.rmtree(part, ignore_errors=True)


# --------------------------------------------------------------------------------- the images


def _regular(num_points: int, inner: float = 1.0) -> Points:
    """Return a regular polygon; every second point has the radius `inner`."""
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


# Polygons in the unit circle: the outline, then its holes. No two classes look alike after the rotation, mirroring and
# stretching of the drawing and the augmentation.
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

    background, foreground = _two_colors(random)
    image = _background(size, background, random)
    _add_clutter(image, random, num=random.randint(0, 3))
    mask = _shape_mask(name, size, random)
    if random.random() < 0.35:
        image.paste(_any_color(random), mask=mask.filter(ImageFilter.MaxFilter(3)))
    image.paste(_textured(size, foreground, random), mask=mask)
    _add_clutter(image, random, num=random.randint(0, 1))
    image = Image.blend(image, _noise(size, random), random.uniform(0.0, 0.1))
    image = image.filter(ImageFilter.GaussianBlur(random.uniform(0.0, 0.8)))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=random.randint(60, 95))
    return buffer.getvalue()


def _shape_mask(name: str, size: int, random: Random) -> Image.Image:
    """Return an antialiased mask of the shape with random rotation, stretch, scale and position."""
    from PIL import Image, ImageDraw

    fine = 4 * size
    radius = fine * random.uniform(0.28, 0.36)
    angle = math.radians(random.uniform(-30.0, 30.0))
    stretch = random.uniform(0.85, 1.0)
    margin = 0.45 * fine - radius
    center_x, center_y = (fine / 2 + random.uniform(-margin, margin) for _ in range(2))
    cos, sin = radius * math.cos(angle), radius * math.sin(angle)
    mask = Image.new("L", (fine, fine))
    for hole, points in enumerate(SHAPES[name]()):
        moved = [(center_x + cos * stretch * x - sin * y, center_y + sin * stretch * x + cos * y) for x, y in points]
        ImageDraw.Draw(mask).polygon(moved, fill=0 if hole else 255)
    return mask.resize((size, size), Image.Resampling.BOX)


def _any_color(random: Random) -> Color:
    return random.randrange(256), random.randrange(256), random.randrange(256)


def _two_colors(random: Random) -> tuple[Color, Color]:
    """Return two colors that differ in hue and in brightness."""
    while True:
        one, other = _any_color(random), _any_color(random)
        difference = [a - b for a, b in zip(one, other, strict=True)]
        brightness = 0.299 * difference[0] + 0.587 * difference[1] + 0.114 * difference[2]
        if sum(map(abs, difference)) > 200 and abs(brightness) > 70:
            return one, other


def _noise(size: int, random: Random) -> Image.Image:
    from PIL import Image

    return Image.frombytes("RGB", (size, size), random.randbytes(3 * size * size))


def _textured(size: int, color: Color, random: Random) -> Image.Image:
    """Return an image of the color with coarse noise."""
    from PIL import Image

    coarse = _noise(random.randint(2, 8), random).resize((size, size), Image.Resampling.BICUBIC)
    return Image.blend(Image.new("RGB", (size, size), color), coarse, random.uniform(0.05, 0.2))


def _background(size: int, color: Color, random: Random) -> Image.Image:
    """Return a texture of the color; half of them fade toward black or white."""
    from PIL import Image

    image = _textured(size, color, random)
    if random.random() < 0.5:
        # The center of the rotated square, without its corners.
        slope = Image.linear_gradient("L").rotate(random.uniform(0, 360)).crop((38, 38, 218, 218)).resize((size, size))
        image.paste(random.choice(((0, 0, 0), (255, 255, 255))), mask=slope.point(lambda level: level // 3))
    return image


def _add_clutter(image: Image.Image, random: Random, num: int) -> None:
    """Draw thin lines and small dots at random."""
    from PIL import ImageDraw

    draw, size = ImageDraw.Draw(image), image.width
    for _ in range(num):
        x, y, end_x, end_y = (random.uniform(0, size) for _ in range(4))
        if random.random() < 0.5:
            draw.line((x, y, end_x, end_y), fill=_any_color(random))
        else:
            radius = random.uniform(0.01, 0.05) * size
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_any_color(random))
