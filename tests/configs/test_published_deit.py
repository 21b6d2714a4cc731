"""DeiT and DeiT-III against the code of their authors: the semantics of the configs, not only their values.

Sources: facebookresearch/deit, commit 7e160fe4: main.py, engine.py, models_v2.py, augment.py, samplers.py, and the
commands of README_deit.md and README_revenge.md; timm 0.3.2, commit 6504a428, on which they are based:
scheduler/cosine_lr.py, models/vision_transformer.py, data/random_erasing.py, data/mixup.py, optim/optim_factory.py.
timm of today is called where it computes the same.
"""

import math

import pytest
import torch
import torch.nn.functional as F
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
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from timm.data.mixup import mixup_target
from timm.data.random_erasing import RandomErasing
from timm.loss import SoftTargetCrossEntropy
from timm.scheduler import CosineLRScheduler
from torchvision.transforms import InterpolationMode

from distribuuuu.data.augment import ERASED_AREA, ERASED_RATIO
from distribuuuu.data.datasets.base import get_dataset
from distribuuuu.data.normalize import statistics_of
from distribuuuu.tasks.losses import build_loss

DEIT = ("deit_tiny", "deit_small", "deit_base")
NAMES = (*DEIT, "deit3_small")
# Width and heads of the 12 blocks; images per GPU of the published commands.
WIDTHS = {"deit_tiny": (192, 3), "deit_small": (384, 6), "deit_base": (768, 12), "deit3_small": (384, 6)}
IMAGES_PER_GPU = {"deit_tiny": 256, "deit_small": 256, "deit_base": 64, "deit3_small": 256}
# Computed by timm/scheduler/cosine_lr.py of 0.3.2, called as in main.py: step(epoch) after the epoch, --warmup-lr 1e-6,
# --min-lr 1e-5. The published rate is 5e-4 x 1024 / 512 for DeiT, and 4e-3, not scaled, for DeiT-III.
RATES_DEIT = [1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 8.002e-4, 8.002e-4, 9.9932162e-4, 7.56975501e-4, 5.10183533e-4,
              2.62002642e-4, 1.01085617e-5]  # fmt: skip
RATES_DEIT3 = [1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 3.2002e-3, 3.2002e-3, 3.99961544e-3, 3.01378646e-3, 2.01283433e-3,
               1.01655996e-3, 1.00615305e-5]  # fmt: skip
RATES = {**dict.fromkeys(DEIT, RATES_DEIT), "deit3_small": RATES_DEIT3}


def deit(name: str):
    return recipe(f"imagenet/{name}")


@pytest.mark.parametrize("name", NAMES)
def test_learning_rates(name):
    cfg = deit(name)
    at = positions(cfg)
    assert num_steps(cfg) == (625 if name == "deit3_small" else 1251)
    assert learning_rates(cfg, at) == pytest.approx(RATES[name], rel=1e-8)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=4e-3 if name == "deit3_small" else 1e-3)
    theirs = CosineLRScheduler(optimizer, cfg.OPTIM.MAX_EPOCH, 1e-5, warmup_t=5, warmup_lr_init=1e-6)
    lagged = [theirs._get_lr(max(0, epoch - 1))[0] for epoch, _ in at]
    assert learning_rates(cfg, at) == pytest.approx(lagged, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_and_weight_decay_by_name(name):
    cfg = deit(name)
    defaults = optimizer_defaults(cfg)
    assert (defaults["betas"], defaults["eps"]) == ((0.9, 0.999), 1e-8)
    if name == "deit3_small":  # apex's FusedLAMB: clips at 1, and adapts only what decays
        assert defaults["max_grad_norm"] == 1.0 and not (defaults["always_adapt"] or defaults["trust_clip"])
    assert cfg.OPTIM.CLIP_NORM == 0
    skipped = ("pos_embed", "cls_token")
    expected = {
        key: 0.0 if parameter.ndim == 1 or key.endswith(".bias") or key in skipped else 0.05
        for key, parameter in meta_model(cfg).named_parameters()
    }
    options = parameter_options(cfg)
    assert {key: each.weight_decay for key, each in options.items()} == expected
    assert {each.lr_scale for each in options.values()} == {1.0}
    assert [expected[key] for key in ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "head.weight")] == [
        0.05
    ] * 3
    assert sum(decay == 0 for decay in expected.values()) == 12 * 8 + 6 + (24 if name == "deit3_small" else 0)


def test_drop_path():
    for name in DEIT:
        assert drop_path_rates(deit(name)) == pytest.approx([0.1 * block / 11 for block in range(12)], abs=1e-7)
    assert drop_path_rates(deit("deit3_small")) == [0.05] * 12


@pytest.mark.parametrize("name", ["deit_tiny", "deit_small", "deit3_small"])
def test_initial_weights(name):
    width, _ = WIDTHS[name]
    model = initial_model(deit(name))
    expected = {
        "cls_token": 0.02, "pos_embed": 0.02, "blocks.0.attn.qkv.weight": 0.02, "blocks.11.mlp.fc2.weight": 0.02,
        "head.weight": 0.02, "patch_embed.proj.weight": (1 / (3 * 768)) ** 0.5,
    }  # fmt: skip
    found = init_std(model, expected)
    assert found == pytest.approx(expected, rel=0.15 if width == 192 else 0.1)  # the class token has few numbers
    assert {**found, "cls_token": 0.02} == pytest.approx(expected, rel=0.02)
    assert set(norm_gammas(model).values()) == {1.0}
    biases = [key for key, _ in model.named_parameters() if key.endswith(".bias") and "patch_embed" not in key]
    assert set(init_std(model, biases).values()) == {0.0} and all(model.get_parameter(key)[0] == 0 for key in biases)
    gammas = {float(value.detach()) for key, values in model.named_parameters() if "gamma" in key for value in values}
    assert gammas == ({float(torch.tensor(1e-4))} if name == "deit3_small" else set())


@pytest.mark.parametrize("name", NAMES)
def test_the_model(name):
    model, (width, heads) = meta_model(deit(name)), WIDTHS[name]
    assert (len(model.blocks), model.embed_dim, model.blocks[0].attn.num_heads) == (12, width, heads)
    assert model.pos_embed.shape == (
        1,
        196 if name == "deit3_small" else 197,
        width,
    )  # DeiT-III: none for the class token
    assert {layer.eps for layer in model.modules() if isinstance(layer, torch.nn.LayerNorm)} == {1e-6}
    assert [key for key, _ in model.named_parameters() if "gamma" in key] == [
        f"blocks.{block}.{scale}.gamma"
        for block in range(12 if name == "deit3_small" else 0)
        for scale in ("ls1", "ls2")
    ]


LAMS = (0.5, 0.93, 0.999, 0.07, 1.0)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits (16, 1000), and the labels of both halves of a batch that is mixed with its reverse."""
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randperm(1000, generator=generator)[:16].view(2, 8)
    return torch.randn(16, 1000, generator=generator), first, second


@pytest.mark.parametrize("lam", LAMS)
def test_the_loss_of_deit_is_that_of_timm(lam):
    logits, first, second = batch()
    theirs = SoftTargetCrossEntropy()(logits, mixup_target(torch.cat([first, second.flip(0)]), 1000, lam, 0.1))
    for name in DEIT:
        mine = build_loss(deit(name))(logits, mixed_targets(first, second, lam, 1000))
        assert float(mine) == pytest.approx(float(theirs), abs=1e-6)


@pytest.mark.parametrize("lam", LAMS)
def test_the_loss_of_deit3_takes_all_mixed_classes_as_present(lam):
    logits, first, second = batch()
    targets = mixup_target(torch.cat([first, second.flip(0)]), 1000, lam, 0.0)
    targets = targets.gt(0.0).type(targets.dtype)  # engine.py, --bce-loss
    theirs = torch.nn.BCEWithLogitsLoss()(logits, targets)
    mine = build_loss(deit("deit3_small"))(logits, mixed_targets(first, second, lam, 1000))
    assert float(mine) == pytest.approx(float(theirs), abs=1e-6)
    present = logits.gather(1, torch.stack([torch.cat([first, second.flip(0)]), torch.cat([second, first.flip(0)])], 1))
    if lam < 1:  # the formula: softplus of all logits, minus those of both classes
        assert float(mine) == pytest.approx(
            float((F.softplus(logits).sum() - present.sum()) / logits.numel()), abs=1e-6
        )


@pytest.mark.parametrize("name", NAMES)
def test_mixing(name):
    aug = deit(name).AUG
    assert (aug.MIXUP, aug.CUTMIX, aug.MIX_PROB, aug.CUTMIX_SHARE) == (0.8, 1.0, 1.0, 0.5)
    assert aug.MIX_GROUP == IMAGES_PER_GPU[name]  # --mixup-mode batch: one draw per GPU
    assert deit(name).DATA.REPEATS == 3


@pytest.mark.parametrize("name", DEIT)
def test_training_images_of_deit(name):
    cfg = deit(name)
    theirs = create_transform(224, is_training=True, color_jitter=0.3, auto_augment="rand-m9-mstd0.5-inc1",
                              interpolation="bicubic", re_prob=0.25, re_mode="pixel", re_count=1)  # fmt: skip
    crop, flip, policy, *_, erasing = theirs.transforms
    mine, transform = train_crop(cfg), train_transform(cfg)
    assert (mine.size, mine.scale, mine.ratio, mine.flip) == (crop.size[0], crop.scale, crop.ratio, flip.p)
    assert mine.interpolation == crop.interpolation.value == "bicubic"
    assert [(op.name, op.prob, op.magnitude, op.magnitude_std) for op in policy.ops] == policy_operations(cfg)
    assert {op[1:] for op in policy_operations(cfg)} == {(0.5, 9, 0.5)} and len(policy_operations(cfg)) == 15
    own = transform.policy.operation
    assert own.num_layers == policy.num_layers == 2
    assert [op.kwargs for op in own.ops] == [op.kwargs for op in policy.ops]
    assert own.ops[3].kwargs == {"fillcolor": (124, 116, 104), "resample": Image.Resampling.BICUBIC}
    assert transform.jitter is None and transform.operations == ()  # with --aa timm makes no color jitter
    assert isinstance(erasing, RandomErasing) and erasing.per_pixel and erasing.max_count == 1
    assert transform.erase.probability == erasing.probability == 0.25
    assert (erasing.min_area, erasing.max_area) == ERASED_AREA
    assert tuple(map(math.exp, erasing.log_aspect_ratio)) == pytest.approx(ERASED_RATIO["pixel"])
    assert (transform.erase.mean, transform.erase.std) == (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)


def test_training_images_of_deit3():
    cfg = deit("deit3_small")
    mine, transform = train_crop(cfg), train_transform(cfg)
    assert (mine.size, mine.scale, mine.interpolation, mine.flip) == (224, (0.08, 1.0), "bicubic", 0.5)
    assert policy_operations(cfg) == [
        ("Solarize", 1.0, 5, 0.0),
        ("Desaturate", 1.0, 10, 0.0),
        ("GaussianBlurRand", 1.0, 10, 0.0),
    ]
    # One of three, equally likely; a threshold of 128, no color at all, a radius of 0.1 to 2 x 1.
    choices = transform.policy.operation.policy
    assert [len(choice) for choice in choices] == [1, 1, 1]
    assert [choice[0].level_fn(choice[0].magnitude, {})[0] for choice in choices] == [128, 1.0, 1.0]
    jitter = transform.jitter
    assert [jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue] == [(0.7, 1.3)] * 3 + [None]
    assert transform.operations == () and transform.erase is None  # --reprob 0.0


@pytest.mark.parametrize("name", NAMES)
def test_normalization_evaluation_and_reported_weights(name):
    cfg = deit(name)
    images = get_dataset(cfg.DATA.NAME)
    assert statistics_of(cfg, images) == (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    resize = int(224 / (1.0 if name == "deit3_small" else 0.875))  # datasets.py, --eval-crop-ratio
    assert evaluation(cfg) == (resize, 224, InterpolationMode.BICUBIC.value, False)
    # main.py evaluates `model` only; its average, with a decay of 0.99996, is saved beside it.
    assert reported_weights(cfg) == "raw" and ema_decays(cfg, [0]) is None
