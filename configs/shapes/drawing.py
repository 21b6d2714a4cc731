"""The images of the data set `shapes`, drawn with Pillow."""

import io
import math
from collections.abc import Callable
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw, ImageFilter

Points = list[tuple[float, float]]
Color = tuple[int, int, int]


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


def draw_all(folder: Path, counts: dict[str, int], size: int, seed: int) -> None:
    """Draw SPLIT/CLASS/NNNN.jpg: an image depends only on (seed, split, class, index, size)."""
    for split, count in counts.items():
        for name in SHAPES:
            class_folder = folder / split / name
            class_folder.mkdir(parents=True)
            for index in range(count // len(SHAPES)):
                jpeg = _draw_jpeg(name, size, Random(f"{seed}/{split}/{name}/{index}"))
                (class_folder / f"{index:04d}.jpg").write_bytes(jpeg)


def _draw_jpeg(name: str, size: int, random: Random) -> bytes:
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
    return Image.frombytes("RGB", (size, size), random.randbytes(3 * size * size))


def _textured(size: int, color: Color, random: Random) -> Image.Image:
    """Return an image of the color with coarse noise."""
    coarse = _noise(random.randint(2, 8), random).resize((size, size), Image.Resampling.BICUBIC)
    return Image.blend(Image.new("RGB", (size, size), color), coarse, random.uniform(0.05, 0.2))


def _background(size: int, color: Color, random: Random) -> Image.Image:
    """Return a texture of the color; half of them fade toward black or white."""
    image = _textured(size, color, random)
    if random.random() < 0.5:
        # The center of the rotated square, without its corners.
        slope = Image.linear_gradient("L").rotate(random.uniform(0, 360)).crop((38, 38, 218, 218)).resize((size, size))
        image.paste(random.choice(((0, 0, 0), (255, 255, 255))), mask=slope.point(lambda level: level // 3))
    return image


def _add_clutter(image: Image.Image, random: Random, num: int) -> None:
    """Draw thin lines and small dots at random."""
    draw, size = ImageDraw.Draw(image), image.width
    for _ in range(num):
        x, y, end_x, end_y = (random.uniform(0, size) for _ in range(4))
        if random.random() < 0.5:
            draw.line((x, y, end_x, end_y), fill=_any_color(random))
        else:
            radius = random.uniform(0.01, 0.05) * size
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_any_color(random))
