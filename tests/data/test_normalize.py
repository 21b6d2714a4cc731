"""Normalization: the same numbers in any memory layout, compiled or not."""

import pytest
import torch
from support.batches import ALONE, CPU

from distribuuuu.data.batch import Normalizer
from distribuuuu.data.loader import build_loader


def test_channels_last_gives_the_same_numbers_in_another_layout(small_cfg):
    for train in (True, False):
        one, other = (build_loader(small_cfg("MODEL.CHANNELS_LAST", last), ALONE, CPU, train) for last in (False, True))
        for (images, *_), (others, *_) in zip(one, other, strict=True):
            assert torch.equal(images, others)
            assert images.is_contiguous() and others.is_contiguous(memory_format=torch.channels_last)


def test_any_layout_of_bytes_is_normalized_alike():
    pixels = torch.randint(0, 256, (5, 3, 6, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
    for last in (False, True):
        normalize = Normalizer(CPU, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), last)
        for some in (pixels, pixels.contiguous(memory_format=torch.channels_last), pixels[:1], pixels[:0]):
            expected = (some / 255 - mean) / std
            torch.testing.assert_close(normalize(some), expected, atol=1e-5, rtol=1e-5)
        assert normalize(pixels).dtype == torch.float32


@pytest.mark.slow
def test_a_compiled_normalization_has_the_same_bits_and_layout():
    pixels = torch.randint(0, 256, (5, 3, 6, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for last in (False, True):
        plain, compiled = (Normalizer(CPU, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), last, flag) for flag in (False, True))
        gray = pixels[:, :1].expand(-1, 3, -1, -1)
        for some in (pixels, pixels.contiguous(memory_format=torch.channels_last), pixels[:2], pixels[..., :4], gray):
            expected, images = plain(some), compiled(some)
            assert torch.equal(images, expected) and images.stride() == expected.stride()
