"""Recipes V1 and V2 of torchvision: what the configs do, next to torch's and torchvision's own objects.

Source: github.com/pytorch/vision, references/classification: train.py at 017e9b99b5da, transforms.py at 02a0a90b7ad1,
presets.py at 080836e5824e, sampler.py at 775e76043cb8. The command of V2 is in issue 3995, comment 1013906621; pull
request 5201 published its weights.
"""

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from support.recipe_measures import evaluation, initial_model, recipe
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchvision.transforms import functional as tv
from torchvision.transforms import v2

from distribuuuu.data.batch_plan import plan_batches
from distribuuuu.data.decode import LazyImage
from distribuuuu.data.mixup import build_mixer
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


@pytest.mark.parametrize("name", [V1, V2])
def test_evaluation_is_torchvisions(name):
    resize, crop, interpolation, _ = evaluation(recipe(name))
    rng = np.random.default_rng(0)
    for size in ((500, 375), (300, 451)):
        image = Image.fromarray(rng.integers(0, 256, (9, 8, 3), dtype=np.uint8)).resize(size)
        theirs = tv.pil_to_tensor(tv.center_crop(tv.resize(image, resize), crop))
        ours = CenterCrop(resize, crop, interpolation)(LazyImage(tv.pil_to_tensor(image)), SampleRNG(0, 0))
        assert (ours.int() - theirs.int()).abs().max() <= 1
