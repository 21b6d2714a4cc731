"""Augmentation after the crop: what torchvision and timm do, drawn from position alone, in any worker."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from support.batches import ALONE, CPU, own_task
from support.images import scene, tensor_of
from support.runs import assert_same_run
from support.tables import slow
from timm.data import auto_augment
from torchvision.transforms import v2

from distribuuuu.config import ConfigError, get_cfg
from distribuuuu.config.registry import AUGMENTATIONS, task_class
from distribuuuu.data import augment
from distribuuuu.data.augment import AugmentedCrop, Erasing, make_jitter
from distribuuuu.data.crops import PaddedCrop
from distribuuuu.data.decode import LazyImage
from distribuuuu.data.loader import build_loader
from distribuuuu.data.policies import make_policy
from distribuuuu.data.seeding import SampleRNG, seed_cpu, seeded_generators
from distribuuuu.trainer import train_model

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SCENE = tensor_of(scene(48, 48))


def image_of(pixels: torch.Tensor) -> Image.Image:
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def whole(size: int = 48) -> PaddedCrop:
    """Return a crop that leaves an image of this size as it is."""
    return PaddedCrop(size, padding=0, flip=0.0)


def policy(text: str, mean=MEAN, interpolation: str = "bilinear"):
    """Return policy(image, seed)."""
    operation = make_policy(text, interpolation, mean, 48)

    def seeded(image: Image.Image, seed: int) -> Image.Image:
        with seeded_generators(seed):
            return operation(image)

    return seeded


def states() -> tuple:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("text", ["rand-m7-mstd0.5-inc1", "augmix-m5-w4-d2", "original"])
def test_timms_text_gives_what_timm_gives(text):
    made = {"r": auto_augment.rand_augment_transform, "a": auto_augment.augment_and_mix_transform}
    image = image_of(SCENE)
    for interpolation in ("bicubic", "random"):
        hparams = {"translate_const": 21, "img_mean": (124, 116, 104)}
        hparams |= {"translate_pct": 0.3} if text[0] == "a" else {}
        if interpolation != "random":  # timm's own default
            hparams["interpolation"] = Image.Resampling.BICUBIC
        theirs = made.get(text[0], auto_augment.auto_augment_transform)(text, hparams)
        mine, changed = policy(text, interpolation=interpolation), 0
        for seed in range(40):
            random.seed(seed)
            np.random.seed(seed)
            expected = tensor_of(theirs(image))
            assert torch.equal(tensor_of(mine(image, seed)), expected)
            changed += not torch.equal(expected, SCENE)
        assert changed > 20


def test_torchvisions_names_give_what_torchvision_gives():
    mode, image = v2.InterpolationMode.BILINEAR, image_of(SCENE)
    for text, theirs in {
        "autoaugment": v2.AutoAugment(v2.AutoAugmentPolicy.IMAGENET, interpolation=mode),
        "randaugment": v2.RandAugment(2, 9, interpolation=mode),
        "trivialaugment": v2.TrivialAugmentWide(interpolation=mode),
    }.items():
        mine = policy(text)
        for seed in range(40):
            torch.manual_seed(seed)
            assert torch.equal(tensor_of(mine(image, seed)), tensor_of(theirs(image))), text


def test_text_that_is_not_understood_says_why_and_where_it_was_set(small_cfg):
    for text, said in {
        "rand-m9-inc": r"'inc'; rand takes mNUMBER, nNUMBER", "rand-m9-foo3": "'foo3'", "none-1": "settings",
        "rand-m9.5": "rejected by timm", "rand-m9-tweight": "no operations that timm knows: tweights",
        "augmix-q3": "'q3'; augmix takes mNUMBER",
        "autoaugment-m9": "settings, which autoaugment does not take",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=rf"^AUG.POLICY \(command line\): '{text}' .*{said}"):
            build_loader(small_cfg("AUG.POLICY", text), ALONE, CPU, train=True)
    build_loader(small_cfg("AUG.POLICY", "none-1"), ALONE, CPU, train=False)


@pytest.mark.parametrize("shape", [(32, 32), (224, 160), (3, 5)])
def test_rectangles_of_many_images_are_those_that_torchvision_draws_for_each(shape):
    erase, image = Erasing(0.5, MEAN), torch.zeros(3, *shape, dtype=torch.uint8)
    seeds, index = np.full(500, 2, np.uint64), np.arange(500, dtype=np.uint64)
    boxes = erase.rectangles(SampleRNG(seeds, index), *shape).T.tolist()
    for number, (top, bottom, left, right) in enumerate(boxes):
        expected = torch.zeros_like(image)
        expected[:, top:bottom, left:right] = erase.color
        assert torch.equal(AugmentedCrop(lambda *_: image, erase=erase)(None, SampleRNG(2, number)), expected)
    assert 200 < sum(box != [0] * 4 for box in boxes) < 300 or shape == (3, 5)


def test_the_policy_comes_first_then_the_others_and_each_draws_the_same_whatever_they_are():
    steps = []

    def note(name: str):
        return lambda value: (steps.append(name), value)[1]

    transform = AugmentedCrop(whole(), note("policy"), note("jitter"), (note("one"), note("two")), note("erase"))
    transform(LazyImage(SCENE), SampleRNG(0, 0))
    assert steps == ["policy", "jitter", "one", "two", "erase"]
    alone = AugmentedCrop(whole(), erase=Erasing(1.0, MEAN))(LazyImage(SCENE), SampleRNG(2, 7))
    jittered = AugmentedCrop(whole(), jitter=make_jitter((0.0,)), erase=Erasing(1.0, MEAN))
    assert torch.equal(jittered(LazyImage(SCENE), SampleRNG(2, 7)), alone)


def test_color_noise_shifts_each_image_along_the_components_of_imagenets_colors():
    gray = torch.full((3, 4, 4), 128, dtype=torch.uint8)
    transform = AugmentedCrop(whole(), operations=(augment.pca_noise,))
    shifts = torch.stack([transform(LazyImage(gray), SampleRNG(0, index)).double() - 128 for index in range(500)])
    assert (shifts == shifts[:, :, :1, :1]).all(), "one shift for an image"
    # Deviations in gray levels and the least correlation, from the eigenvalues and eigenvectors of pycls.
    assert torch.allclose(shifts[:, :, 0, 0].std(0), torch.tensor([3.167, 3.223, 3.255]).double(), rtol=0.1)
    assert 0.95 < torch.corrcoef(shifts[:, :, 0, 0].T).min() < 0.995


WAYS = [("process", 2), ("thread", 3)]
MIXES = {
    "timm": ("AUG.POLICY", "rand-m9-mstd0.5-inc1", "AUG.ERASING", 0.5, "AUG.ERASING_MODE", "pixel"),
    "torchvision": ("AUG.POLICY", "trivialaugment", "AUG.COLOR_JITTER", [0.4, 0.4, 0.4, 0.1], "AUG.ERASING", 0.5),
    "operations": ("AUG.OPERATIONS", "[grayscale]", "AUG.ERASING", 0.5),
    "3augment": ("AUG.POLICY", "3augment", "AUG.COLOR_JITTER", 0.3, "DATA.INTERPOLATION", "bicubic"),
}


def batches_of(cfg, epoch: int = 1) -> list[torch.Tensor]:
    return [batch.images for batch in build_loader(cfg, ALONE, CPU, train=True).batches_from(3, epoch, 0)]


@pytest.mark.parametrize("crop", ["resized", slow("pad")])
@pytest.mark.parametrize("mix", ["timm", "torchvision", slow("operations"), slow("3augment")])
def test_any_worker_and_the_device_loader_augment_alike(small_cfg, mix, crop):
    words = (*MIXES[mix], "DATA.CROP", crop)
    here, plain = batches_of(small_cfg(*words)), batches_of(small_cfg("DATA.CROP", crop))
    assert not torch.equal(here[0], plain[0]) and not torch.equal(here[0], batches_of(small_cfg(*words), epoch=2)[0])
    others = [("DATA.WORKER_KIND", kind, "TRAIN.WORKERS", num) for kind, num in WAYS]
    for number, way in enumerate([*others, ("DATA.LOADER", "device")]):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(number)
        there = batches_of(small_cfg(*words, *way))
        assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True)), way


class Draws(task_class(get_cfg())):
    """A task whose steps draw from every generator, before and after the gradients, and for its batches."""

    gradient_passes = 2

    def prepare_batch(self, batch, key):
        return super().prepare_batch(batch, key)._replace(images=batch.images * (1 + random.random()))

    def update(self, step):
        before = random.random() + np.random.rand() + float(torch.rand(()))
        step.gradients()
        for group in self.state.optimizer.param_groups:
            group["lr"] = before + random.random() / 10
        step.apply()

    def train_step(self, model, batch, key):
        time.sleep(0.01)  # threads of the loader could draw meanwhile
        output = super().train_step(model, batch, key)
        output.loss = output.loss * (random.random() + np.random.rand() + torch.rand(()))
        return output


@pytest.mark.slow
def test_losses_depend_neither_on_workers_nor_on_earlier_draws(small_cfg, monkeypatch, tmp_path):
    monkeypatch.setattr(AUGMENTATIONS, "_table", {})
    words = own_task(monkeypatch, base=Draws)

    @AUGMENTATIONS.register
    def shake(pixels: torch.Tensor) -> torch.Tensor:
        shift = torch.rand_like(pixels.float()) + torch.distributions.Beta(2, 2).sample()
        shift += random.random() + np.random.rand()
        return (pixels * 0.5 + 20 * shift).to(torch.uint8)

    for number, (kind, num) in enumerate([("process", 0), ("process", 2), ("thread", 2)]):
        seed_cpu(number)
        out = ("TRAIN.WORKERS", num, "DATA.WORKER_KIND", kind, "OUT_DIR", tmp_path / str(number))
        train_model(small_cfg(*words, "AUG.OPERATIONS", "[shake]", "OPTIM.MAX_EPOCH", 1, *out))
        assert_same_run(tmp_path / str(number), tmp_path / "0")


@pytest.mark.parametrize("kind, num", [("process", 0), ("process", 1), ("thread", 1)])
def test_an_error_of_an_operation_is_not_taken_for_a_broken_image(small_cfg, monkeypatch, kind, num):
    monkeypatch.setattr(AUGMENTATIONS, "_table", {})

    @AUGMENTATIONS.register
    def fails(pixels: torch.Tensor) -> torch.Tensor:
        raise KeyError("gamma")

    words = ("AUG.OPERATIONS", "[fails]", "DATA.ON_BAD_IMAGE", "skip", "DATA.WORKER_KIND", kind, "TRAIN.WORKERS", num)
    loader = build_loader(small_cfg(*words), ALONE, CPU, train=True)
    said = r"AUG.* failed in fails, .*test_augment.py, line \d+: KeyError: 'gamma'"
    with pytest.raises(ConfigError, match=said) as caught:
        next(loader.batches_from(3, 0, 0))
    assert "Traceback" not in str(caught.value) and loader.num_broken == 0


DRAWS = {
    "rand_like": lambda: torch.rand_like(torch.zeros(3)),
    "binomial": lambda: torch.binomial(torch.full((9,), 50.0), torch.full((9,), 0.4)),
    "noise of torchvision": lambda: v2.GaussianNoise()(torch.zeros(3, 4, 4)),
    "numpy": lambda: torch.from_numpy(np.random.dirichlet(np.ones(4))),
    "random": lambda: torch.tensor([random.betavariate(2, 3), random.random()]),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_whatever_an_operation_draws_is_seeded_on_any_thread(draw):
    def seeded(seed: int) -> torch.Tensor:
        with seeded_generators(seed):
            return DRAWS[draw]()

    before = states()
    here = [seeded(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        there = list(pool.map(seeded, range(4)))
    assert all(map(torch.equal, here, there)) and not all(torch.equal(here[0], other) for other in here[1:])
    assert states() == before
