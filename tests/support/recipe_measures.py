"""Measurements of the objects that a config builds: an option that is set but not used does not pass."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from support.runs import ROOT
from torch import nn

from distribuuuu.config import Config, load_cfg
from distribuuuu.config.config_node import get_value
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.augment import AugmentedCrop
from distribuuuu.data.batch_plan import plan_batches
from distribuuuu.data.build_transform import build_transform, statistics_of
from distribuuuu.data.mixup import blend_pairs, soften
from distribuuuu.data.transforms import CenterCrop, Transform
from distribuuuu.data.views import EpochTransforms, build_im_size
from distribuuuu.models import build_model
from distribuuuu.optim.ema import build_averages
from distribuuuu.optim.optimizer import build_optimizer
from distribuuuu.optim.schedules import build_lr, set_lr

# The overlays of speed are not runs.
FILES = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "speed")
# Training images of the data sets.
NUM_IMAGES = {"imagefolder": 1_281_167, "cifar10": 50_000}


def recipe(name: str, *overrides: Any) -> Config:
    """Return the config of a file, e.g. "imagenet/deit_tiny", with KEY, VALUE, ...; classes are those of the data."""
    classes = ["MODEL.NUM_CLASSES", "1000"] if name.startswith("imagenet") else []
    return load_cfg(str(ROOT / "configs" / f"{name}.yaml"), [*classes, *(str(word) for word in overrides)])


def measure(cfg: Config, fact: str) -> Any:
    """Return a fact of a config: one of `MEASURES`, or the value of an option."""
    return MEASURES[fact](cfg) if fact in MEASURES else get_value(cfg, fact)


def global_batch(cfg: Config) -> int:
    """Return the images of a step; on 8 GPUs if the config leaves it to their number."""
    return plan_batches(cfg.TRAIN.BATCH_SIZE, cfg.TRAIN.GLOBAL_BATCH_SIZE, 8).global_batch


def num_steps(cfg: Config) -> int:
    """Return the steps per epoch; the last incomplete one is dropped."""
    return NUM_IMAGES[cfg.DATA.NAME] // global_batch(cfg)


def positions(cfg: Config) -> list[tuple[int, int]]:
    """Return (epoch, step), from 0, of 12 steps: at the start, around the end of the warm-up, ..., the last."""
    steps, epochs, warmup = num_steps(cfg), cfg.OPTIM.MAX_EPOCH, max(1, int(cfg.OPTIM.WARMUP_EPOCHS))
    chosen = [(0, 0), (0, 1), (0, steps - 1), (1, 0), (1, steps // 3), (warmup, 0), (warmup, steps // 2)]
    chosen += [(warmup + 1, 0), (epochs // 3, 1), (epochs // 2, 0), (2 * epochs // 3, steps // 2)]
    return [*chosen, (epochs - 1, steps - 1)]


def learning_rates(cfg: Config, at: Iterable[tuple[int, int]]) -> list[float]:
    """Return the learning rate of a parameter without a factor of its own, at each position, as the trainer sets it."""
    lr_at, steps = build_lr(cfg, global_batch(cfg)), num_steps(cfg)
    return [lr_at(epoch + step / steps) for epoch, step in at]


def rates_by_step(cfg: Config) -> dict[int, float]:
    """Return the learning rate of each hundredth step of a run, and of the steps around them."""
    steps = [step for step in range(num_steps(cfg) * cfg.OPTIM.MAX_EPOCH) if step % 100 in (0, 1, 89)]
    return dict(zip(steps, learning_rates(cfg, [divmod(step, num_steps(cfg)) for step in steps]), strict=True))


def images_per_gpu(cfg: Config) -> dict[int, int]:
    """Map numbers of GPUs to the images that each takes at a time, of which batch norm computes its statistics."""
    sizes = cfg.TRAIN.BATCH_SIZE, cfg.TRAIN.GLOBAL_BATCH_SIZE
    return {world: plan_batches(*sizes, world).micro_batch for world in (1, 2, 4, 8, 64)}


def decay_of_parameters(cfg: Config) -> dict[str, float]:
    """Return the weight decay of each trainable parameter by name; all have the same learning rate."""
    model = meta_model(cfg)
    optimizer = build_optimizer(cfg, model, global_batch(cfg))
    set_lr(optimizer, 1.0)
    assert {float(group["lr"]) for group in optimizer.param_groups} == {1.0}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [(group["weight_decay"], parameter) for group in optimizer.param_groups for parameter in group["params"]]
    return {names[id(parameter)]: decay for decay, parameter in groups}


def average(cfg: Config) -> tuple[float, int, int] | None:
    """Return decay per update, steps per update and first epoch; None: no average."""
    ema = build_averages(cfg, nn.Linear(1, 1), {}).get("ema") if cfg.EMA.HALF_LIFE else None
    batch, every = global_batch(cfg), cfg.EMA.EVERY_STEPS
    decay = 1 - ema.share(cfg.OPTIM.MAX_EPOCH, 0, 10**12, batch) if ema else 0
    return (decay, every, cfg.EMA.START_EPOCH) if ema else None


# Models by device and config. Of those with weights only the last one is kept: every process that a later test forks
# would copy the page tables of all of them.
_MODELS: dict[str, dict[str, nn.Module]] = {"meta": {}, "cpu": {}}


def _build_once(cfg: Config, device: str) -> nn.Module:
    key, models = f"{cfg.MODEL.dump()}{cfg.TRAIN.IM_SIZE}", _MODELS[device]
    if key not in models:
        if device != "meta":
            models.clear()
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(0)
            models[key] = build_model(cfg)
    return models[key]


def meta_model(cfg: Config) -> nn.Module:
    """Return the model without memory: for names, shapes and types of layers."""
    return _build_once(cfg, "meta")


def initial_model(cfg: Config) -> nn.Module:
    """Return the model at the start of training on the CPU, of a fixed seed."""
    return _build_once(cfg, "cpu")


def count_parameters(cfg: Config) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in meta_model(cfg).parameters())


def norm_settings(cfg: Config) -> set[tuple[float, float | None]]:
    """Return epsilon, and the momentum of batch norms, of the norm layers."""
    norms = [layer for layer in meta_model(cfg).modules() if isinstance(layer, (nn.BatchNorm2d, nn.LayerNorm))]
    return {(layer.eps, getattr(layer, "momentum", None)) for layer in norms}


def drop_path_rates(cfg: Config) -> list[float]:
    """Return the rate of each block with stochastic depth, in order; the paths within a block have the same."""
    rates = []
    for name, block in meta_model(cfg).named_modules():
        paths = [getattr(block, path) for path in ("drop_path", "drop_path1", "drop_path2") if hasattr(block, path)]
        found = {float(getattr(path, "drop_prob", 0) or 0) for path in paths}
        assert len(found) < 2, f"{name}: {found}"
        rates += found
    return rates


def vit_sizes(cfg: Config) -> tuple[int, int, int, int, int]:
    """Return blocks, width, heads, positions and layer scales of a vision transformer."""
    model: Any = meta_model(cfg)
    scales = [name for name, _ in model.named_parameters() if "gamma" in name]
    return len(model.blocks), model.embed_dim, model.blocks[0].attn.num_heads, model.pos_embed.shape[1], len(scales)


def _transform(cfg: Config, train: bool) -> Transform:
    images: Any = DATASETS.get(cfg.DATA.NAME)  # the class: its mean, std and crop are attributes of the class
    return build_transform(cfg, images, train)


def train_transform(cfg: Config) -> Transform:
    """Return the training transform, at its full size."""
    transform = _transform(cfg, train=True)
    return transform.stages[0] if isinstance(transform, EpochTransforms) else transform


def train_crop(cfg: Config) -> Transform:
    """Return the crop of the training transform, without the augmentation after it."""
    transform = train_transform(cfg)
    return transform.crop if isinstance(transform, AugmentedCrop) else transform


def policy_operations(cfg: Config) -> list[tuple[str, float, float, float]]:
    """Return name, probability, magnitude and its noise of the operations of AUG.POLICY, if it is one of timm."""
    transform = train_transform(cfg)
    if not isinstance(transform, AugmentedCrop) or not transform.policy:
        return []
    policy: Any = transform.policy
    ops = policy.ops if hasattr(policy, "ops") else [op for several in policy.policy for op in several]
    return [(op.name, op.prob, op.magnitude, op.magnitude_std) for op in ops]


def evaluation(cfg: Config) -> tuple[int, int, str, bool]:
    """Return the sides of resize and crop in pixels, the interpolation, and whether the mirrored image is evaluated."""
    crop = _transform(cfg, train=False)
    assert isinstance(crop, CenterCrop)
    return crop.resize_to, crop.size, crop.interpolation, cfg.TEST.FLIP


def mixed_targets(first: torch.Tensor, second: torch.Tensor, lam: float, num_classes: int) -> torch.Tensor:
    """Return targets (2 N, classes) of N pairs, [first, reversed second] as in timm, each its own label by `lam`."""
    pairs = torch.stack([first, second], dim=1).flatten()
    targets = soften(pairs, num_classes)
    blend_pairs(targets, torch.full((len(first), 1), 1 - lam))
    return torch.cat([targets[0::2], targets[1::2].flip(0)])


MEASURES: dict[str, Callable[[Config], Any]] = {
    "params": lambda cfg: round(count_parameters(cfg) / 1e6, 3), "parameters": count_parameters,
    "global batch": global_batch, "images per GPU": images_per_gpu, "steps": num_steps,
    "lr": lambda cfg: learning_rates(cfg, positions(cfg)), "lr of steps": rates_by_step,
    "optimizer": lambda cfg: build_optimizer(cfg, meta_model(cfg), global_batch(cfg)).defaults, "average": average,
    "drop path": drop_path_rates, "norms": norm_settings,
    "vit": vit_sizes, "sides": lambda cfg: [build_im_size(cfg)(epoch) for epoch in range(cfg.OPTIM.MAX_EPOCH)],
    "crop": train_crop, "is only cropped": lambda cfg: train_transform(cfg) == train_crop(cfg),
    "policy": policy_operations, "evaluation": evaluation,
    "statistics": lambda cfg: statistics_of(cfg, DATASETS.get(cfg.DATA.NAME)),
}  # fmt: skip
