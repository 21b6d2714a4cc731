"""ResNet strikes back, procedures A1 to A3, against timm: the semantics of the configs, not only their values.

Sources: arXiv 2110.00476, table 2, and timm of its date, commit 66253790 of October 19, 2021: train.py (defaults),
scheduler/cosine_lr.py, loss/binary_cross_entropy.py, data/mixup.py, data/transforms_factory.py, optim/lamb.py,
optim/optim_factory.py, models/resnet.py. Of table 2 the arguments are --aa, --mixup, --cutmix, --smoothing, --epochs,
--lr, --weight-decay, --drop-path and --aug-repeats; --bce-target-thresh 0.2 is that of the commands in public use, e.g.
in README.md of Alibaba-MIIL/ML_Decoder (12a67d98).
"""

import pytest
import timm
import torch
from PIL import Image
from support.recipe_semantics import (
    drop_path_rates,
    ema_decays,
    evaluation,
    init_std,
    initial_model,
    learning_rates,
    meta_model,
    mixed_targets,
    norm_gammas,
    num_steps,
    optimizer_defaults,
    parameter_options,
    policy_operations,
    positions,
    recipe,
    reported_weights,
    train_crop,
    train_transform,
)
from timm.data import create_transform
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy
from timm.optim import param_groups_weight_decay
from timm.scheduler import CosineLRScheduler

from distribuuuu.tasks.losses import build_loss

NAMES = ("a1", "a2", "a3")
# Computed by timm/scheduler/cosine_lr.py of the commit: --warmup-lr 1e-4 and --min-lr 1e-6, its defaults.
RATES = {
    "a1": [1e-4, 1e-4, 1e-4, 1.08e-3, 1.08e-3, 4.99914348e-3, 4.99914348e-3, 4.99876665e-3, 3.75025e-3, 2.5005e-3,
           1.25075e-3, 1.03426253e-6],
    "a2": [1e-4, 1e-4, 1e-4, 1.08e-3, 1.08e-3, 4.99657452e-3, 4.99657452e-3, 4.99506781e-3, 3.75025e-3, 2.5005e-3,
           1.25075e-3, 1.13704917e-6],
    "a3": [1e-4, 1e-4, 1e-4, 1.68e-3, 1.68e-3, 7.95075952e-3, 7.95075952e-3, 7.92915786e-3, 6.03641114e-3, 4.0005e-3,
           2.07372618e-3, 2.97351182e-6],
}  # fmt: skip
DECAY = {"a1": 0.01, "a2": 0.02, "a3": 0.02}
SMOOTHING = {"a1": 0.1, "a2": 0.0, "a3": 0.0}
OPERATIONS = [
    *("AutoContrast", "Equalize", "Invert", "Rotate", "PosterizeIncreasing", "SolarizeIncreasing", "SolarizeAdd"),
    *("ColorIncreasing", "ContrastIncreasing", "BrightnessIncreasing", "SharpnessIncreasing", "ShearX", "ShearY"),
    *("TranslateXRel", "TranslateYRel"),
]


def rsb(name: str):
    return recipe(f"imagenet/resnet50_{name}")


@pytest.mark.parametrize("name", NAMES)
def test_learning_rates(name):
    cfg = rsb(name)
    at = positions(cfg)
    assert num_steps(cfg) == 625
    assert learning_rates(cfg, at) == pytest.approx(RATES[name], rel=1e-8)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=cfg.OPTIM.BASE_LR)
    theirs = CosineLRScheduler(optimizer, cfg.OPTIM.MAX_EPOCH, 1e-6, warmup_t=5, warmup_lr_init=1e-4)
    assert learning_rates(cfg, at) == pytest.approx([theirs._get_lr(epoch)[0] for epoch, _ in at], rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_and_weight_decay_by_name(name):
    cfg, model = rsb(name), meta_model(rsb(name))
    defaults = optimizer_defaults(cfg)
    assert (defaults["betas"], defaults["eps"], defaults["max_grad_norm"]) == ((0.9, 0.999), 1e-6, 1.0)
    assert not (defaults["always_adapt"] or defaults["trust_clip"] or defaults["decoupled_decay"])
    assert cfg.OPTIM.CLIP_NORM == 0  # LAMB clips by itself
    decayed = {id(parameter) for parameter in param_groups_weight_decay(model, 1.0)[1]["params"]}
    theirs = {key: DECAY[name] if id(parameter) in decayed else 0.0 for key, parameter in model.named_parameters()}
    options = parameter_options(cfg)
    assert {key: each.weight_decay for key, each in options.items()} == theirs
    assert {each.lr_scale for each in options.values()} == {1.0}
    for key in ("conv1.weight", "layer1.0.downsample.0.weight", "layer4.2.conv3.weight", "fc.weight"):
        assert theirs[key] == DECAY[name]
    for key in ("bn1.weight", "bn1.bias", "layer1.0.downsample.1.weight", "layer4.2.bn3.bias", "fc.bias"):
        assert theirs[key] == 0


@pytest.mark.parametrize("name", NAMES)
def test_drop_path_rises_linearly_over_the_blocks(name):
    rate = 0.0 if name == "a3" else 0.05
    assert drop_path_rates(rsb(name)) == pytest.approx([rate * block / 15 for block in range(16)], abs=1e-9)


def test_initial_weights():
    model = initial_model(rsb("a2"))
    expected = {
        "conv1.weight": (2 / (64 * 49)) ** 0.5, "layer1.0.conv2.weight": (2 / (64 * 9)) ** 0.5,
        "layer2.0.downsample.0.weight": (2 / 512) ** 0.5, "layer4.2.conv3.weight": (2 / 2048) ** 0.5,
        "fc.weight": (1 / (3 * 2048)) ** 0.5,
    }  # fmt: skip
    assert init_std(model, expected) == pytest.approx(expected, rel=0.03)
    gammas = norm_gammas(model)
    assert len(gammas) == 53
    assert {name for name, gamma in gammas.items() if gamma == 0} == {name for name in gammas if name.endswith("bn3")}
    assert set(gammas.values()) == {0.0, 1.0}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lam", [0.5, 0.81, 0.79, 0.778, 0.777, 0.3, 0.21, 0.19, 0.03, 1.0])
def test_the_loss_of_a_mixture_is_that_of_timm(name, lam):
    cfg = rsb(name)
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randperm(1000, generator=generator)[:16].view(2, 8)
    logits = torch.randn(16, 1000, generator=generator)
    theirs = BinaryCrossEntropy(target_threshold=0.2)  # as train.py makes it with mixing: the mixer smooths
    targets = mixup_target(torch.cat([first, second.flip(0)]), 1000, lam, SMOOTHING[name])
    mine = mixed_targets(first, second, lam, 1000)
    assert float(build_loss(cfg)(logits, mine)) == pytest.approx(float(theirs(logits, targets)), abs=1e-6)
    if name == "a2":
        present = (mine > 0.2).sum(1)
        assert bool((present == (2 if 0.2 < lam < 0.8 else 1)).all())


@pytest.mark.parametrize("name", NAMES)
def test_mixing(name):
    aug = rsb(name).AUG
    assert (aug.MIXUP, aug.CUTMIX, aug.MIX_PROB, aug.CUTMIX_SHARE) == (0.2 if name == "a1" else 0.1, 1.0, 1.0, 0.5)
    assert aug.MIX_GROUP == 512  # --mixup-mode batch: one draw per GPU; 2048 images on four GPUs


@pytest.mark.parametrize("name", NAMES)
def test_training_images(name):
    cfg, magnitude = rsb(name), 6 if name == "a3" else 7
    size = 160 if name == "a3" else 224
    theirs = create_transform(
        size, is_training=True, auto_augment=f"rand-m{magnitude}-mstd0.5-inc1", interpolation="random"
    )
    crop, flip, policy = theirs.transforms[:3]
    mine = train_crop(cfg)
    assert (mine.size, mine.scale, mine.ratio, mine.flip) == (crop.size[0], crop.scale, crop.ratio, flip.p)
    assert mine.interpolation == "random" and {each.value for each in crop.interpolation} == {"bilinear", "bicubic"}
    assert [(op.name, op.prob, op.magnitude, op.magnitude_std) for op in policy.ops] == policy_operations(cfg)
    assert policy_operations(cfg) == [(op, 0.5, magnitude, 0.5) for op in OPERATIONS]
    transform = train_transform(cfg)
    own = transform.policy.operation
    assert own.num_layers == policy.num_layers == 2 and own.choice_weights is None
    assert [op.kwargs for op in own.ops] == [op.kwargs for op in policy.ops]
    assert own.ops[3].kwargs == {
        "fillcolor": (124, 116, 104),
        "resample": (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC),
    }
    assert (transform.jitter, transform.operations, transform.erase) == (None, (), None)
    assert cfg.DATA.REPEATS == (1 if name == "a3" else 3)


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_and_reported_weights(name):
    cfg = rsb(name)
    resize, crop = create_transform(224, crop_pct=0.95, interpolation="bicubic").transforms[:2]
    assert (
        evaluation(cfg)
        == (235, 224, "bicubic", False)
        == (resize.size, crop.size[0], resize.interpolation.value, False)
    )
    assert reported_weights(cfg) == "raw" and ema_decays(cfg, [0]) is None


def test_the_model_is_that_of_timm():
    theirs = timm.create_model("resnet50")
    assert {name: value.shape for name, value in theirs.state_dict().items()} == {
        name: value.shape for name, value in meta_model(rsb("a1")).state_dict().items()
    }
