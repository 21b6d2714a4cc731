"""Loader: the images of a step, their transforms and their normalization."""

import pytest
import torch
from support.batches import ALONE, CPU
from support.runs import make_cfg
from torchvision import datasets as torchvision_datasets

from distribuuuu.config import ConfigError
from distribuuuu.data.batch import Normalizer
from distribuuuu.data.decode import open_lazy_image
from distribuuuu.data.loader import build_loader
from distribuuuu.data.seeding import SampleRNG
from distribuuuu.data.transforms import CenterCrop
from distribuuuu.engine.preflight import find_run_problems


def test_images_are_normalized_as_usual(small_cfg):
    images, labels, *_ = next(iter(build_loader(small_cfg(), ALONE, CPU, train=False)))
    folder = torchvision_datasets.ImageFolder(small_cfg().TEST.DATASET + "/val")
    pixels = CenterCrop(18, 16)(open_lazy_image(folder[0][0], "auto"), SampleRNG(0, 0)).float() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    torch.testing.assert_close(images[0], (pixels - mean) / std, atol=1e-5, rtol=1e-5)
    assert labels.tolist() == [folder[index][1] for index in range(16)]
    words = ("DATA.MEAN", [0, 0, 0], "DATA.STD", [1, 1, 1])
    images, *_ = next(iter(build_loader(small_cfg(*words), ALONE, CPU, train=False)))
    torch.testing.assert_close(images[0], pixels, atol=1e-5, rtol=1e-5)


def test_a_number_of_classes_that_contradicts_the_data_names_both(image_folder, tmp_path):
    for num_classes in (2, 4):
        words = ("TRAIN.DATASET", image_folder, "MODEL.NUM_CLASSES", num_classes, "OUT_DIR", tmp_path / "o")
        (problem,) = map(str, find_run_problems(make_cfg(*words), train=True))
        assert f"{num_classes}, but" in problem and "has 3 classes; set MODEL.NUM_CLASSES 3" in problem
        with pytest.raises(ConfigError, match=f"{num_classes}, but .* has 3 classes"):
            build_loader(make_cfg(*words), ALONE, CPU, train=True)


def test_dummy_input_honours_sizes_and_classes(small_cfg):
    for words in (("MODEL.DUMMY_INPUT", True), ("DATA.NAME", "dummy")):
        cfg = small_cfg(*words, "MODEL.NUM_CLASSES", 7, "TRAIN.DATASET", "/nowhere")
        assert find_run_problems(cfg, train=True) == []
        images, labels, *_ = next(build_loader(cfg, ALONE, CPU, train=True).batches_from(3, 1, 0))
        assert images.shape == (12, 3, 16, 16) and labels.max() < 7


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
