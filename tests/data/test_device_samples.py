"""Sets on the device, and packs: the batches of workers, bit by bit; the cost of a batch on the host."""

import functools

import numpy as np
import pytest
import torch
from PIL import Image
from support.batches import ALONE, CPU, assert_same_batches, batches_of, own_task
from support.calls import count_calls
from support.commands import command_module
from support.images import draw_folder, needs
from support.packs import pack as make_pack
from support.tables import pairwise

from distribuuuu.config import ConfigError
from distribuuuu.config.registry import DATASETS
from distribuuuu.data import device_samples as resident
from distribuuuu.data.augment import AugmentedCrop, Erasing
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import LazyImage
from distribuuuu.data.loader import build_loader
from distribuuuu.data.seeding import SampleRNG
from distribuuuu.data.transforms import ResizedCrop


class Pixels(ImageDataset):
    """Images in memory, of one size and gray, of one size in color, or of many sizes; or a thousand small ones."""

    classes, labels = ("a", "b", "c"), np.arange(1000) % 3

    def __init__(self, kind: str):
        random = np.random.default_rng(0)
        self.labels = self.labels[: 1000 if kind == "many" else 40]
        shapes = {"gray": [(20, 20)], "color": [(20, 24, 3)], "sizes": [(20, 31, 3), (40, 18, 3), (25, 25)],
                  "many": [(9, 8, 3)]}[kind]  # fmt: skip
        self.pixels = [random.integers(0, 256, shapes[i % len(shapes)], np.uint8) for i in range(len(self.labels))]

    def read(self, index: int) -> np.ndarray:
        return self.pixels[index]


@pytest.fixture(params=["gray", "color", "sizes"])  # or by indirect parametrization
def pixel_set(request, monkeypatch):
    """Register Pixels as the set `pixels` for the length of a test."""

    class Chosen(Pixels):
        @classmethod
        def from_cfg(cls, cfg, train: bool) -> ImageDataset:
            return cls(request.param)

    DATASETS.get("dummy")
    monkeypatch.setitem(DATASETS._table, "dummy", Chosen)
    return request.param


@pytest.mark.parametrize("crop, more", [
    ("pad", ()), ("resized", ()), ("pad", ("AUG.ERASING", 0.7)), ("pad", ("DATA.CROP_PADDING", 30)),
    ("pad", ("DATA.CROP_PADDING_MODE", "reflect")), ("squash", ("DATA.VFLIP", 0.5, "TEST.CROP", "letterbox")),
    ("resized", ("AUG.ERASING", 0.7, "DATA.INTERPOLATION", "random", "DATA.VFLIP", 0.5)),
])  # fmt: skip
def test_a_set_on_the_device_gives_the_batches_of_workers(small_cfg, pixel_set, crop, more):
    for train_size, resize_to, test_crop in ((20, 20, 20), (16, 30, 24)):
        words = ("MODEL.DUMMY_INPUT", True, "DATA.CROP", crop, "TRAIN.IM_SIZE", train_size, "TEST.IM_SIZE", resize_to,
                 "TEST.CROP_SIZE", test_crop, "TRAIN.BATCH_SIZE", 6, "TEST.BATCH_SIZE", 7, *more)  # fmt: skip
        for train in (True, False):
            host = batches_of(small_cfg(*words), train)
            assert_same_batches(batches_of(small_cfg(*words, "DATA.LOADER", "device"), train), host)


@pytest.mark.parametrize("shape, size, interpolation", [
    ((20, 24), (16, 30), "bilinear"), ((9, 130), (24, 10), "random"), ((500, 400), (20, 19), "bicubic"),
    ((256, 256), (224, 224), "bilinear"), ((1, 2), (2, 3), "random"),
])  # fmt: skip
def test_boxes_of_many_images_are_drawn_and_resized_like_those_of_each(shape, size, interpolation):
    pixels = torch.randint(0, 256, (60, 3, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    crop = ResizedCrop(size, (0.02, 1.2), 0.5, interpolation=interpolation, vflip=0.5)
    view = AugmentedCrop(crop, erase=Erasing(0.5, (0.5, 0.4, 0.3)))
    keys = np.array([[7, index] for index in range(len(pixels))])
    (_, *drawn), (fixed,) = resident.draw_crops([resident.split_erasing(view)], pixels[:1], keys)
    expected = [view(LazyImage(image), SampleRNG(*key)) for image, key in zip(pixels, keys.tolist(), strict=True)]
    assert torch.equal(resident.crop_batch(crop, pixels, iter(drawn), *fixed), torch.stack(expected))


@pytest.mark.parametrize("pixel_set", ["many"], indirect=True)
@pytest.mark.parametrize("crop, num_views", [("pad", 1), ("pad", 2), ("resized", 1)])
def test_a_batch_costs_the_host_as_many_calls_at_any_size(small_cfg, pixel_set, crop, num_views, monkeypatch):
    task = own_task(monkeypatch, views=lambda cfg, loader: [{}] * num_views)
    words = ("MODEL.DUMMY_INPUT", True, "DATA.CROP", crop, "TRAIN.IM_SIZE", 8, "DATA.LOADER", "device",
             "DATA.FLIP_MODE", "alternating", "DATA.VFLIP", 0.5, "AUG.ERASING", 0.5, *task)  # fmt: skip
    counts = []
    for size in (10, 500):
        loader = build_loader(small_cfg(*words, "TRAIN.BATCH_SIZE", size), ALONE, CPU, True)
        assert not [note for note in loader.notes if "one by one" in note]
        batches = loader.batches_from(5, 1, 0)
        next(batches)  # also draws for those that follow
        counts.append(count_calls(functools.partial(next, batches)))
    assert counts[0] == counts[1] <= 300


@pytest.mark.parametrize("words", [("AUG.ERASING_MODE", "pixel"), ("AUG.OPERATIONS", ["grayscale"])])
def test_the_augmentation_of_a_set_on_the_device_runs_on_the_host(small_cfg, words):
    words = ("DATA.CROP", "pad", "AUG.ERASING", 0.5, *words)
    loader = build_loader(small_cfg(*words, "DATA.LOADER", "device"), ALONE, torch.device("meta"), train=True)
    assert loader.images._pixels.device == CPU and "images are cropped one by one" in loader.notes[-1]


def test_a_set_that_does_not_fit_is_a_clear_error(small_cfg, monkeypatch):
    def refuse(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(resident.torch, "cat", refuse)
    with pytest.raises(ConfigError, match="DATA.LOADER: .* MB of the images do not fit on cpu; use host"):
        build_loader(small_cfg("DATA.LOADER", "device"), ALONE, CPU, train=True)


@pytest.fixture(scope="module")
def folder_and_packs(tmp_path_factory):
    """A folder of odd images, the pack of its files, and the pack of its pixels."""
    command_module("pack.pack")
    root = tmp_path_factory.mktemp("packs")
    for split in ("train", "val"):
        draw_folder(root / "folder", split, {"ant": 14, "bee": 13, "cat": 14}, (50, 44))
        image = Image.open(root / "folder" / split / "ant" / "000.jpg")
        image.convert("L").save(root / "folder" / split / "bee" / "gray.jpg")
        image.convert("CMYK").save(root / "folder" / split / "cat" / "cmyk.jpg")
        image.convert("RGBA").save(root / "folder" / split / "cat" / "alpha.png")
    for name, flags in {"files": [], "pixels": ["--format", "raw"]}.items():
        make_pack(root / name, *flags, "TRAIN.DATASET", root / "folder", split="both")
    return root


@pytest.mark.parametrize("pack, decoder", pairwise(["files", "pixels"], ["auto", "nvimgcodec"]))
def test_a_pack_gives_the_batches_of_its_folder(small_cfg, folder_and_packs, pack, decoder):
    needs(decoder)
    words = ("MODEL.NUM_CLASSES", 3, "DATA.DECODER", decoder)
    packed = ("TRAIN.DATASET", folder_and_packs / pack, "DATA.NAME", "packed", *words)
    for train in (True, False):
        folder = batches_of(small_cfg("TRAIN.DATASET", folder_and_packs / "folder", *words), train)
        for more in ((), ("TRAIN.WORKERS", 2), ("DATA.LOADER", "device")):
            assert_same_batches(batches_of(small_cfg(*packed, *more), train), folder)
