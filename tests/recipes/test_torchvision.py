"""Recipes V1 and V2 of torchvision: what the configs do, next to torch's and torchvision's own objects.

Source: github.com/pytorch/vision, references/classification: train.py at 017e9b99b5da, transforms.py at 02a0a90b7ad1,
presets.py at 080836e5824e, sampler.py at 775e76043cb8. The command of V2 is in issue 3995, comment 1013906621; pull
request 5201 published its weights.
"""

from collections import Counter

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from support.recipe_measures import evaluation, initial_model, recipe, train_crop, train_transform
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchvision.transforms import functional as tv
from torchvision.transforms import v2

from distribuuuu.data.batch_plan import plan_batches
from distribuuuu.data.lazy_image import LazyImage
from distribuuuu.data.mixup import build_mixer
from distribuuuu.data.normalize import Normalizer
from distribuuuu.data.samplers import ResumableDistributedSampler
from distribuuuu.data.seeding import SampleRNG
from distribuuuu.data.transforms import CenterCrop
from distribuuuu.optim.ema import build_averages
from distribuuuu.tasks.losses import build_loss

V1, V2 = "imagenet/resnet50_torchvision_v1", "imagenet/resnet50_torchvision_v2"


def test_the_initial_model_is_torchvisions():
    torch.manual_seed(0)
    theirs, model = torchvision.models.resnet50(), initial_model(recipe(V1))
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in model.state_dict().items())
    assert recipe(V1).MODEL.dump() == recipe(V2, "MODEL.CHANNELS_LAST", False).MODEL.dump()


# The mixing of V2


def batch_of_a_step(num: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num, 3, 10, 12, generator=generator), torch.randint(0, 1000, (num,), generator=generator)


def mix_on_8_gpus(cfg, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    plan = plan_batches(cfg.TRAIN.BATCH_SIZE, cfg.TRAIN.GLOBAL_BATCH_SIZE, 8)
    images, labels = batch_of_a_step()
    parts = zip(images.split(plan.micro_batch), labels.split(plan.micro_batch), strict=True)
    return [build_mixer(cfg, plan, rank)(part.clone(), own, 0, 0, step, 0) for rank, (part, own) in enumerate(parts)]


def test_a_gpu_has_one_coefficient_and_one_box_and_gpus_have_their_own():
    cfg, kinds, coefficients = recipe(V2), Counter(), []
    for step in range(40):
        images, labels = batch_of_a_step()
        for rank, (mixed, targets) in enumerate(mix_on_8_gpus(cfg, step)):
            part = slice(rank * 128, (rank + 1) * 128)
            own, partner = images[part], images[part].unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
            kept, from_partner = (mixed == own).all(1), (mixed == partner).all(1)
            is_cutmix = bool((kept | from_partner).all())
            if is_cutmix:  # the same pixels of all 128 images come from the partner
                assert (from_partner == from_partner[0]).all()
            shares = {round(float(row[label]), 5) for row, label in zip(targets, labels[part], strict=True)} - {1.0}
            assert len(shares) <= 1
            kinds["cutmix" if is_cutmix else "mixup"] += 1
            coefficients += shares
    assert len(set(coefficients)) > 120  # of 320; boxes in 10 x 12 pixels have few areas
    assert 120 < kinds["cutmix"] < 200


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_targets_and_loss_of_a_mixed_pair_are_torchvisions(kind):
    """Two images, of which each is the other's partner in torchvision's roll too."""
    off = "AUG.CUTMIX" if kind == "mixup" else "AUG.MIXUP"
    cfg = recipe(V2, off, 0, "TRAIN.GLOBAL_BATCH_SIZE", 2, "TRAIN.BATCH_SIZE", 2)
    mixer, criterion = build_mixer(cfg, plan_batches(2, 2, 1), rank=0), build_loss(cfg)
    for step in range(10):
        images, labels = (part[:2] for part in batch_of_a_step())
        drawn = mixer.draw(3, 1, step)
        [lam], [[_, top, bottom, left, right, partner]] = drawn.lam, drawn.weights(10, 12).tolist()
        theirs = (v2.MixUp if kind == "mixup" else v2.CutMix)(num_classes=1000)
        params = {"labels": labels, "batch_size": 2, "lam": float(lam), "lam_adjusted": 1 - partner}
        params["box"] = [int(edge) for edge in (left, top, right, bottom)]
        expected, expected_targets = theirs.transform(images, params), theirs.transform(labels, params)
        mixed, targets = mixer(images.clone(), labels, 3, 1, step, 0)
        torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(targets, expected_targets, rtol=0, atol=1e-6)
        logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(step)) * 3
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)(logits, expected_targets)
        assert float(criterion(logits, targets)) == pytest.approx(float(loss), rel=1e-6)


def test_the_box_of_cutmix_is_torchvisions():
    """Side int(r * side) on each side of the center, where r = 0.5 * sqrt(1 - lambda), cut off at the borders."""
    cfg = recipe(V2, "AUG.MIXUP", 0)
    drawn = build_mixer(cfg, plan_batches(128, 1024, 8), rank=0).draw(0, 0, 0)
    for lam, row, column, weights in zip(drawn.lam, drawn.row, drawn.column, drawn.weights(224, 200), strict=True):
        r, y, x = 0.5 * (1 - lam) ** 0.5, int(row * 224), int(column * 200)
        rows, columns = (int(r * 224), 224, y), (int(r * 200), 200, x)
        edges = [edge for half, side, at in (rows, columns) for edge in (max(0, at - half), min(side, at + half))]
        assert weights[1:5].tolist() == edges


def test_repeated_augmentation_has_the_images_of_torchvisions_sampler():
    """In a step of 8 GPUs, GPU r takes the indices (r + 8 k) // 4 of the epoch's order."""
    cfg = recipe(V2)
    plan = plan_batches(128, 1024, 8)
    samplers = [ResumableDistributedSampler(1281167, plan, rank, cfg.DATA.REPEATS) for rank in range(8)]
    by_gpu = [[index for _, index in next(iter(sampler))] for sampler in samplers]
    theirs = [[(rank + 8 * k) // 4 for k in range(128)] for rank in range(8)]
    for gpus in (by_gpu, theirs):
        copies = Counter(index for images in gpus for index in images)
        assert len(copies) == 256 and set(copies.values()) == {4}
        assert all(len(set(images)) == 128 for images in gpus)  # the copies are on different GPUs


def test_the_average_is_torchs_as_the_script_updates_it():
    cfg = recipe(V2)
    # alpha * n_GPUs * images per GPU * steps / epochs
    share = (1 - 0.99998) * 8 * 128 * 32 / 600
    net = nn.Linear(1, 1, bias=False).double()
    theirs = AveragedModel(net, avg_fn=lambda average, new, _: (1 - share) * average + share * new)
    ours, steps = build_averages(cfg, net)["ema"], 70
    torch.manual_seed(0)
    for epoch in range(8):
        for step in range(steps):
            nn.init.normal_(net.weight)
            if step % 32 == 0:
                theirs.update_parameters(net)
                if epoch < 5:
                    theirs.n_averaged.fill_(0)
            ours.finish_step(epoch, step, (epoch * steps + step + 1) * 1024, 1024)
            difference = abs(ours.model.weight.item() - theirs.module.weight.item())
            assert difference < 1e-6 or (epoch, step) == (0, 0), (epoch, step)


# Images

# Operation -> (greatest magnitude, whether its sign is random), of TrivialAugmentWide; None: it has no magnitude.
TRIVIAL_AUGMENT = {
    "Identity": (None, False), "ShearX": (0.99, True), "ShearY": (0.99, True), "TranslateX": (32, True),
    "TranslateY": (32, True), "Rotate": (135, True), "Brightness": (0.99, True), "Color": (0.99, True),
    "Contrast": (0.99, True), "Sharpness": (0.99, True), "Posterize": (2, False), "Solarize": (0, False),
    "AutoContrast": (None, False), "Equalize": (None, False),
}  # fmt: skip


def test_the_policy_has_the_operations_of_trivial_augment():
    policy = train_transform(recipe(V2)).policy.operation
    found = {}
    for name, (magnitudes, is_signed) in policy._AUGMENTATION_SPACE.items():
        values = magnitudes(policy.num_magnitude_bins, 176, 176)
        found[name] = (None if values is None else pytest.approx(float(values[-1])), is_signed)
    assert found == TRIVIAL_AUGMENT and policy.num_magnitude_bins == 31
    assert policy.interpolation == v2.InterpolationMode.BILINEAR and not any(policy._fill.values())
    assert train_transform(recipe(V1)) == train_crop(recipe(V1))  # no policy, no erasing


def test_an_erased_rectangle_is_zero_after_normalization():
    cfg = recipe(V2)
    erase, theirs = train_transform(cfg).erase, torchvision.transforms.RandomErasing(p=0.1)
    assert erase.probability == theirs.p == 0.1
    torch.manual_seed(0)
    pixels, erased = torch.full((3, 176, 176), 255, dtype=torch.uint8), []
    while len(erased) < 20:
        result = erase(pixels)
        erased += [] if result is pixels else [result]
    normalize = Normalizer(torch.device("cpu"), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), channels_last=False)
    images = normalize(torch.stack(erased))
    inside = images < 1
    assert inside.any() and images[inside].abs().max() < 0.01  # the color is rounded to a byte


@pytest.mark.parametrize("name", [V1, V2])
def test_evaluation_is_torchvisions(name):
    resize, crop, interpolation, _ = evaluation(recipe(name))
    rng = np.random.default_rng(0)
    for size in ((500, 375), (300, 451)):
        image = Image.fromarray(rng.integers(0, 256, (9, 8, 3), dtype=np.uint8)).resize(size)
        theirs = tv.pil_to_tensor(tv.center_crop(tv.resize(image, resize), crop))
        ours = CenterCrop(resize, crop, interpolation)(LazyImage(tv.pil_to_tensor(image)), SampleRNG(0, 0))
        assert (ours.int() - theirs.int()).abs().max() <= 1
