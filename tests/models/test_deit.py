"""DeiT and DeiT-III: timm's layers with the initial class token and the drop path of the authors."""

import pytest
import timm
import torch

from distribuuuu.config.registry import MODELS


@pytest.mark.parametrize("name", ["deit_tiny", "deit_small", "deit3_small"])
def test_with_the_same_weights_the_outputs_are_those_of_timm(name):
    mine = MODELS.get(name)(num_classes=5, im_size=32).eval()
    theirs = timm.create_model(f"{name}_patch16_224", num_classes=5, img_size=32).eval()
    theirs.load_state_dict(mine.state_dict())
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(mine(images), theirs(images))
