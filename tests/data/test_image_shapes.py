"""Rectangular images and crops of the whole image, against PIL and exact arithmetic."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image
from support.tables import each_row

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.build_transform import build_transform
from distribuuuu.data.crops import PaddedCrop, WholeImage
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import LazyImage
from distribuuuu.data.seeding import SampleRNG
from distribuuuu.data.transforms import CenterCrop, ResizedCrop, resized_size
from distribuuuu.models import build_model

SOURCES = [(30, 40), (40, 30), (64, 64), (7, 200), (200, 7), (1, 50), (97, 321), (480, 641)]
TARGETS = [(96, 320), (320, 96), (32, 32), (2, 9)]
WIDE = (24, 56)


def pixels_of(height: int, width: int, seed: int = 0) -> torch.Tensor:
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    return torch.from_numpy(np.array(Image.fromarray(coarse).resize((width, height), 3))).permute(2, 0, 1)


@each_row(("size", "target"), [*itertools.product(SOURCES, TARGETS)])
def test_sizes_after_the_resize_are_exact(size, target):
    scales = [Fraction(side, of) for side, of in zip(target, size, strict=True)]
    for mode, scale in (("cover", max(scales)), ("letterbox", min(scales))):
        expected = [math.floor(side * scale) for side in size]
        expected = [max(2, side) for side in expected] if mode == "letterbox" else expected
        assert resized_size(mode, size, target) == tuple(expected), mode
    assert resized_size("squash", size, target) == target


def by_pil(transform, pixels: torch.Tensor) -> np.ndarray:
    """Return the result of an evaluation transform, computed by PIL."""
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    (height, width), (rows, columns) = pixels.shape[1:], transform.size
    scales = [Fraction(rows, height), Fraction(columns, width)]
    if isinstance(transform, CenterCrop):
        scales = [max(Fraction(transform.resize_to[0], height), Fraction(transform.resize_to[1], width))] * 2
    elif transform.mode == "letterbox":
        scales = [min(scales)] * 2
    new = math.floor(height * scales[0]), math.floor(width * scales[1])
    resized = image.resize((max(2, new[1]), max(2, new[0])), Image.Resampling.BILINEAR)
    canvas = Image.new("RGB", (columns, rows))
    left, top = ((side - of) // 2 if side >= of else -round((of - side) / 2)
                 for side, of in zip((columns, rows), resized.size, strict=True))  # fmt: skip
    canvas.paste(resized, (left, top))
    return np.asarray(canvas).astype(int)


@pytest.mark.parametrize("transform", [
    WholeImage((24, 80), "letterbox"), WholeImage((80, 24), "letterbox"), WholeImage((24, 80), "squash"),
    CenterCrop((30, 90), (24, 80)), CenterCrop((24, 80), (24, 80)),
], ids=str)  # fmt: skip
def test_rectangles_equal_those_of_pil(transform):
    for size in ((40, 60), (60, 40), (48, 160), (33, 150)):
        pixels = pixels_of(*size)
        found = transform(LazyImage(pixels), SampleRNG(0, 0))
        assert found.shape == (3, *transform.size)
        assert np.abs(found.permute(1, 2, 0).numpy().astype(int) - by_pil(transform, pixels)).max() <= 1, size


@pytest.mark.parametrize("crop", [
    ResizedCrop(WIDE, vflip=0.5), PaddedCrop(WIDE, 3, vflip=0.5), WholeImage(WIDE, "letterbox", 0.5, vflip=0.5),
    WholeImage(WIDE, "squash", 0.5, vflip=0.5),
], ids=str)  # fmt: skip
def test_training_crops_have_the_size_and_all_flips(crop):
    pixels, keys = pixels_of(30, 50), [(5, index) for index in range(24)]
    single = [crop(LazyImage(pixels), SampleRNG(*key)) for key in keys]
    assert {image.shape for image in single} == {(3, *WIDE)}
    if isinstance(crop, WholeImage):
        plain = WholeImage(WIDE, crop.mode)(LazyImage(pixels), SampleRNG(0, 0))
        flipped = [plain.flip(dims) for dims in ([], [-1], [-2], [-1, -2])]
        counts = [sum(torch.equal(image, one) for image in single) for one in flipped]
        assert sum(counts) == len(keys) and min(counts) > 0


def test_the_config_selects_crops_and_shapes(small_cfg):
    images = ImageDataset()
    shape = ("TRAIN.IM_SIZE", [24, 56], "TEST.IM_SIZE", [24, 60], "DATA.VFLIP", 0.25)
    cfg = small_cfg(*shape, "DATA.CROP", "squash")
    assert build_transform(cfg, images, train=True) == WholeImage(WIDE, "squash", 0.5, vflip=0.25)
    assert build_transform(cfg, images, train=False) == CenterCrop((24, 60), WIDE)
    assert build_transform(small_cfg(*shape), images, train=True) == ResizedCrop(WIDE, vflip=0.25)
    whole = small_cfg("TEST.CROP", "letterbox", "TEST.CROP_SIZE", [20, 30])
    assert build_transform(whole, images, train=False) == WholeImage((20, 30), "letterbox")
    assert load_cfg(None, ["TRAIN.IM_SIZE", "[160, 160]"]).TRAIN.IM_SIZE == 160


@pytest.mark.parametrize(("words", "message"), [
    (["TRAIN.IM_SIZE", "[96, 320]"], r"TEST.IM_SIZE: got 256; expected the size of the crop, .* 96 x 320"),
    (["TEST.CROP_SIZE", "[0, 5]"], r"TEST.CROP_SIZE .*expected an integer, or \[height, width\]"),
    (["TRAIN.IM_SIZE", "[96, 320]", "TEST.CROP", "squash", "TRAIN.IM_SIZE_START", "64", "TRAIN.IM_SIZE_EPOCHS",
      "[0, 5]"], "TRAIN.IM_SIZE_START .*expected a square TRAIN.IM_SIZE"),
])  # fmt: skip
def test_conflicts_of_shapes(words, message):
    with pytest.raises(ConfigError, match=message):
        load_cfg(None, words)


@pytest.mark.slow
def test_models_with_position_embeddings_take_rectangles():
    words = ["TRAIN.IM_SIZE", "[32, 64]", "TEST.CROP", "squash", "MODEL.NUM_CLASSES", "3", "MODEL.ARCH"]
    for arch in ("timm/vit_tiny_patch16_224", "plain_vit_small"):
        assert build_model(load_cfg(None, [*words, arch]))(torch.zeros(2, 3, 32, 64)).shape == (2, 3)
    with pytest.raises(ConfigError, match="vit_b_16 rejects image_size"):
        build_model(load_cfg(None, [*words, "torchvision/vit_b_16"]))
