"""RandAugment of big_vision: each operation against its formula, written out with numpy."""

import sys
from collections import Counter
from typing import Any

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


def mapped(rows: Any, offset: tuple[float, float] = (0, 0), center: tuple[float, float] = (0, 0)) -> np.ndarray:
    """Return the pixels of SCENE nearest to rows @ (x, y) + offset, from a center, and 128 outside."""
    places = np.stack(np.mgrid[:HEIGHT, :WIDTH][::-1]) - np.reshape(center, (2, 1, 1))
    places = np.tensordot(rows, places, 1) + np.reshape(np.add(center, offset), (2, 1, 1))
    x, y = np.floor(places + 0.5).astype(int)
    inside = (x >= 0) & (x < WIDTH) & (y >= 0) & (y < HEIGHT)
    return np.where(inside[..., None], SCENE[np.clip(y, 0, HEIGHT - 1), np.clip(x, 0, WIDTH - 1)], 128)


COS, SIN, CENTER = np.cos(np.pi / 6), np.sin(np.pi / 6), ((WIDTH - 1) / 2, (HEIGHT - 1) / 2)
GEOMETRY = {
    "Rotate": lambda sign: mapped([[COS, -sign * SIN], [sign * SIN, COS]], center=CENTER),
    "ShearX": lambda sign: mapped([[1, sign * 0.3], [0, 1]]), "ShearY": lambda sign: mapped([[1, 0], [sign * 0.3, 1]]),
    "TranslateX": lambda sign: mapped(np.eye(2), (sign * 100, 0)),
    "TranslateY": lambda sign: mapped(np.eye(2), (0, sign * 100)),
}  # fmt: skip


def test_an_operation_on_positions_is_its_formula_in_both_directions():
    for name, formula in GEOMETRY.items():
        references, signs = {sign: formula(sign) for sign in (-1, 1)}, []
        for seed in range(30):
            found = applied(name, SCENE, seed)
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
