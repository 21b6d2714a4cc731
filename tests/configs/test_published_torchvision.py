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
from support.recipe_semantics import (
    Evaluation,
    evaluation,
    init_std,
    initial_model,
    learning_rates,
    meta_model,
    norm_gammas,
    num_steps,
    optimizer_defaults,
    parameter_options,
    positions,
    recipe,
    reported_weights,
    train_crop,
    train_transform,
)
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torchvision.ops._utils import split_normalization_params
from torchvision.transforms import functional as tv
from torchvision.transforms import v2

from distribuuuu.data.batch_plan import plan_batches
from distribuuuu.data.decode import LazyImage
from distribuuuu.data.mixup import build_mixer
from distribuuuu.data.normalize import Normalizer
from distribuuuu.data.samplers import ResumableDistributedSampler
from distribuuuu.data.seeding import SampleRNG
from distribuuuu.optim.ema import build_ema
from distribuuuu.tasks.losses import build_loss

V1, V2 = "imagenet/resnet50_torchvision_v1", "imagenet/resnet50_torchvision_v2"
# (epochs, base rate, weight decay, decay of norm layers, images per GPU), of the commands; 8 GPUs each.
FIGURES = {V1: (90, 0.1, 1e-4, 1e-4, 32), V2: (600, 0.5, 2e-5, 0.0, 128)}


def published_rates(name: str) -> list[float]:
    """Return the learning rate of each epoch by torch's schedulers, as train.py combines them."""
    epochs, lr = FIGURES[name][:2]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    if name == V1:
        schedule: lr_scheduler.LRScheduler = lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    else:
        warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=5)
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs - 5)
        schedule = lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[5])
    rates = []
    for _ in range(epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("name", FIGURES)
def test_learning_rates_are_those_of_torchs_schedulers(name):
    cfg, rates = recipe(name), published_rates(name)
    at = positions(cfg)
    assert len(at) == 12
    np.testing.assert_allclose(learning_rates(cfg, at), [rates[epoch] for epoch, _ in at], rtol=1e-6)


@pytest.mark.parametrize("name", FIGURES)
def test_weight_decay_is_torchvisions_split(name):
    cfg, (_, _, decay, norm_decay, _) = recipe(name), FIGURES[name]
    model = meta_model(cfg)
    norms = {id(parameter) for parameter in split_normalization_params(model)[0]}
    expected = {key: norm_decay if id(value) in norms else decay for key, value in model.named_parameters()}
    found = parameter_options(cfg)
    assert {key: options.weight_decay for key, options in found.items()} == expected
    assert found["fc.bias"].weight_decay == decay and found["layer1.0.downsample.1.bias"].weight_decay == norm_decay
    assert {options.lr_scale for options in found.values()} == {1.0}


@pytest.mark.parametrize("name", FIGURES)
def test_the_optimizer_and_the_batch_are_those_of_the_command(name):
    cfg, (epochs, lr, _, _, per_gpu) = recipe(name), FIGURES[name]
    options = optimizer_defaults(cfg)
    assert [options[key] for key in ("lr", "momentum", "dampening", "nesterov")] == [lr, 0.9, 0, False]
    plan = plan_batches(cfg.TRAIN.BATCH_SIZE, cfg.TRAIN.GLOBAL_BATCH_SIZE, 8)
    assert (plan.micro_batch, plan.accum_steps, cfg.OPTIM.MAX_EPOCH) == (per_gpu, 1, epochs)
    assert cfg.TRAIN.AMP == "none" and not cfg.OPTIM.CLIP_NORM and not cfg.MODEL.SYNCBN


@pytest.mark.parametrize("name", FIGURES)
def test_the_initial_model_is_torchvisions(name):
    cfg = recipe(name)
    torch.manual_seed(0)
    theirs, model = torchvision.models.resnet50(), initial_model(cfg)
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in model.state_dict().items())
    gammas = norm_gammas(model)
    assert len(gammas) == 53 and set(gammas.values()) == {1.0}  # the last one of a block too
    expected = {
        "conv1.weight": (2 / (49 * 64)) ** 0.5,
        "layer1.0.conv1.weight": (2 / 64) ** 0.5,
        "layer2.0.conv2.weight": (2 / (9 * 128)) ** 0.5,
        "layer4.0.downsample.0.weight": (2 / 2048) ** 0.5,
        "fc.weight": (1 / (3 * 2048)) ** 0.5,
    }
    assert init_std(model, expected) == pytest.approx(expected, rel=0.02)


# The mixing of V2


def batch_of_a_step(num: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num, 3, 10, 12, generator=generator), torch.randint(0, 1000, (num,), generator=generator)


def mix_on_8_gpus(cfg, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return images and targets of each GPU after mixing."""
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
        [lam], [[_, top, bottom, left, right, partner]] = (
            mixer.draw(3, 1, step).lam,
            mixer.draw(3, 1, step).weights(10, 12).tolist(),
        )
        theirs = (v2.MixUp if kind == "mixup" else v2.CutMix)(num_classes=1000)
        params = {"labels": labels, "batch_size": 2, "lam": float(lam), "lam_adjusted": 1 - partner}
        params["box"] = [int(edge) for edge in (left, top, right, bottom)]
        expected, expected_targets = theirs.transform(images, params), theirs.transform(labels, params)
        mixed, targets = mixer(images.clone(), labels, 3, 1, step, 0)
        torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(targets, expected_targets, rtol=0, atol=1e-6)
        logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(step)) * 3
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)(logits, expected_targets)
        assert float(criterion(logits, targets)) == pytest.approx(float(loss), abs=1e-6)


def test_the_box_of_cutmix_is_torchvisions():
    """Side int(r * side) on each side of the center, where r = 0.5 * sqrt(1 - lambda), cut off at the borders."""
    cfg = recipe(V2, "AUG.MIXUP", 0)
    drawn = build_mixer(cfg, plan_batches(128, 1024, 8), rank=0).draw(0, 0, 0)
    for lam, row, column, weights in zip(drawn.lam, drawn.row, drawn.column, drawn.weights(224, 200), strict=True):
        r, y, x = 0.5 * (1 - lam) ** 0.5, int(row * 224), int(column * 200)
        box = [
            max(0, y - int(r * 224)),
            min(224, y + int(r * 224)),
            max(0, x - int(r * 200)),
            min(200, x + int(r * 200)),
        ]
        assert weights[1:5].tolist() == box


def test_repeated_augmentation_has_the_images_of_torchvisions_sampler():
    """In a step of 8 GPUs, GPU r takes the indices (r + 8 k) // 4 of the epoch's order."""
    cfg = recipe(V2)
    plan = plan_batches(128, 1024, 8)
    assert num_steps(cfg) == (1281167 // 256 * 256 // 8) // 128 == 1251
    samplers = [ResumableDistributedSampler(1281167, plan, rank, cfg.DATA.REPEATS) for rank in range(8)]
    by_gpu = [[index for _, index in next(iter(sampler))] for sampler in samplers]
    theirs = [[(rank + 8 * k) // 4 for k in range(128)] for rank in range(8)]
    for gpus in (by_gpu, theirs):
        copies = Counter(index for images in gpus for index in images)
        assert len(copies) == 256 and set(copies.values()) == {4}
        assert all(len(set(images)) == 128 for images in gpus)  # the copies are on different GPUs


# The average


def test_v1_has_a_partial_batch_more_than_an_epoch_here():
    images, per_process, batch = 1_281_167, 160_146, 32  # DistributedSampler without drop_last, DataLoader without it
    assert per_process == -(-images // 8)
    assert -(-per_process // batch) == 5005 and 8 * (per_process % batch) == 144
    cfg = recipe("imagenet/resnet50_torchvision_v1")
    assert num_steps(cfg) == 5004 and images - 5004 * cfg.TRAIN.GLOBAL_BATCH_SIZE == 143


def test_the_average_is_torchs_as_the_script_updates_it():
    cfg = recipe(V2)
    # alpha * n_GPUs * images per GPU * steps / epochs
    share = (1 - 0.99998) * 8 * 128 * 32 / 600
    net = nn.Linear(1, 1, bias=False).double()
    theirs = AveragedModel(net, avg_fn=lambda average, new, _: (1 - share) * average + share * new)
    ours, steps = build_ema(cfg, net), 70
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


def test_the_averaged_weights_are_reported_for_v2_and_the_raw_ones_for_v1():
    assert [reported_weights(recipe(name)) for name in (V1, V2)] == ["raw", "ema"]
    assert recipe(V2).EMA.BUFFERS == "average"


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


@pytest.mark.parametrize("name, size", [(V1, 224), (V2, 176)])
def test_the_training_crop_is_random_resized_crop(name, size):
    crop, theirs = train_crop(recipe(name)), torchvision.transforms.RandomResizedCrop(size)
    assert (crop.size, crop.flip, crop.interpolation) == (size, 0.5, theirs.interpolation.value)
    assert tuple(crop.scale) == tuple(theirs.scale) and tuple(crop.ratio) == pytest.approx(tuple(theirs.ratio))


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


@pytest.mark.parametrize("name, expected", [(V1, Evaluation(256, 224, "bilinear", False)),
                                            (V2, Evaluation(232, 224, "bilinear", False))])  # fmt: skip
def test_evaluation_is_torchvisions(name, expected):
    from distribuuuu.data.transforms import CenterCrop

    found = evaluation(recipe(name))
    assert found == expected
    rng = np.random.default_rng(0)
    for size in ((500, 375), (300, 451)):
        image = Image.fromarray(rng.integers(0, 256, (9, 8, 3), dtype=np.uint8)).resize(size)
        theirs = tv.pil_to_tensor(tv.center_crop(tv.resize(image, expected.resize), expected.crop))
        ours = CenterCrop(*found[:3])(LazyImage(tv.pil_to_tensor(image)), SampleRNG(0, 0))
        assert (ours.int() - theirs.int()).abs().max() <= 1


def test_the_loss_of_v1_is_cross_entropy():
    labels = torch.arange(8)
    logits = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
    loss = build_loss(recipe(V1))(logits, labels)
    assert float(loss) == pytest.approx(float(nn.CrossEntropyLoss()(logits, labels)), abs=1e-6)
