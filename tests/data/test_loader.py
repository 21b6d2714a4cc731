"""Loader: the images of a step, their transforms, and broken images."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.images import draw_folder
from support.processes import on_processes
from torchvision import datasets as torchvision_datasets

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.batch_plan import plan_batches
from distribuuuu.data.datasets.imagefolder import ImageFolder
from distribuuuu.data.decode import LazyImage, open_lazy_image
from distribuuuu.data.loader import BadImageError, build_loader
from distribuuuu.data.samplers import EvalSampler, ResumableDistributedSampler
from distribuuuu.data.seeding import SampleRNG, derive_seed
from distribuuuu.data.transforms import CenterCrop, PaddedCrop, ResizedCrop
from distribuuuu.engine.preflight import find_run_problems
from distribuuuu.launch.detect import Launch, detect_launch

CPU = torch.device("cpu")
ALONE = Launch("alone")


def steps_of(world_size: int, global_batch: int, first_step: int = 0, epoch: int = 2) -> list[list[int]]:
    """Return the sorted images of each step over all processes."""
    plan = plan_batches(global_batch, global_batch, world_size)
    steps: dict[int, list[int]] = {}
    for rank in range(world_size):
        sampler = ResumableDistributedSampler(100, plan, rank)
        sampler.set_position(seed=5, epoch=epoch, first_step=first_step)
        for number, batch in enumerate(sampler):
            steps.setdefault(number // plan.accum_steps, []).extend(index for _, index in batch)
    return [sorted(images) for _, images in sorted(steps.items())]


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_each_step_takes_the_same_images_on_any_number_of_processes(world_size):
    assert steps_of(world_size, 12) == steps_of(1, 12)


def test_accumulation_takes_the_same_images_too():
    plan = plan_batches(3, 12, 2)
    assert plan.accum_steps == 2
    taken = [index for rank in range(2) for index in _first_step(plan, rank)]
    assert sorted(taken) == steps_of(1, 12, epoch=0)[0]


def _first_step(plan, rank: int) -> list[int]:
    sampler = ResumableDistributedSampler(100, plan, rank)
    sampler.set_position(seed=5, epoch=0, first_step=0)
    return [index for batch, _ in zip(sampler, range(plan.accum_steps), strict=False) for _, index in batch]


def test_an_epoch_takes_each_image_at_most_once_and_leaves_only_the_rest():
    taken = sum(steps_of(3, 12), [])
    assert len(taken) == len(set(taken)) == 96
    assert steps_of(1, 12, epoch=0) != steps_of(1, 12, epoch=1)


@pytest.mark.parametrize("first_step", [0, 1, 7, 8, 9])
def test_an_epoch_can_be_entered_at_any_step(first_step):
    assert steps_of(2, 12, first_step) == steps_of(2, 12)[first_step:]


def repeated_steps(world_size: int, batch_size: int, repeats: int = 3, first_step: int = 0) -> list[list[tuple]]:
    """Return the positions of each step's global batch of 24 in their order, over all processes."""
    plan = plan_batches(batch_size, 24, world_size)
    steps: dict[int, list] = {}
    for rank in range(world_size):
        sampler = ResumableDistributedSampler(100, plan, rank, repeats)
        sampler.set_position(seed=5, epoch=2, first_step=first_step)
        for number, batch in enumerate(sampler):
            step, micro = divmod(number, plan.accum_steps)
            begin = (micro * world_size + rank) * plan.micro_batch
            places = steps.setdefault(step, [None] * 24)
            places[begin : begin + len(batch)] = batch
    return [places for _, places in sorted(steps.items())]


def test_repeats_bring_each_image_of_a_step_so_often_with_other_augmentation():
    steps, seen = repeated_steps(1, 24), []
    assert len(steps) == 4  # as many as without
    for places in steps:
        indices = [index for _, index in places]
        assert indices == indices[:8] * 3 and len(set(indices[:8])) == 8
        assert len(set(places)) == 24
        assert all(indices[place] != indices[place ^ 1] for place in range(24))
        seen += indices[:8]
    assert len(seen) == len(set(seen)) == 32
    order = ResumableDistributedSampler(100, plan_batches(24, 24, 1), 0)
    order.set_position(seed=5, epoch=2, first_step=0)
    assert seen == order.epoch_order()[:32].tolist()
    assert steps[0][:8] == next(iter(order))[:8]  # the first time, an image is augmented as without repeats


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [24, 4, 2])
def test_repeats_depend_on_no_number_of_processes_and_can_be_entered_anywhere(world_size, batch_size):
    expected = repeated_steps(1, 24)
    assert repeated_steps(world_size, batch_size) == expected
    assert repeated_steps(world_size, batch_size, first_step=2) == expected[2:]


def test_repeats_are_loaded_alike_by_all_workers_and_no_two_are_the_same_image(small_cfg):
    expected = None
    for way in (
        (),
        ("TRAIN.WORKERS", 2),
        ("TRAIN.WORKERS", 2, "DATA.WORKER_KIND", "thread"),
        ("DATA.LOADER", "device"),
    ):
        (images, labels), *_ = first_batches(small_cfg("DATA.REPEATS", 3, *way))
        expected = images if expected is None else expected
        assert torch.equal(images, expected) and labels.tolist() == labels[:4].tolist() * 3
        assert not any(torch.equal(images[one], images[one + 4]) for one in range(8))


@pytest.mark.parametrize("repeats", [5, 7, 24, 30])
def test_where_repeats_do_not_divide_a_step_some_images_come_once_less(repeats):
    num_different = -(-24 // repeats)
    for places in repeated_steps(2, 4, repeats):
        indices = [index for _, index in places]
        counts = [indices.count(index) for index in indices[:num_different]]
        assert sum(counts) == 24 and max(counts) - min(counts) <= 1 and len(set(places)) == 24
        assert num_different == 1 or all(indices[place] != indices[place ^ 1] for place in range(24))


@pytest.mark.parametrize("num_images, batch_size, world_size", [(37, 8, 1), (37, 8, 2), (37, 1, 3), (2, 4, 5)])
def test_evaluation_takes_each_image_exactly_once(num_images, batch_size, world_size):
    samplers = [EvalSampler(num_images, batch_size, rank, world_size) for rank in range(world_size)]
    taken = [index for sampler in samplers for batch in sampler for _, index in batch]
    assert sorted(taken) == list(range(num_images))
    assert [len(sampler) for sampler in samplers] == [len(list(sampler)) for sampler in samplers]


def test_seeds_are_well_mixed():
    seeds = {derive_seed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(seeds) == 1000 and all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, 1) != derive_seed(1, 0)


def lazy_image_of(image: Image.Image) -> LazyImage:
    return open_lazy_image(image, "auto")


def first_batches(cfg, num: int = 3, epoch: int = 1):
    loader = build_loader(cfg, ALONE, CPU, train=True)
    batches = loader.batches_from(seed=3, epoch=epoch, first_step=0)
    return [next(batches) for _ in range(num)]


def test_augmentation_depends_on_seed_epoch_and_index_only(small_cfg):
    torch.manual_seed(1)
    here = first_batches(small_cfg())
    torch.manual_seed(2)
    np.random.seed(2)
    random.seed(2)
    threads = ("DATA.WORKER_KIND", "thread", "TRAIN.WORKERS")
    for words in ((), ("TRAIN.WORKERS", 1), ("TRAIN.WORKERS", 2), (*threads, 0), (*threads, 1), (*threads, 3)):
        for (images, labels), (others, other_labels) in zip(here, first_batches(small_cfg(*words)), strict=True):
            assert torch.equal(images, others) and torch.equal(labels, other_labels)
    assert not torch.equal(here[0][0], first_batches(small_cfg(), epoch=2)[0][0])


def test_images_are_normalized_as_usual(small_cfg):
    loader = build_loader(small_cfg(), ALONE, CPU, train=False)
    images, labels = next(iter(loader))
    folder = torchvision_datasets.ImageFolder(small_cfg().TEST.DATASET + "/val")
    pixels = CenterCrop(18, 16)(lazy_image_of(folder[0][0]), SampleRNG(0, 0)).float() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    torch.testing.assert_close(images[0], (pixels - mean) / std, atol=1e-5, rtol=1e-5)
    assert labels.tolist() == [folder[index][1] for index in range(16)]


def test_mean_and_std_can_be_overridden(small_cfg):
    words = ("DATA.MEAN", [0, 0, 0], "DATA.STD", [1, 1, 1])
    images, _ = next(iter(build_loader(small_cfg(*words), ALONE, CPU, train=False)))
    assert images.min() >= 0 and images.max() <= 1


@pytest.mark.parametrize("size", [(40, 36), (16, 16), (200, 8), (1, 1)])
@pytest.mark.parametrize("crop", [ResizedCrop, PaddedCrop])
def test_transforms_take_any_image_and_honour_the_sizes(size, crop):
    lazy_image = lazy_image_of(Image.new("RGB", size))
    pixels = crop(24)(lazy_image, SampleRNG(0, 0))
    assert pixels.shape == (3, 24, 24) and pixels.dtype == torch.uint8
    assert CenterCrop(30, 24)(lazy_image, SampleRNG(0, 0)).shape == (3, 24, 24)


def test_the_folder_lists_what_torchvision_lists(tmp_path):
    draw_folder(tmp_path, "train", {"a": 2, "b": 3})
    (tmp_path / "train" / "a" / "notes.txt").write_text("not an image")
    mine = ImageFolder(tmp_path, "train")
    theirs = torchvision_datasets.ImageFolder(tmp_path / "train")
    assert [(mine.describe(index), mine.label(index)) for index in range(len(mine))] == theirs.samples
    assert list(mine.classes) == theirs.classes


def test_a_class_without_evaluation_images_does_not_shift_the_labels(tmp_path):
    draw_folder(tmp_path, "train", {"a": 2, "b": 2, "c": 2})
    draw_folder(tmp_path, "val", {"a": 1, "c": 2})
    images = ImageFolder.from_cfg(load_cfg(None, ["TRAIN.DATASET", str(tmp_path)]), train=False)
    assert [images.label(index) for index in range(len(images))] == [0, 2, 2]


@pytest.mark.parametrize("mode", ["L", "RGBA", "CMYK", "P", "1", "I;16", "LA"])
def test_images_of_any_mode_become_rgb(tmp_path, mode):
    folder = tmp_path / "val" / "a"
    folder.mkdir(parents=True)
    image = Image.new("L", (9, 7)).convert(mode) if mode != "I;16" else Image.new("I;16", (9, 7))
    image.save(folder / "x.png") if mode != "CMYK" else image.save(folder / "x.jpg")
    pixels = open_lazy_image(ImageFolder(tmp_path, "val").read(0), "auto").pixels()
    assert pixels.shape == (3, 7, 9) and pixels.dtype == torch.uint8


def break_one(root: Path) -> Path:
    """Truncate one of the training images and return it."""
    broken = sorted((root / "train" / "bee").iterdir())[3]
    broken.write_bytes(broken.read_bytes()[:200])
    return broken


@pytest.fixture
def broken_folder(tmp_path):
    draw_folder(tmp_path / "data", "train", {"ant": 12, "bee": 12})
    draw_folder(tmp_path / "data", "val", {"ant": 2, "bee": 2})
    break_one(tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_is_named(small_cfg, broken_folder, workers):
    cfg = small_cfg("TRAIN.DATASET", broken_folder, "MODEL.NUM_CLASSES", 2, "TRAIN.WORKERS", workers)
    with pytest.raises(BadImageError, match=r"bee/003\.jpg: OSError") as caught:
        first_batches(cfg, 2)
    assert "Traceback" not in str(caught.value) and "DATA.ON_BAD_IMAGE skip" in str(caught.value)


def test_a_skipped_image_is_replaced_the_same_way_each_time_and_counted(small_cfg, broken_folder, caplog):
    words = ("TRAIN.DATASET", broken_folder, "MODEL.NUM_CLASSES", 2, "DATA.ON_BAD_IMAGE", "skip")
    loader = build_loader(small_cfg(*words), ALONE, CPU, train=True)
    with caplog.at_level("WARNING"):
        one = list(loader.batches_from(seed=3, epoch=0, first_step=0))
    assert loader.num_broken == 1 and "bee/003.jpg" in caplog.text
    other = first_batches(small_cfg(*words, "TRAIN.WORKERS", 2), 2, epoch=0)
    assert all(torch.equal(a, b) for a, b in zip(sum(map(list, one), []), sum(map(list, other), []), strict=True))


def test_when_nothing_can_be_read_skipping_stops_too(small_cfg, broken_folder):
    for path in (broken_folder / "train").rglob("*.jpg"):
        path.write_bytes(b"not an image")
    words = ("TRAIN.DATASET", broken_folder, "MODEL.NUM_CLASSES", 2, "DATA.ON_BAD_IMAGE", "skip")
    with pytest.raises(BadImageError, match="broken image"):
        first_batches(small_cfg(*words))


def run_problems(*words) -> list[str]:
    cfg = load_cfg(None, [str(word) for word in words])
    return [str(problem) for problem in find_run_problems(cfg, train=True)]


def test_missing_folders_name_what_is_there(tmp_path, image_folder):
    words = ("MODEL.NUM_CLASSES", 3, "OUT_DIR", tmp_path / "o")
    assert run_problems("TRAIN.DATASET", image_folder, *words) == []
    (tmp_path / "photographs").mkdir()
    missing = run_problems("TRAIN.DATASET", tmp_path / "photograph", *words)
    assert "no such folder" in missing[0] and "did you mean photographs?" in missing[0]
    split = run_problems("TRAIN.DATASET", image_folder, "TRAIN.SPLIT", "training", *words)
    assert split == [
        f"TRAIN.SPLIT (command line): no folder 'training' in {image_folder}; it has train, val; did you mean train?"
    ]


def test_empty_classes_are_named(tmp_path):
    draw_folder(tmp_path, "train", {"a": 1, "b": 1})
    draw_folder(tmp_path, "val", {"a": 1, "b": 1})
    (tmp_path / "train" / "c").mkdir()
    (problem,) = run_problems("TRAIN.DATASET", tmp_path, "MODEL.NUM_CLASSES", 3, "OUT_DIR", tmp_path / "o")
    assert "class folders without an image: c" in problem


@pytest.mark.parametrize("num_classes", [2, 4, 1000])
def test_a_number_of_classes_that_contradicts_the_data_names_both(image_folder, tmp_path, num_classes):
    words = ("TRAIN.DATASET", image_folder, "MODEL.NUM_CLASSES", num_classes, "OUT_DIR", tmp_path / "o")
    (problem,) = run_problems(*words)
    assert f"{num_classes}, but" in problem and "has 3 classes; set MODEL.NUM_CLASSES 3" in problem
    with pytest.raises(ConfigError, match=f"{num_classes}, but .* has 3 classes"):
        build_loader(load_cfg(None, [str(word) for word in words]), ALONE, CPU, train=True)


def test_evaluation_classes_that_were_not_trained_are_an_error(tmp_path):
    draw_folder(tmp_path, "train", {"a": 1, "b": 1})
    draw_folder(tmp_path, "val", {"a": 1, "z": 1})
    (problem,) = run_problems("TRAIN.DATASET", tmp_path, "MODEL.NUM_CLASSES", 2, "OUT_DIR", tmp_path / "o")
    assert "has classes that the training data lacks: z" in problem


def test_the_evaluation_folder_is_its_own(small_cfg, tmp_path):
    draw_folder(tmp_path / "other", "holdout", {"ant": 1, "bee": 2, "cat": 3})
    cfg = small_cfg("TEST.DATASET", tmp_path / "other", "TEST.SPLIT", "holdout")
    assert len(build_loader(cfg, ALONE, CPU, train=False).images) == 6


def test_a_step_larger_than_the_set_is_an_error(small_cfg):
    with pytest.raises(ConfigError, match="got 96 images per step .* at most 48,"):
        build_loader(small_cfg("TRAIN.BATCH_SIZE", 96), ALONE, CPU, train=True)


@pytest.mark.parametrize("words", [("MODEL.DUMMY_INPUT", True), ("DATA.NAME", "dummy")])
def test_dummy_input_honours_sizes_and_classes(small_cfg, words):
    cfg = small_cfg(*words, "MODEL.NUM_CLASSES", 7, "TRAIN.DATASET", "/nowhere")
    assert find_run_problems(cfg, train=True) == []
    images, labels = first_batches(cfg, 1)[0]
    assert images.shape == (12, 3, 16, 16) and labels.max() < 7


def test_the_shapes_are_drawn_into_the_cache(small_cfg, tmp_path, monkeypatch):
    import distribuuuu.data.datasets.shapes as shapes

    draw = shapes.draw_shapes
    monkeypatch.setattr(shapes, "draw_shapes", lambda root: draw(root, num_train=20, num_val=10))
    cfg = small_cfg("DATA.NAME", "shapes", "MODEL.NUM_CLASSES", 10, "DATA.CACHE_DIR", tmp_path / "cache")
    assert find_run_problems(cfg, train=True) == []
    assert len(build_loader(cfg, ALONE, CPU, train=True).images) == 20
    assert len(list((tmp_path / "cache" / "shapes" / "val").rglob("*.jpg"))) == 10


def write_cifar(root: Path) -> None:
    """Write a CIFAR-10 of ten images in the layout of the real one."""
    import pickle

    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    pixels = np.arange(10 * 3072, dtype=np.int64).reshape(10, 3072).astype(np.uint8)
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    for name in names:
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": list(range(10))}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"name{number}" for number in range(10)]}))


def test_torchvisions_sets_are_read_with_their_statistics(small_cfg, tmp_path, monkeypatch):
    write_cifar(tmp_path)
    monkeypatch.setattr(torchvision_datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    cfg = small_cfg(
        "DATA.NAME", "cifar10", "MODEL.NUM_CLASSES", 10, "TRAIN.DATASET", tmp_path, "TEST.DATASET", tmp_path
    )
    loader = build_loader(cfg, ALONE, CPU, train=True)
    assert (len(loader.images), loader.images.crop, loader.images.mean) == (50, "pad", (0.4914, 0.4822, 0.4465))
    assert loader.images.classes[3] == "name3" and loader.images.read(0).shape == (32, 32, 3)


def test_a_set_that_is_missing_and_cannot_be_fetched_is_a_clear_error(small_cfg, tmp_path):
    cfg = small_cfg(
        "DATA.NAME", "mnist", "MODEL.NUM_CLASSES", 10, "TRAIN.DATASET", tmp_path, "DATA.DOWNLOAD", False
    )  # fmt: skip
    with pytest.raises(ConfigError, match=f"TRAIN.DATASET: MNIST is not in {tmp_path}"):
        build_loader(cfg, ALONE, CPU, train=True)
    assert "has 10 classes" in run_problems("DATA.NAME", "mnist", "OUT_DIR", tmp_path / "o")[0]


def build_in_group(cfg) -> int:
    return len(build_loader(cfg, detect_launch(), CPU, train=False))


def test_processes_share_the_evaluation_images(small_cfg):
    assert on_processes(3, build_in_group, small_cfg("TEST.BATCH_SIZE", 5)) == [3, 3, 3]
