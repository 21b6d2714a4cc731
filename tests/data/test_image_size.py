"""Progressive resizing: the size of an epoch's images follows from the epoch, in any worker."""

import numpy as np
import pytest
import torch

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.image_size import build_im_size, grow
from distribuuuu.data.loader import build_loader
from distribuuuu.launch.detect import Launch
from distribuuuu.models import build_model, check_model

CPU = torch.device("cpu")
ALONE = Launch("alone")
GROWING = ("TRAIN.IM_SIZE_START", 8, "TRAIN.IM_SIZE_EPOCHS", [1, 5], "TRAIN.IM_SIZE_MULTIPLE", 2)
WAYS = [
    ("TRAIN.WORKERS", 0),
    ("TRAIN.WORKERS", 2),
    ("TRAIN.WORKERS", 2, "DATA.WORKER_KIND", "thread"),
    ("DATA.LOADER", "device"),
]


@pytest.mark.parametrize("start, end, first, last", [(160, 192, 65, 76), (160, 192, 12, 14), (96, 224, 0, 33)])
def test_sizes_are_those_of_ffcv(start, end, first, last):
    for epoch in range(100):
        line = np.interp([epoch], [first, last], [start, end])
        assert grow(epoch, start, end, first, last, 32) == int(np.round(line[0] / 32)) * 32


def test_the_ends_are_what_they_were_set_to_and_the_sizes_between_are_multiples_that_never_shrink():
    sizes = [grow(epoch, 88, 176, 3, 20, 32) for epoch in range(30)]
    assert sizes[:4] == [88] * 4 and sizes[20:] == [176] * 10 and sizes == sorted(sizes)
    assert set(sizes) == {88, 96, 128, 160, 176}
    assert {grow(epoch, 100, 120, 0, 10, 64) for epoch in range(12)} <= {100, 120, 128 - 8}


def test_without_a_start_nothing_grows():
    assert build_im_size(load_cfg(None, [])) is None


@pytest.mark.parametrize("crop", ["resized", "pad"])
@pytest.mark.parametrize("augment", [(), ("AUG.POLICY", "rand-m9-mstd0.5-inc1", "AUG.ERASING", 0.5)])
def test_workers_that_were_started_once_make_images_of_each_epochs_size(small_cfg, crop, augment):
    expected = None
    for way in WAYS:
        loader = build_loader(small_cfg(*GROWING, "DATA.CROP", crop, *augment, *way), ALONE, CPU, train=True)
        epochs = [[images for images, _ in loader.batches_from(3, epoch, 0)] for epoch in (0, 2, 3, 5, 2)]
        assert [batches[0].shape[-2:] for batches in epochs] == [(side, side) for side in (8, 10, 12, 16, 10)], way
        expected = expected or epochs
        for one, other in zip(sum(expected, []), sum(epochs, []), strict=True):
            assert torch.equal(one, other), way
        entered = [images for images, _ in loader.batches_from(3, 2, 2)]
        assert all(torch.equal(one, other) for one, other in zip(entered, epochs[1][2:], strict=True))
        assert loader.dummy_batch().shape == (12, 3, 16, 16)
    assert loader.preview(3, 5).shape == (5, 3, 8, 8)


def test_full_size_epochs_are_those_of_a_run_that_does_not_grow(small_cfg):
    plain, growing = (build_loader(small_cfg(*words), ALONE, CPU, train=True) for words in ((), GROWING))
    for (images, labels), (others, other_labels) in zip(
        plain.batches_from(3, 7, 0), growing.batches_from(3, 7, 0), strict=True
    ):
        assert torch.equal(images, others) and torch.equal(labels, other_labels)


@pytest.mark.parametrize(
    "words, said",
    [
        (("TRAIN.IM_SIZE_START", 256), "IM_SIZE_START .* 256 is above TRAIN.IM_SIZE 224"),
        (("TRAIN.IM_SIZE_START", 128), r"IM_SIZE_EPOCHS: \[\] must be the first and the last epoch"),
        (("TRAIN.IM_SIZE_START", 128, "TRAIN.IM_SIZE_EPOCHS", "[9, 9]"), "first < last"),
        (("TRAIN.IM_SIZE_START", 128, "TRAIN.IM_SIZE_EPOCHS", "[5]"), "first < last"),
        (("TRAIN.IM_SIZE_MULTIPLE", 0), "IM_SIZE_MULTIPLE .* outside"),
    ],
)
def test_growth_that_cannot_be_is_an_error(words, said):
    with pytest.raises(ConfigError, match=said):
        load_cfg(None, [str(word) for word in words])


@pytest.mark.parametrize(
    "words, said",
    [
        (("MODEL.ARCH", "botnet50"), r"botnet50 has one fixed image size.*; fix: set TRAIN.IM_SIZE_START 0$"),
        (("MODEL.ARCH", "torchvision/vit_b_16", "MODEL.KWARGS.image_size", 224), "its image_size"),
        (("MODEL.ARCH", "timm/vit_tiny_patch16_224"), "IM_SIZE_START 0, or MODEL.KWARGS.dynamic_img_size True$"),
    ],
)
def test_a_model_for_one_size_only_is_an_error(words, said):
    growing = ("TRAIN.IM_SIZE_START", 128, "TRAIN.IM_SIZE_EPOCHS", "[0, 5]")
    for call in (check_model, build_model):
        with pytest.raises(ConfigError, match=rf"^TRAIN.IM_SIZE_START \(command line\): .*{said}"):
            call(load_cfg(None, [str(word) for word in (*growing, *words)]))


def test_models_for_any_size_may_grow():
    growing = ["TRAIN.IM_SIZE_START", "32", "TRAIN.IM_SIZE", "64", "TRAIN.IM_SIZE_EPOCHS", "[0, 5]"]
    for words in (["MODEL.ARCH", "resnet18"],
                  ["MODEL.ARCH", "timm/vit_tiny_patch16_224", "MODEL.KWARGS.dynamic_img_size", "True"]):  # fmt: skip
        model = build_model(load_cfg(None, growing + words)).eval()
        with torch.inference_mode():
            assert all(model(torch.zeros(1, 3, side, side)).shape == (1, 1000) for side in (32, 64))
