"""airbench94 against its published facts: network, whitening, schedule, weight decay, lookahead, freezing, views."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.processes import on_processes
from support.recipe_measures import recipe
from support.runs import GROUP_NORM, assert_close, newest, train_and_read

from distribuuuu.config import ConfigError
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.datasets.dummy import Dummy
from distribuuuu.models import build_model, count_parameters
from distribuuuu.models.airbench import whitening_filters
from distribuuuu.optim.optimizer import build_optimizer
from distribuuuu.optim.precision import Precision
from distribuuuu.optim.schedules import build_lr, set_lr
from distribuuuu.tasks.base import build_task
from distribuuuu.trainer import train_model

NAME = "cifar10/airbench94"
NUM_STEPS, TOTAL = 48, 476  # 50,000 images in steps of 1,024; 9.9 epochs, rounded up


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build_model(recipe(NAME))


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
    filters = whitening_filters(images, 2, eps=0.0)
    outputs = F.conv2d(images, filters).transpose(0, 1).flatten(1).double()
    torch.testing.assert_close(outputs @ outputs.T / outputs.shape[1], torch.eye(12).double(), atol=1e-4, rtol=0)
    model.initialize_from(images)
    weights = model.whiten.weight.detach()
    assert torch.equal(weights[:12], -weights[12:]) and not weights.requires_grad
    lengths = filters.flatten(1).norm(dim=1)
    assert bool((lengths[:-1] <= lengths[1:] * 1.0001).all())  # the largest eigenvalue first


def test_the_rate_and_the_decay_of_each_step(model):
    cfg = recipe(NAME)
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


class State:
    """The part of a training state that a task uses."""

    def __init__(self, model):
        self.model, self.models, self.epoch, self.step = model, {"raw": model}, 0, 0


def prepared(model, *words):
    """Return the task of the recipe before the first step, whose state it keeps."""
    cpu = torch.device("cpu")
    task = build_task(recipe(NAME, *words), [str(number) for number in range(10)], cpu, Precision())
    task.state = State(model)
    task.prepare_training(BatchPlan(1024, 1, 1), Dummy(32, 10, 20), NUM_STEPS)
    return task


def test_lookahead_replaces_the_weights_by_an_average_with_a_growing_decay(model):
    task, weight, norm = prepared(model), model.head.weight, model.groups[0].norm1
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
