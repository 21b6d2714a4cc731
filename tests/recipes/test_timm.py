"""ResNet strikes back, DeiT and DeiT-III: the losses, the policies and the models next to the objects of timm."""

import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from support.recipe_facts import rand_augment
from support.recipe_measures import initial_model, meta_model, mixed_targets, recipe, train_transform
from timm.data import create_transform
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy

from distribuuuu.tasks.losses import build_loss

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
    ("resnet50_a1", 7, "random", (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)),
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
