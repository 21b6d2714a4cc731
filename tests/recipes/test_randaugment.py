"""RandAugment of big_vision: each operation against its formula, written out with numpy."""

import sys
from collections import Counter

import numpy as np
import torch
from PIL import Image
from support.images import scene
from support.recipe_measures import recipe

from distribuuuu.config.registry import AUGMENTATIONS
from distribuuuu.data.seeding import seeded_generators

recipe("imagenet/plain_vit_small")  # imports the plug-in
randaugment = AUGMENTATIONS.get("randaugment_big_vision")
plugin = sys.modules[randaugment.__module__]
OPERATIONS, cutout = plugin.OPERATIONS, plugin.cutout

HEIGHT, WIDTH = 224, 208
SCENE = np.clip(np.array(scene(WIDTH, HEIGHT)), 3, 241)  # of a limited range


def applied(name: str, pixels: np.ndarray, seed: int = 0) -> np.ndarray:
    with seeded_generators(seed):
        return np.array(OPERATIONS[name](Image.fromarray(pixels)))


def gather(pixels: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the pixels nearest to coordinates (H, W), and 128 outside."""
    x, y = np.floor(x + 0.5).astype(int), np.floor(y + 0.5).astype(int)
    height, width = pixels.shape[:2]
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    return np.where(inside[..., None], pixels[np.clip(y, 0, height - 1), np.clip(x, 0, width - 1)], 128)


def grid(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    height, width = pixels.shape[:2]
    y, x = np.mgrid[:height, :width].astype(np.float64)
    return x, y


def rotated(pixels: np.ndarray, sign: int) -> np.ndarray:
    x, y = grid(pixels)
    height, width = pixels.shape[:2]
    x, y, angle = x - (width - 1) / 2, y - (height - 1) / 2, sign * np.radians(30)
    new_x, new_y = np.cos(angle) * x - np.sin(angle) * y, np.sin(angle) * x + np.cos(angle) * y
    return gather(pixels, new_x + (width - 1) / 2, new_y + (height - 1) / 2)


def moved(pixels: np.ndarray, **offsets: float) -> np.ndarray:
    x, y = grid(pixels)
    shear_x, shear_y = offsets.get("shear_x", 0), offsets.get("shear_y", 0)
    return gather(pixels, x + shear_x * y + offsets.get("x", 0), y + shear_y * x + offsets.get("y", 0))


GEOMETRY = {
    "Rotate": rotated,
    "ShearX": lambda pixels, sign: moved(pixels, shear_x=sign * 0.3),
    "ShearY": lambda pixels, sign: moved(pixels, shear_y=sign * 0.3),
    "TranslateX": lambda pixels, sign: moved(pixels, x=sign * 100),
    "TranslateY": lambda pixels, sign: moved(pixels, y=sign * 100),
}


def test_an_operation_on_positions_is_its_formula_in_both_directions():
    pixels = SCENE
    for name, formula in GEOMETRY.items():
        references, signs = {sign: formula(pixels, sign) for sign in (-1, 1)}, []
        for seed in range(30):
            found = applied(name, pixels, seed)
            # Ties between two nearest pixels may be broken in another way.
            same = [sign for sign, expected in references.items() if (found == expected).all(-1).mean() > 0.89]
            assert len(same) == 1, name
            signs += same
        assert 7 <= signs.count(1) <= 23, name


def blend(base: int, pixels: np.ndarray) -> np.ndarray:
    return np.clip(base + 1.9 * (pixels.astype(np.float32) - base), 0, 255)


COLORS = {
    "Invert": lambda pixels: 255 - pixels, "Posterize": lambda pixels: pixels // 16 * 16,  # 4 bits
    "Solarize": lambda pixels: 255 - pixels,  # the threshold 256 is 0 in a byte
    "SolarizeAdd": lambda pixels: np.where(pixels < 128, pixels.astype(int) + 110, pixels).clip(0, 255),
    "Contrast": lambda pixels: blend(HEIGHT * WIDTH // 256, pixels), "Brightness": lambda pixels: blend(0, pixels),
}  # fmt: skip


def test_an_operation_on_colors_is_its_formula():
    for name, formula in COLORS.items():
        assert (applied(name, SCENE) == formula(SCENE).astype(int)).all(), name


def test_cutout_is_a_gray_square_of_80_pixels_that_the_border_cuts_off():
    white = Image.new("RGB", (200, 150), "white")
    for x, y in ((0, 0), (100, 70), (199, 149), (20, 100)):
        found = np.array(cutout(white, x, y))
        expected = np.full((150, 200, 3), 255)
        expected[max(0, y - 40) : y + 40, max(0, x - 40) : x + 40] = 128
        assert (found == expected).all()
    assert np.array(white).min() == 255  # the image itself is as before
    corners = {tuple(np.argwhere(applied("Cutout", np.array(white), seed)[..., 0] == 128)[0]) for seed in range(20)}
    assert len(corners) > 15


def test_two_of_sixteen_operations_are_drawn_and_always_applied(monkeypatch):
    drawn = []
    for name in OPERATIONS:
        monkeypatch.setitem(OPERATIONS, name, lambda image, name=name: drawn.append(name) or image)
    pixels = torch.zeros(3, 4, 4, dtype=torch.uint8)
    for seed in range(2000):
        with seeded_generators(seed):
            assert torch.equal(randaugment(pixels), pixels)
    assert len(OPERATIONS) == 16 and len(drawn) == 4000
    assert all(180 < count < 320 for count in Counter(drawn).values()) and len(Counter(drawn)) == 16
    pairs = Counter(zip(drawn[::2], drawn[1::2], strict=True))
    assert len(pairs) > 230 and any(first == second for first, second in pairs)
