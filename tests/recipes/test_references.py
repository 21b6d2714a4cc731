"""Recipes next to the objects of their sources; support/recipe_facts.py names these with their commits."""

import copy
import functools
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from support.processes import on_processes
from support.recipe_facts import rand_augment
from support.recipe_measures import initial_model, meta_model, mixed_targets, recipe, train_transform
from support.runs import GROUP_NORM, assert_close, newest, train_and_read
from support.tables import slow
from timm.data import create_transform
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import nn
from torchvision.transforms import v2

from distribuuuu.config import ConfigError
from distribuuuu.data.batch_plan import BatchPlan, plan_batches
from distribuuuu.data.datasets.dummy import Dummy
from distribuuuu.data.mixup import build_mixer
from distribuuuu.models import build_model, count_parameters
from distribuuuu.optim.optimizer import build_optimizer
from distribuuuu.optim.precision import Precision
from distribuuuu.optim.schedules import build_lr, set_lr
from distribuuuu.tasks.base import build_task
from distribuuuu.tasks.losses import build_loss
from distribuuuu.trainer import train_model

V1, V2 = "imagenet/resnet50_torchvision_v1", "imagenet/resnet50_torchvision_v2"


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_targets_and_loss_of_a_mixed_pair_are_torchvisions(kind):
    """Two images, of which each is the other's partner in torchvision's roll too."""
    off = "AUG.CUTMIX" if kind == "mixup" else "AUG.MIXUP"
    cfg = recipe(V2, off, 0, "TRAIN.GLOBAL_BATCH_SIZE", 2, "TRAIN.BATCH_SIZE", 2)
    mixer, criterion = build_mixer(cfg, plan_batches(2, 2, 1), rank=0), build_loss(cfg)
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        images, labels = torch.randn(2, 3, 10, 12, generator=generator), torch.tensor([3, 14])
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


# Recipe -> label smoothing, which timm applies when it mixes, and timm's loss.
BCE = BinaryCrossEntropy(target_threshold=0.2)  # as train.py makes it with mixing
LOSSES = {
    "resnet50_a1": (0.1, BCE), "resnet50_a2": (0.0, BCE), "resnet50_a3": (0.0, BCE),
    **dict.fromkeys(("deit_tiny", "deit_small", "deit_base"), (0.1, SoftTargetCrossEntropy())),
    # engine.py, --bce-loss: all classes of a mixture are present.
    "deit3_small": (0.0, lambda logits, targets: F.binary_cross_entropy_with_logits(logits, targets.gt(0.0).float())),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_a_mixture_is_that_of_timm(name):
    generator, (smoothing, loss) = torch.Generator().manual_seed(1), LOSSES[name]
    first, second = torch.randperm(1000, generator=generator)[:16].view(2, 8)
    logits, mine = torch.randn(16, 1000, generator=generator), build_loss(recipe(f"imagenet/{name}"))
    for lam in (0.5, 0.81, 0.79, 0.778, 0.777, 0.3, 0.21, 0.19, 0.03, 0.999, 1.0):
        theirs = loss(logits, mixup_target(torch.cat([first, second.flip(0)]), 1000, lam, smoothing))
        found = mine(logits, mixed_targets(first, second, lam, 1000))
        assert float(found) == pytest.approx(float(theirs), abs=1e-6), lam


@pytest.mark.parametrize("name, magnitude, interpolation, resample", [
    ("resnet50_a3", 6, "random", (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)),
    ("deit_tiny", 9, "bicubic", Image.Resampling.BICUBIC),
])  # fmt: skip
def test_the_policy_is_that_of_timm(name, magnitude, interpolation, resample):
    text = f"rand-m{magnitude}-mstd0.5-inc1"
    theirs = create_transform(224, is_training=True, color_jitter=0.3, auto_augment=text, interpolation=interpolation)
    policy, transform = theirs.transforms[2], train_transform(recipe(f"imagenet/{name}"))
    own = transform.policy
    assert [(op.name, op.prob, op.magnitude, op.magnitude_std) for op in policy.ops] == rand_augment(magnitude)
    assert own.num_layers == policy.num_layers == 2 and own.choice_weights is None
    assert [op.kwargs for op in own.ops] == [op.kwargs for op in policy.ops]
    assert own.ops[3].kwargs == {"fillcolor": (124, 116, 104), "resample": resample}
    assert transform.jitter is None and transform.operations == ()  # with --aa timm makes no color jitter


@pytest.mark.slow
def test_the_model_of_a_recipe_is_timms():
    theirs, model = timm.create_model("resnet50"), meta_model(recipe("imagenet/resnet50_a1"))
    shapes = [{name: value.shape for name, value in each.state_dict().items()} for each in (theirs, model)]
    assert shapes[0] == shapes[1]
    parameters = initial_model(recipe("imagenet/resnet50_a2")).named_parameters()
    gammas = {name: set(value.tolist()) for name, value in parameters if "bn" in name and name.endswith("weight")}
    assert len(gammas) == 49 and gammas == {name: {float("bn3" not in name)} for name in gammas}
    parameters = initial_model(recipe("imagenet/deit3_small")).named_parameters()
    scales = [value for name, value in parameters if "gamma" in name]
    assert len(scales) == 24 and all((scale == torch.tensor(1e-4)).all() for scale in scales)


# Convolutions with a stride above 1 and at least 16 input channels, and their input channels.
BLURRED = {
    "resnet18": {
        "layer2.0.conv1": 64, "layer2.0.downsample.0": 64, "layer3.0.conv1": 128, "layer3.0.downsample.0": 128,
        "layer4.0.conv1": 256, "layer4.0.downsample.0": 256,
    },
    "resnet50": {
        "layer2.0.conv2": 128, "layer2.0.downsample.0": 256, "layer3.0.conv2": 256, "layer3.0.downsample.0": 512,
        "layer4.0.conv2": 512, "layer4.0.downsample.0": 1024,
    },
}  # fmt: skip


def blur(_, inputs):
    """Blur the input of a layer line by line: a forward pre-hook."""
    (x,) = inputs
    for dim in (2, 3):
        padded = F.pad(x, (0, 0, 1, 1) if dim == 2 else (1, 1))
        left, middle, right = (padded.narrow(dim, first, x.shape[dim]) for first in range(3))
        x = (left + 2 * middle + right) / 4
    return (x,)


@pytest.mark.parametrize("family", [slow("resnet18"), slow("resnet50")])
def test_the_strided_convolutions_are_blurred_and_nothing_else_differs_from_torchvision(family):
    model = copy.deepcopy(initial_model(recipe(f"imagenet/{family}_ffcv_16"))).double().eval()
    blurs = {path: layer for path, layer in model.named_modules() if type(layer).__name__ == "BlurredConv"}
    assert {path: layer.conv.in_channels for path, layer in blurs.items()} == BLURRED[family]
    assert all(max(layer.conv.stride) == 2 for layer in blurs.values()) and isinstance(model.maxpool, nn.MaxPool2d)
    plain = getattr(torchvision.models, family)().double().eval()
    weights = {key.replace(".conv.", "."): value for key, value in model.state_dict().items() if "blur" not in key}
    plain.load_state_dict(weights)
    for path in BLURRED[family]:
        plain.get_submodule(path).register_forward_pre_hook(blur)
    images = torch.randn(2, 3, 70, 61, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        assert torch.allclose(model(images), plain(images), rtol=1e-9, atol=1e-9)


PLAIN_VIT = "imagenet/plain_vit_small"
WIDTH, HIDDEN = 384, 1536


@pytest.mark.slow
def test_the_initial_weights_are_those_of_vit_py():
    glorot, mlp = math.sqrt(2 / (2 * WIDTH)), math.sqrt(2 / (WIDTH + HIDDEN))
    parameters = dict(initial_model(recipe(PLAIN_VIT)).named_parameters())
    for key, std in {
        "patch_embed.proj.weight": math.sqrt(1 / (3 * 16 * 16)), "patch_embed.proj.bias": 0,  # lecun_normal
        "blocks.0.attn.qkv.weight": glorot, "blocks.5.attn.proj.weight": glorot,  # three kernels
        "blocks.11.attn.qkv.bias": 0, "blocks.3.mlp.fc1.weight": mlp, "blocks.3.mlp.fc2.weight": mlp,
        "blocks.3.mlp.fc1.bias": 1e-6, "blocks.3.mlp.fc2.bias": 1e-6, "head.pre_logits.weight": math.sqrt(1 / WIDTH),
        "head.pre_logits.bias": 0, "head.fc.weight": 0, "head.fc.bias": 0,
    }.items():  # fmt: skip
        found = parameters[key].detach()
        assert float(found.std(correction=0)) == pytest.approx(std, rel=4 / math.sqrt(found.numel())), key


def test_activations_positions_and_the_head_are_those_of_vit_py():
    model = initial_model(recipe(PLAIN_VIT))
    x = torch.linspace(-4, 4, 101)
    gelu = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    torch.testing.assert_close(model.blocks[7].mlp.act(x), gelu, rtol=1e-5, atol=1e-6)
    # posemb_sincos_2d: column 3 of row 2, by frequency 10,000 ** -(k / 95) for k in 0 to 95.
    angles = [[axis * 10_000 ** -(k / 95) for k in range(96)] for axis in (3, 2)]
    expected = [wave(angle) for axis in angles for wave in (math.sin, math.cos) for angle in axis]
    np.testing.assert_allclose(model.pos_embed[0, 2 * 14 + 3].detach(), expected, atol=1e-5)
    assert not model.pos_embed.requires_grad
    head, tokens = model.head, torch.randn(2, 196, WIDTH, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(1000, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        head.fc.weight.copy_(weight)
        hidden = torch.tanh(tokens.mean(1) @ head.pre_logits.weight.T)  # rep_size True: a hidden layer, then tanh
        torch.testing.assert_close(model.forward_head(tokens), hidden @ weight.T, rtol=1e-4, atol=1e-4)
        head.fc.weight.zero_()
    assert isinstance(model.norm, nn.LayerNorm) and isinstance(model.fc_norm, nn.Identity)


AIRBENCH = "cifar10/airbench94"
NUM_STEPS, TOTAL = 48, 476  # 50,000 images in steps of 1,024; 9.9 epochs, rounded up


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build_model(recipe(AIRBENCH))


def test_the_network_has_the_published_shape_and_initial_weights(model):
    assert count_parameters(model) == 1_972_792
    first, second = model.groups[0].conv1.weight, model.groups[1].conv2.weight
    assert [tuple(group.conv1.weight.shape[:2]) for group in model.groups] == [(64, 24), (256, 64), (256, 256)]
    images = torch.randn(2, 24, 9, 9)
    torch.testing.assert_close(F.conv2d(images, first[:24], padding=1), images)
    assert float(first[24:].detach().std()) == pytest.approx(math.sqrt(1 / (3 * 24 * 9)), rel=0.05)
    torch.testing.assert_close(F.conv2d(torch.ones(1, 256, 4, 4), second, padding=1), torch.ones(1, 256, 4, 4))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    norms = {f"groups.{group}.norm{norm}.bias" for group in range(3) for norm in (1, 2)}
    convs = {f"groups.{group}.conv{conv}.weight" for group in range(3) for conv in (1, 2)}
    assert trained == {"whiten.bias", "head.weight", *norms, *convs}
    norm = model.groups[0].norm1
    assert (norm.eps, norm.momentum) == (1e-12, pytest.approx(0.4)) and bool((norm.weight == 1).all())


def test_the_outputs_of_the_whitening_layer_are_uncorrelated(model):
    noise = torch.randn(600, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    images = F.avg_pool2d(noise, 3, 1)  # neighbors are correlated
    filters = sys.modules[type(model).__module__].whitening_filters(images, 2, eps=0.0)
    outputs = F.conv2d(images, filters).transpose(0, 1).flatten(1).double()
    torch.testing.assert_close(outputs @ outputs.T / outputs.shape[1], torch.eye(12).double(), atol=1e-4, rtol=0)
    model.initialize_from(images)
    weights = model.whiten.weight.detach()
    assert torch.equal(weights[:12], -weights[12:]) and not weights.requires_grad
    lengths = filters.flatten(1).norm(dim=1)
    assert bool((lengths[:-1] <= lengths[1:] * 1.0001).all())  # the largest eigenvalue first


def test_the_rate_and_the_decay_of_each_step(model):
    cfg = recipe(AIRBENCH)
    lr_at, optimizer = build_lr(cfg, 1024), build_optimizer(cfg, model)
    for step in range(TOTAL):
        factor = 0.2 + 0.8 * step / 109 if step < 109 else 1 - 0.93 * (step - 109) / (TOTAL - 109)
        assert lr_at(step / NUM_STEPS) == pytest.approx(1.5 * factor, rel=2e-4), step
    set_lr(optimizer, 1.5)
    decay = 0.0153 / (1 + 1 / (1 - 0.85))  # of a step at the highest rate
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        of_norms = {"norm" in names[id(parameter)] for parameter in group["params"]}
        assert len(of_norms) == 1 and group["lr"] == 1.5 * (64 if of_norms == {True} else 1)
        assert group["lr"] * group["weight_decay"] == pytest.approx(decay, rel=1e-6)
        assert (group["momentum"], group["nesterov"]) == (0.85, True)


def test_lookahead_replaces_the_weights_by_an_average_with_a_growing_decay(model):
    task = build_task(recipe(AIRBENCH), [str(number) for number in range(10)], torch.device("cpu"), Precision())
    task.state = SimpleNamespace(model=model, models={"raw": model}, epoch=0, step=0)
    task.prepare_training(BatchPlan(1024, 1, 1), Dummy(32, 10, 20), NUM_STEPS)
    weight, norm = model.head.weight, model.groups[0].norm1
    slow, stepped = weight.detach().clone(), []

    @torch.no_grad()
    def take_step():
        for value in (weight, norm.running_mean):
            value.add_(torch.randn_like(value))
        stepped[:] = [weight.clone()]

    for number in range(1, TOTAL + 1):
        task.update(SimpleNamespace(gradients=lambda: None, apply=take_step))
        is_due = number % 5 == 0
        if is_due:
            slow = slow.lerp(stepped[0], 1 - 0.95**5 * (number / TOTAL) ** 3)
        torch.testing.assert_close(weight.detach(), slow if is_due or number == TOTAL else stepped[0])
        task.state.epoch, task.state.step = divmod(number, NUM_STEPS)
    assert torch.equal(norm.running_mean, task.slow["groups.0.norm1.running_mean"])


def test_muon_trains_the_filters_at_the_published_rates():
    cfg = recipe("cifar10/airbench94_muon")
    model = build_model(cfg)
    assert count_parameters(model) == 1_972_792 and model.scale == 1 / 256 and model.whiten.bias.abs().max() > 0.1
    assert float(model.head.weight.std()) == pytest.approx(1)
    optimizer, lr_at = build_optimizer(cfg, model), build_lr(cfg, 2000)
    for step in range(200):
        set_lr(optimizer, lr_at(step / 25), functools.partial(lr_at, step / 25))
        left, of_bias = 1 - step / 200, max(0, 1 - step / 75)
        rates = [0.24 * left, 106 * of_bias, 106 * left, 1340 * left]
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(rates)
    penalties = [2000 * group["weight_decay"] for group in optimizer.param_groups]  # of the sum of the losses
    assert penalties == pytest.approx([0, 0.004 / 0.053, 0.004 / 0.053, 0.004 / 0.67])
    set_lr(optimizer, 0.24, lambda schedule: 0.24)
    filters, head = model.groups[1].conv2.weight, model.head.weight
    before, old_head = filters.detach().clone(), head.detach().clone()
    for weight in (filters, head):
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    update = (16 * before / before.norm() - filters.detach()).flatten(1) / 0.24  # the root of 256 rows
    values = torch.linalg.svdvals(update)
    assert 0.3 < values.min() and values.max() < 1.4
    penalty = 0.004 / 1340 * old_head
    torch.testing.assert_close(head.detach(), old_head - 1340 * 1.85 * (head.grad + penalty), rtol=1e-4, atol=1e-2)


SMALL = ("MODEL.ARCH", "airbench94", "MODEL.KWARGS.width", 24, "TASK.NAME", "airbench", "TASK.KWARGS.frozen_from", 1)


@pytest.mark.slow
def test_the_first_layer_is_whitened_and_its_bias_frozen(small_cfg, tmp_path):
    words = (*SMALL, "TASK.KWARGS.steps", 1, "TASK.KWARGS.decay", 0, "TRAIN.GLOBAL_BATCH_SIZE", 12)
    for name, epochs in (("one", 1), ("two", 2)):
        on_processes(2, train_and_read, small_cfg(*words, "OPTIM.MAX_EPOCH", epochs, "OUT_DIR", tmp_path / name))
    one, two = (newest(tmp_path / name)["state_dict"] for name in ("one", "two"))
    assert torch.equal(one["whiten.bias"], two["whiten.bias"]) and bool(one["whiten.bias"].abs().min() > 0)
    assert torch.equal(one["whiten.weight"][:12], -one["whiten.weight"][12:])
    assert not torch.equal(one["head.weight"], two["head.weight"])


@pytest.mark.slow
def test_lookahead_does_not_depend_on_the_number_of_processes(small_cfg, tmp_path):
    words = ("TASK.NAME", "lookahead", "TASK.KWARGS.steps", 3, "OPTIM.BASE_LR", 0.01, *GROUP_NORM)
    words += ("TRAIN.GLOBAL_BATCH_SIZE", 12)
    alone = train_and_read(small_cfg(*words, "OUT_DIR", tmp_path / "alone"))
    assert_close(on_processes(2, train_and_read, small_cfg(*words))[0], alone, 1e-5)


@pytest.mark.parametrize("words, message", [
    ((*SMALL, "MODEL.ARCH", "resnet8", "MODEL.KWARGS", "{}"), "got resnet8; expected a model with"),
    ((*SMALL, "DIST.SHARD", "fsdp"), "got fsdp; TASK.NAME airbench expects whole weights"),
])  # fmt: skip
def test_what_the_task_cannot_train_is_refused(small_cfg, words, message):
    with pytest.raises(ConfigError, match=message):
        train_model(small_cfg(*words))
