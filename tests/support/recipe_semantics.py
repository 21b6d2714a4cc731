"""Semantics of a config: what the objects that it builds do, in numbers to compare with the source of a recipe.

All functions take a config and build what they measure, so an option that is set but not used does not pass.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from support.runs import ROOT
from torch import nn

from distribuuuu.config import Config, load_cfg
from distribuuuu.data.augment import AugmentedCrop
from distribuuuu.data.datasets.base import get_dataset
from distribuuuu.data.loader import build_transform
from distribuuuu.data.mixup import blend_pairs, soften
from distribuuuu.data.transforms import CenterCrop, Transform
from distribuuuu.models import build_model
from distribuuuu.optim.ema import build_ema
from distribuuuu.optim.optimizer import build_lr, build_optimizer, set_lr

# Training images of ImageNet.
IMAGENET = 1_281_167


def recipe(name: str, *overrides: Any) -> Config:
    """Return the config of a file, e.g. "imagenet/deit_tiny", with overrides KEY, VALUE, ..."""
    return load_cfg(str(ROOT / "configs" / f"{name}.yaml"), [str(word) for word in overrides])


# ------------------------------------------------------------------------------------------ learning rate


class Position(NamedTuple):
    """A step of a run, both numbers from 0."""

    epoch: int
    step: int


def num_steps(cfg: Config, num_images: int = IMAGENET) -> int:
    """Return the steps per epoch; the last incomplete one is dropped."""
    return num_images // cfg.TRAIN.GLOBAL_BATCH_SIZE


def positions(cfg: Config, num_images: int = IMAGENET) -> list[Position]:
    """Return 12 steps: the first two, the end of epoch 1, around the end of the warm-up, in the rest, the last one."""
    steps, epochs = num_steps(cfg, num_images), cfg.OPTIM.MAX_EPOCH
    warmup = max(1, int(cfg.OPTIM.WARMUP_EPOCHS))
    chosen = [Position(0, 0), Position(0, 1), Position(0, steps - 1), Position(1, 0), Position(1, steps // 3)]
    chosen += [Position(warmup, 0), Position(warmup, steps // 2), Position(warmup + 1, 0)]
    chosen += [Position(epochs // 3, 1), Position(epochs // 2, 0), Position(2 * epochs // 3, steps // 2)]
    return [*chosen, Position(epochs - 1, steps - 1)]


def learning_rates(cfg: Config, at: Iterable[Position], num_images: int = IMAGENET) -> list[float]:
    """Return the learning rate of a parameter without a factor of its own, at each position, as the trainer sets it."""
    lr_at, steps = build_lr(cfg, cfg.TRAIN.GLOBAL_BATCH_SIZE), num_steps(cfg, num_images)
    return [lr_at(epoch + step / steps) for epoch, step in at]


# ---------------------------------------------------------------------------------------------- optimizer


class ParameterOptions(NamedTuple):
    """Weight decay of a parameter, and the factor of its learning rate."""

    weight_decay: float
    lr_scale: float


def parameter_options(cfg: Config) -> dict[str, ParameterOptions]:
    """Return the options of each trainable parameter, by name, from the groups of the optimizer."""
    model = meta_model(cfg)
    optimizer = build_optimizer(cfg, model, cfg.TRAIN.GLOBAL_BATCH_SIZE)
    set_lr(optimizer, 1.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: ParameterOptions(group["weight_decay"], float(group["lr"]))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def optimizer_defaults(cfg: Config) -> dict[str, Any]:
    """Return the settings of the optimizer, e.g. momentum, nesterov, betas, eps."""
    return dict(build_optimizer(cfg, meta_model(cfg), cfg.TRAIN.GLOBAL_BATCH_SIZE).defaults)


def ema_decays(cfg: Config, steps: Sequence[int]) -> list[float] | None:
    """Return the decay of the moving average in some steps of the run, from 0; None if there is no average."""
    ema, batch = build_ema(cfg, nn.Linear(1, 1)), cfg.TRAIN.GLOBAL_BATCH_SIZE
    return [ema.decay(batch, (step + 1) * batch) for step in steps] if ema else None


def reported_weights(cfg: Config) -> str:
    """Return the weights whose accuracy the tables of results show: "raw" or "ema"; those of the last epoch."""
    return "ema" if build_ema(cfg, nn.Linear(1, 1)) else "raw"


# -------------------------------------------------------------------------------------------------- model


def meta_model(cfg: Config) -> nn.Module:
    """Return the model without memory: for names, shapes and types of layers."""
    with torch.device("meta"):
        return build_model(cfg)


_MODELS: dict[str, nn.Module] = {}


def initial_model(cfg: Config) -> nn.Module:
    """Return the model at the start of training on the CPU, of a fixed seed; each config is built once."""
    key = cfg.dump()
    if key not in _MODELS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _MODELS[key] = build_model(cfg)
    return _MODELS[key]


def init_std(model: nn.Module, names: Iterable[str]) -> dict[str, float]:
    """Return the standard deviation of tensors by name, of one element or more."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    return {name: float(tensors[name].detach().float().std(correction=0)) for name in names}


def norm_gammas(model: nn.Module) -> dict[str, float]:
    """Return the initial scale of each norm layer by the layer's name; all channels of a layer have the same."""
    gammas = {}
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)) and layer.weight is not None:
            first = layer.weight.detach().flatten()[0]
            assert bool((layer.weight == first).all()), name
            gammas[name] = float(first)
    return gammas


def drop_path_rates(cfg: Config) -> list[float]:
    """Return the rate of each block with stochastic depth, in order; the paths within a block have the same."""
    rates = []
    for name, block in meta_model(cfg).named_modules():
        paths = [getattr(block, path) for path in ("drop_path", "drop_path1", "drop_path2") if hasattr(block, path)]
        found = {float(getattr(path, "drop_prob", 0) or 0) for path in paths}
        assert len(found) < 2, f"{name}: {found}"
        rates += found
    return rates


# --------------------------------------------------------------------------------------------------- data


def _transform(cfg: Config, train: bool) -> Transform:
    images: Any = get_dataset(cfg.DATA.NAME)  # the class: its mean, std and crop are attributes of the class
    return build_transform(cfg, images, train)


def train_transform(cfg: Config) -> Transform:
    """Return the training transform."""
    return _transform(cfg, train=True)


def train_crop(cfg: Config) -> Transform:
    """Return the crop of the training transform, without the augmentation after it."""
    transform = train_transform(cfg)
    return transform.crop if isinstance(transform, AugmentedCrop) else transform


class AugmentationOp(NamedTuple):
    """An operation of a policy: the magnitude with its unit as the library counts, and the noise on it.

    `probability`: that it is applied once it has been drawn.
    """

    name: str
    probability: float
    magnitude: float
    magnitude_std: float = 0.0


def policy_operations(cfg: Config) -> list[AugmentationOp]:
    """Return the operations of AUG.POLICY, a policy of timm; empty for none."""
    transform = train_transform(cfg)
    if not isinstance(transform, AugmentedCrop) or not transform.policy:
        return []
    policy: Any = transform.policy.operation
    ops = policy.ops if hasattr(policy, "ops") else [op for several in policy.policy for op in several]
    return [AugmentationOp(op.name, op.prob, op.magnitude, op.magnitude_std) for op in ops]


class Evaluation(NamedTuple):
    """Sizes of the evaluation in pixels, and its interpolation; flip: the mirrored image is evaluated too."""

    resize: int
    crop: int
    interpolation: str
    flip: bool


def evaluation(cfg: Config) -> Evaluation:
    """Return the evaluation of a config."""
    crop = _transform(cfg, train=False)
    assert isinstance(crop, CenterCrop)
    return Evaluation(crop.resize_to, crop.size, crop.interpolation, cfg.TEST.FLIP)


# --------------------------------------------------------------------------------------------------- loss


def mixed_targets(first: torch.Tensor, second: torch.Tensor, lam: float, num_classes: int) -> torch.Tensor:
    """Return the targets (2 N, classes) of N pairs, ordered as [first, reversed second], each its own label by `lam`.

    The second half mixes the images in reverse, which is the order of timm's batches.
    """
    pairs = torch.stack([first, second], dim=1).flatten()
    targets = soften(pairs, num_classes)
    blend_pairs(targets, torch.full((len(first), 1), 1 - lam))
    return torch.cat([targets[0::2], targets[1::2].flip(0)])
