"""Crops, flips and resizing: they lie where torchvision's lie, and take their numbers from position alone."""

import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from support.images import difference, scene, tensor_of
from torchvision import transforms as theirs
from torchvision.transforms import v2

from distribuuuu.data import transforms
from distribuuuu.data.crops import PaddedCrop, random_padded_corner
from distribuuuu.data.decode import Box, LazyImage, open_lazy_image
from distribuuuu.data.seeding import SampleRNG
from distribuuuu.data.transforms import CenterCrop, ResizedCrop, random_resized_box, resize

SCALE = (0.08, 1.0)


def fixed(*numbers: float) -> SimpleNamespace:
    """Return random numbers that are known beforehand."""
    return SimpleNamespace(uniform=iter(numbers).__next__)


class Counted(SampleRNG):
    """Random numbers that are counted."""

    num = 0

    def uniform(self) -> float:
        self.num += 1
        return super().uniform()


def lazy_image_of(image: Image.Image) -> LazyImage:
    return open_lazy_image(image, "auto")


ODD_SIZES = [(1, 1), (1, 5000), (5000, 1), (2, 3), (1, 2), (7, 7), (500, 375), (3, 20000), (64, 4097), (224, 224)]


def test_a_box_is_always_within_the_image():
    sizes = random.Random(0)
    some = [(sizes.randint(1, 60), sizes.randint(1, 60)) for _ in range(3000)]
    for index, (height, width) in enumerate([*ODD_SIZES * 100, *some]):
        box = random_resized_box(SampleRNG(1, index), height, width, (0.01, 1.0) if index % 2 else SCALE)
        assert 0 <= box.top <= height - box.height and 0 <= box.left <= width - box.width
        assert box.height >= 1 and box.width >= 1 and all(type(value) is int for value in box)
    for extreme in (0.0, 1 - 2**-53):  # the first and the last place
        box = random_resized_box(fixed(extreme, extreme, 0.2, 0.5), 100, 80, SCALE)
        assert (box.top, box.left) == ((0, 0) if extreme == 0 else (100 - box.height, 80 - box.width))
    assert random_resized_box(SampleRNG(0, 0), 300, 300, (1.0, 1.0)).height <= 300
    assert random_resized_box(fixed(0.5, 0.5, 1.0, 0.5), 300, 300, (1.0, 1.0)) == Box(0, 0, 300, 300)


def test_where_nothing_fits_the_box_is_torchvisions_in_the_middle():
    for ratios in ((3 / 4, 4 / 3), (0.6, 0.7), (1.4, 1.8)):
        for height, width in ((1, 5000), (5000, 1), (3, 20000), (20000, 7), (10, 300), (311, 9)):
            expected = theirs.RandomResizedCrop.get_params(Image.new("L", (width, height)), (1.0, 1.0), ratios)
            rng = Counted(0, 0)
            assert random_resized_box(rng, height, width, (1.0, 1.0), ratios) == Box(*expected)
            assert rng.num == 2 + 2 * transforms.ATTEMPTS
    rng = Counted(0, 0)
    random_resized_box(rng, 400, 400, (0.1, 0.2))
    assert rng.num == 4


def test_a_padded_crop_is_torchvisions_at_the_same_corner():
    for height, width, size, padding in [
        (32, 32, 32, 4), (28, 28, 28, 2), (40, 32, 32, 4), (32, 51, 32, 3), (64, 48, 32, 4), (20, 13, 32, 4),
        (32, 32, 32, 0), (8, 8, 8, 8), (8, 8, 8, 12),
    ]:  # fmt: skip
        image = scene(width, height)
        resized = theirs.Resize(size)(image) if min(height, width) != size else image
        padded = theirs.Pad(padding)(resized)
        for index in range(25):
            rng = SampleRNG(9, index)
            rng.uniform()
            top, left = random_padded_corner(rng, resized.height, resized.width, size, padding)
            assert -padding <= top <= resized.height + padding - size
            assert -padding <= left <= resized.width + padding - size
            corner = (int(top) + padding, int(left) + padding)
            expected = tensor_of(theirs.functional.crop(padded, *corner, size, size))
            pixels = PaddedCrop(size, padding, flip=0)(lazy_image_of(image), SampleRNG(9, index))
            assert difference(pixels, expected) <= (0 if resized is image else 0.3)


def test_a_reflected_padding_is_that_of_numpy():
    for height, width, size, padding in [(32, 32, 32, 2), (40, 32, 32, 4), (32, 51, 32, 31), (8, 8, 8, 7)]:
        image = scene(width, height)
        padded = torch.from_numpy(np.pad(tensor_of(image), ((0, 0), (padding,) * 2, (padding,) * 2), mode="reflect"))
        for index in range(25):
            rng = SampleRNG(9, index)
            rng.uniform()
            top, left = (int(at) + padding for at in random_padded_corner(rng, height, width, size, padding))
            pixels = PaddedCrop(size, padding, 0, mode="reflect")(lazy_image_of(image), SampleRNG(9, index))
            assert torch.equal(pixels, padded[:, top : top + size, left : left + size])


def evaluated(image: Image.Image, resize_to: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an image as we evaluate it and as torchvision does."""
    other = tensor_of(theirs.CenterCrop(size)(theirs.Resize(resize_to)(image)))
    return CenterCrop(resize_to, size)(lazy_image_of(image), SampleRNG(0, 0)), other


def test_evaluation_is_torchvisions():
    """A crop larger than the image is padded as in torchvision."""
    for resize_to, size in [(18, 16), (24, 24), (37, 30), (64, 56), (16, 24), (20, 33)]:
        sizes, differences = random.Random(resize_to), []
        for number in range(60):
            height, width = (sizes.randint(1, 80), sizes.randint(1, 80)) if number % 2 else (
                sizes.randint(20, 300), sizes.randint(20, 300))  # fmt: skip
            if max(height, width) > 16 * min(height, width):
                continue
            mine, other = evaluated(scene(width, height, number), resize_to, size)
            assert mine.dtype == torch.uint8
            differences.append(difference(mine, other))
        assert np.mean(differences) <= 0.1 and max(differences) <= 0.5


def test_odd_shapes_are_evaluated_in_the_same_place_and_trained_on():
    for height, width in ((27, 1), (59, 2), (3, 77), (4, 89), (1, 40), (2, 333)):
        mine, other = evaluated(scene(width, height), 32, 28)  # a strip loses its ends
        assert difference(mine, other) <= 1
    for height, width in ((3, 20000), (20000, 3), (1, 1), (1, 5000)):
        lazy_image, rng = LazyImage(torch.full((3, height, width), 77, dtype=torch.uint8)), Counted(0, 1)
        for transform in (CenterCrop(40, 32), ResizedCrop(32)):
            assert rng.num == 0, "evaluation draws nothing"
            pixels = transform(lazy_image, rng)
            assert pixels.shape == (3, 32, 32) and (pixels == 77).all()


def layouts(image: Image.Image) -> dict[str, torch.Tensor]:
    """Return the same image as decoders, arrays and slices hold it in memory."""
    pixels = tensor_of(image)
    larger = torch.zeros(3, image.height + 5, image.width + 6, dtype=torch.uint8)
    larger[:, 2:-3, 4:-2] = pixels
    return {"bytes of a pixel": pixels, "planes": pixels.contiguous(), "slice": larger[:, 2:-3, 4:-2]}


def test_any_layout_in_memory_is_resized_alike_and_as_by_pil():
    for height, width in ((57, 83), (83, 1), (1, 83), (1, 1), (2, 2), (60, 60)):
        image = scene(width, height)
        gray = np.array(image.convert("L"))
        for size in ((20, 20), (2, 30), (100, 3), (200, 200), (57, 20)):
            expected = tensor_of(image.resize(size[::-1], Image.Resampling.BILINEAR))
            for name, pixels in layouts(image).items():
                assert difference(resize(pixels, *size), expected) <= 0.3, (name, size)
            expected = tensor_of(Image.fromarray(gray).resize(size[::-1], Image.Resampling.BILINEAR).convert("RGB"))
            for array in (gray, gray[:, :, None]):
                assert difference(resize(open_lazy_image(array, "auto").pixels(), *size), expected) <= 0.3


def test_bicubic_is_torchvisions_and_each_crop_resizes_as_it_says():
    image = scene(83, 57)
    for size in ((24, 24), (100, 40), (3, 3)):
        expected = v2.functional.resize(tensor_of(image), size, v2.InterpolationMode.BICUBIC, antialias=True)
        for name, pixels in layouts(image).items():
            assert torch.equal(resize(pixels, *size, "bicubic"), expected), (name, size)
    for transform in (PaddedCrop(32, 0, 0.0), CenterCrop(32, 32), ResizedCrop(32)):
        bicubic = dataclasses.replace(transform, interpolation="bicubic")
        one, other = (some(lazy_image_of(image), SampleRNG(0, 0)) for some in (transform, bicubic))
        assert not torch.equal(one, other)


# cv2.resize of OpenCV 5.0.0, float32, of the image of 5 x 7 pixels (37 y y + 53 x + 11 x y) mod 256.
OPENCV = {
    "opencv_linear": [
        [[68.583, 211.5, 98.417], [136.917, 88, 167.083]],
        [[25.016, 120.172, 187.328, 54.484], [104.172, 127.391, 106.609, 109.828],
         [134.328, 161.609, 164.891, 112.172], [115.484, 54.828, 194.172, 117.516]],
    ],
    "opencv_area": [
        [[81.229, 149.343, 85.8], [133.457, 130.257, 127.057]],
        [[31.057, 125.686, 154.486, 58.943], [110.714, 140.2, 118.486, 104.086],
         [140.371, 148.6, 149.514, 113.857], [120.029, 92.371, 159.8, 117.514]],
    ],
}  # fmt: skip


@pytest.mark.parametrize("interpolation", OPENCV)
def test_opencvs_interpolations_are_opencvs(interpolation):
    y, x = np.mgrid[:5, :7]
    image = Image.fromarray(((37 * y * y + 53 * x + 11 * x * y) % 256).astype(np.uint8)).convert("RGB")
    for figures in OPENCV[interpolation]:
        expected = torch.tensor(figures).expand(3, -1, -1)
        for name, pixels in layouts(image).items():
            found = resize(pixels, *expected.shape[1:], interpolation)
            assert found.dtype == torch.uint8 and (found - expected).abs().max() <= 0.501, name
            batch = resize(torch.stack([pixels, pixels.flip(-1)]), *expected.shape[1:], interpolation)
            assert torch.equal(batch[0], found) and torch.equal(resize(found, *found.shape[1:], interpolation), found)
