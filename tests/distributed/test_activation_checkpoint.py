"""Recomputing activations: to the last bit what is computed without, in less memory; and which blocks are found."""

from collections import Counter

import pytest
import timm
import torch
import torchvision
from torch import nn

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.distributed.activation_checkpoint import find_blocks, recompute_blocks
from distribuuuu.models import build_model
from distribuuuu.trainer import train_model


def build_small(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "resnet8":
        return build_model(load_cfg(None, ["MODEL.ARCH", "resnet8", "MODEL.NUM_CLASSES", "5"]), False)
    drops = {"drop_path_rate": 0.5, "proj_drop_rate": 0.3} if "vit" in name else {"drop_path_rate": 0.5}
    return timm.create_model(name, num_classes=5, **drops, **({"img_size": 32} if "vit" in name else {}))


def train_steps(model: nn.Module, autocast: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Return all that a model holds after a few steps of momentum, and the loss of the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1)
    for _ in range(3):
        images, labels = torch.randn(6, 3, 32, 32), torch.randint(0, 5, (6,))
        optimizer.zero_grad()
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            logits = model(images)
        loss = nn.functional.cross_entropy(logits.float(), labels)
        loss.backward()
        optimizer.step()
    return {**model.state_dict(), "loss": loss.detach(), "next random number": torch.rand(3)}


STEPS = {"resnet8": None, "test_resnet": torch.bfloat16, "test_vit": torch.bfloat16, "test_convnext": None}


@pytest.mark.parametrize("name", STEPS)
def test_a_recomputed_step_is_the_same_to_the_last_bit(name):
    plain, recomputed = build_small(name), build_small(name)
    assert recompute_blocks(recomputed) >= 2
    assert list(recomputed.state_dict()) == list(plain.state_dict())
    results = [train_steps(model.train(), STEPS[name]) for model in (plain, recomputed)]
    assert results[0].keys() == results[1].keys()
    assert [key for key in results[0] if not torch.equal(results[0][key], results[1][key])] == []


def count_saved(model: nn.Module, images: torch.Tensor) -> int:
    """Return the numbers that a forward pass keeps for the backward pass, beside weights."""
    own, kept, alive = {tensor.data_ptr() for tensor in model.parameters()}, {}, []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.numel()
            alive.append(tensor)  # so that no other gets its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(images)
    return sum(kept.values())


def test_it_keeps_little_for_the_backward_pass():
    images = torch.randn(6, 3, 32, 32)
    plain, recomputed = build_small("test_vit"), build_small("test_vit")
    recompute_blocks(recomputed)
    assert count_saved(recomputed, images) < count_saved(plain, images) / 4


def test_the_statistics_of_a_momentum_free_batch_norm_and_of_a_frozen_one_stay_right():
    def build():
        model = build_small("resnet8").train()
        model.stage1[0].norm1.momentum = None
        model.stage2[0].norm1.eval()
        return model

    plain, recomputed = build(), build()
    recompute_blocks(recomputed)
    results = [train_steps(model, None) for model in (plain, recomputed)]
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])
    assert results[1]["stage1.0.norm1.num_batches_tracked"] == 3
    assert results[1]["stage2.0.norm1.num_batches_tracked"] == 0


def blocks_of(model: nn.Module) -> dict[str, int]:
    return Counter(type(block).__name__ for block in find_blocks(model).values())


def test_the_blocks_of_known_models():
    for builder, name, expected in [
        (torchvision.models.get_model, "resnet50", {"Bottleneck": 16}),
        (torchvision.models.get_model, "vit_b_16", {"EncoderBlock": 12}),
        (timm.create_model, "vit_large_patch16_224", {"Block": 24}),
        (timm.create_model, "convnext_tiny", {"ConvNeXtBlock": 18}),
        (timm.create_model, "swin_tiny_patch4_window7_224", {"SwinTransformerBlock": 12}),
        (timm.create_model, "regnety_160", {"Bottleneck": 18}),
        (timm.create_model, "efficientnet_b0", {"InvertedResidual": 15}),
        (torchvision.models.get_model, "vgg11", {}),
    ]:  # fmt: skip
        with torch.device("meta"):
            assert blocks_of(builder(name)) == expected


def test_a_run_with_it_is_the_run_without_it(small_cfg, tmp_path):
    from support.runs import assert_same_run

    words = ("OPTIM.MAX_EPOCH", 1, "EMA.HALF_LIFE", 50, "TRAIN.GLOBAL_BATCH_SIZE", 12, "TRAIN.BATCH_SIZE", 6)
    for name, on in (("with", True), ("without", False)):
        train_model(small_cfg(*words, "MODEL.ACT_CHECKPOINT", on, "OUT_DIR", tmp_path / name))
    assert_same_run(tmp_path / "with", tmp_path / "without")


def test_a_model_without_blocks_is_answered():
    with pytest.raises(ConfigError, match="MODEL.ACT_CHECKPOINT.*the model has no repeated blocks"):
        recompute_blocks(nn.Linear(2, 2))
