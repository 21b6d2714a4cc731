#!/usr/bin/env python3
"""Trajectory certificates: a small model trained by our loop and by the components of a reference, step by step.

    python benchmarks/certificates.py [NAME ...] [--steps 50] [--planted DIFFERENCE]

Each certificate takes a recipe of configs/imagenet with a small model and a short schedule. `train_epoch` trains it on
random images, in float64. The reference starts with the same weights and gets the same batches, after augmentation and
mixing. Its optimizer, parameter groups, schedule, loss, moving average and loss scaling are those of the source:

- timm's own functions, for procedure A2 of ResNet strikes back and for DeiT-III;
- torch's, as torchvision's training script uses them, for its V1 and V2 weights;
- Adam, decay and schedule of big_vision and optax, written in torch, for the plain vision transformer;
- the training loop of distribuuuu of 2021, written again from its formulas.

The table shows the largest difference over all steps: of the loss, relative to it; of the weights and their average,
relative to the largest weight of a tensor. Exit status 1: one of them is above its tolerance, which is for rounding.
`--planted` puts a known difference into the reference, which each certificate must find; a schedule lags by one step.
"""

import argparse
import contextlib
import copy
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_support.machine import describe_run
from torch import nn

from distribuuuu.config import load_cfg
from distribuuuu.config.run_files import TRAIN_LOG
from distribuuuu.data.batch import Batch
from distribuuuu.data.loader import build_loaders
from distribuuuu.engine.build import build_run, open_run
from distribuuuu.engine.run import Run
from distribuuuu.launch.detect import detect_launch
from distribuuuu.trainer import train_epoch

ROOT = Path(__file__).resolve().parents[1]
STEPS_PER_EPOCH, BATCH, CLASSES = 10, 16, 8
PLANTED = ("decay on norms", "schedule lag", "average before the step", "sum instead of mean")
COMMON = {
    "DATA.NAME": "dummy", "MODEL.NUM_CLASSES": CLASSES, "TRAIN.IM_SIZE": 32, "TEST.IM_SIZE": 32, "RNG_SEED": 1,
    "TRAIN.BATCH_SIZE": BATCH, "TRAIN.GLOBAL_BATCH_SIZE": BATCH, "TRAIN.WORKERS": 0, "TRAIN.AMP": "none",
    "LOG.TENSORBOARD": False, "DATA.REPEATS": 1, "MODEL.CHANNELS_LAST": False,
}  # fmt: skip


class Reference:
    """A reference training: weights, optimizer, schedule, loss and average.

    Args:
        model: its copy of the initial model.
        planted: one of PLANTED, or empty.
        num_epochs: length of the schedule.
    """

    # Decay of the average in a step; None: there is no average.
    average_decay: float | None = None
    average_every = 1

    def __init__(self, model: nn.Module, planted: str, num_epochs: int):
        self.model, self.planted, self.num_epochs = model, planted, num_epochs
        self.optimizer = self.build_optimizer()
        if planted == "decay on norms":
            toggle_norm_decay(self.optimizer, model)
        self.average = copy.deepcopy(model).eval()

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of the weights, with its parameter groups."""
        raise TypeError(f"{type(self).__name__} must define it")

    def set_lr(self, epoch: int, step: int) -> None:
        """Set the learning rate of a step, `step` counted from the start of the run."""
        raise TypeError(f"{type(self).__name__} must define it")

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch."""
        return F.cross_entropy(logits, targets)

    def update(self, loss: torch.Tensor) -> None:
        """Take a step of the optimizer with the gradients of the loss."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def update_average(self, epoch: int, step: int) -> None:
        """Update the moving average after step `step` of an epoch."""
        if self.average_decay is None or step % self.average_every:
            return
        decay = 0.0 if self.copies(epoch, step) else self.average_decay
        with torch.no_grad():
            for own, new in zip(self.average.state_dict().values(), self.model.state_dict().values(), strict=True):
                own.copy_(decay * own + (1 - decay) * new if own.is_floating_point() else new)

    def copies(self, epoch: int, step: int) -> bool:
        """Tell whether the average is replaced by the weights."""
        return False

    def train_step(self, batch: Batch, epoch: int, step: int) -> float:
        """Train with a batch; return its loss."""
        scheduled = epoch * STEPS_PER_EPOCH + step
        if self.planted == "schedule lag":  # of one step: a schedule by epoch is late in the first step of each
            scheduled = max(0, scheduled - 1)
        self.set_lr(scheduled // STEPS_PER_EPOCH, scheduled)
        self.model.train()
        logits = self.model(batch.images)
        loss = self.loss(logits.float() if logits.dtype == torch.float16 else logits, batch.targets)
        if self.planted == "average before the step":
            self.update_average(epoch, step)
        loss = loss * len(batch.images) if self.planted == "sum instead of mean" else loss
        self.update(loss)
        if self.planted != "average before the step":
            self.update_average(epoch, step)
        return loss.item()


def toggle_norm_decay(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Put decay on the parameters of one dimension that have none, or remove it."""
    decay = max(group["weight_decay"] for group in optimizer.param_groups)
    for group in list(optimizer.param_groups):
        scales = [weight for weight in group["params"] if weight.ndim == 1]
        if group["weight_decay"] == 0:
            group["weight_decay"] = decay
        elif scales:
            group["params"] = [weight for weight in group["params"] if weight.ndim != 1]
            optimizer.add_param_group({**group, "params": scales, "weight_decay": 0.0})


# ------------------------------------------------------------------------------------------ references


class Timm(Reference):
    """timm's optimizer, parameter groups and scheduler, as its train.py calls them once per epoch."""

    lr, weight_decay, warmup_lr, min_lr = 5e-3, 0.02, 1e-4, 1e-6
    options: dict[str, Any] = {}

    def build_optimizer(self) -> torch.optim.Optimizer:
        from timm.optim import create_optimizer_v2
        from timm.scheduler import create_scheduler_v2

        skipped = getattr(self.model, "no_weight_decay", set)()
        optimizer = create_optimizer_v2(self.model, "lamb", self.lr, self.weight_decay, filter_bias_and_bn=True,
                                        **self.options)  # fmt: skip
        assert all(group["params"] for group in optimizer.param_groups) and isinstance(skipped, set)
        self.scheduler, _ = create_scheduler_v2(optimizer, "cosine", self.num_epochs, warmup_epochs=2,
                                                warmup_lr=self.warmup_lr, min_lr=self.min_lr)  # fmt: skip
        return optimizer

    def set_lr(self, epoch: int, step: int) -> None:
        self.scheduler.step(epoch)


class ProcedureA2(Timm):
    """ResNet strikes back (arXiv 2110.00476), A2: LAMB, binary cross-entropy with a threshold."""

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        from timm.loss import BinaryCrossEntropy

        return BinaryCrossEntropy(smoothing=0.0, target_threshold=0.2)(logits, targets)


class AveragedA2(ProcedureA2):
    """The same with timm's ModelEmaV3, called after each step with the number of updates, as in timm's train.py."""

    average_decay = 0.9

    def __init__(self, model: nn.Module, planted: str, num_epochs: int):
        from timm.utils import ModelEmaV3

        super().__init__(model, planted, num_epochs)
        # It copies the weights until the first step of the second epoch, as EMA.START_EPOCH 1 does.
        self.model_ema = ModelEmaV3(model, self.average_decay, update_after_step=STEPS_PER_EPOCH)
        self.average = self.model_ema.module

    def update_average(self, epoch: int, step: int) -> None:
        self.model_ema.update(self.model, step=epoch * STEPS_PER_EPOCH + step + 1)


class ScaledA2(ProcedureA2):
    """Procedure A2 in float16, with timm's scaler."""

    def __init__(self, model: nn.Module, planted: str, num_epochs: int):
        from timm.utils import NativeScaler

        super().__init__(model, planted, num_epochs)
        self.scaler = NativeScaler("cpu")
        forward = model.forward

        def autocast_forward(images: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.float16):
                return forward(images)

        model.forward = autocast_forward  # type: ignore[method-assign]

    def update(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.scaler(loss, self.optimizer)


class DeiT3(Timm):
    """DeiT-III (arXiv 2204.07118): LAMB, targets above 0 become 1, and a rate that lags by an epoch."""

    lr, weight_decay, warmup_lr, min_lr, options = 4e-3, 0.05, 1e-6, 1e-5, {"eps": 1e-8}

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(logits, targets.gt(0).to(logits.dtype))

    def set_lr(self, epoch: int, step: int) -> None:
        if epoch:  # the script calls the scheduler after each epoch, with its number
            self.scheduler.step(epoch - 1)


class TorchvisionV1(Reference):
    """torchvision's ResNet-50 V1: SGD and a step schedule."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
        self.rates = scheduled_rates(torch.optim.lr_scheduler.StepLR, 0.1, step_size=2, gamma=0.1)
        return optimizer

    def set_lr(self, epoch: int, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates(epoch)


class TorchvisionV2(TorchvisionV1):
    """torchvision's V2: no decay of norms, cosine by epoch, smoothing of mixed targets, EMA with a warm-up."""

    # Of the script: 0.99998 every 32 steps, here every 4 steps with a decay that shows.
    average_decay, average_every = 0.9, 4

    def build_optimizer(self) -> torch.optim.Optimizer:
        norms = [weight for layer in self.model.modules() if isinstance(layer, nn.BatchNorm2d)
                 for weight in layer.parameters()]  # fmt: skip
        others = [weight for weight in self.model.parameters() if not any(weight is norm for norm in norms)]
        groups = [{"params": others, "weight_decay": 2e-5}, {"params": norms, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, 0.5, momentum=0.9)

        def schedule(optimizer: torch.optim.Optimizer) -> Any:
            rise = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=2)
            fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.num_epochs - 2)
            return torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[2])

        self.rates = scheduled_rates(schedule, 0.5)
        return optimizer

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, targets, label_smoothing=0.1)

    def copies(self, epoch: int, step: int) -> bool:
        # The script resets the count of the average in each update of the warm-up, so that the next one copies.
        return (epoch, step) <= (2, 0)


def scheduled_rates(scheduler: Callable[..., Any], lr: float, **settings: Any) -> Callable[[int], float]:
    """Return a function from the epoch to the learning rate of a scheduler of torch, stepped once per epoch."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr)
    built, rates = scheduler(optimizer, **settings), []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        built.step()
    return lambda epoch: rates[epoch]


class PlainVit(Reference):
    """The plain ViT (arXiv 2205.01580) by big_vision: optax's clipping, Adam, decay of kernels times the schedule."""

    lr, weight_decay, warmup_steps = 1e-3, 1e-4, 20

    def build_optimizer(self) -> torch.optim.Optimizer:
        self.kernels = {id(layer.weight) for layer in self.model.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))}
        self.trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in self.trained]
        self.count, self.scale = 0, 0.0
        groups = [{"params": [weight], "weight_decay": self.weight_decay * (id(weight) in self.kernels)}
                  for weight in self.trained]  # fmt: skip
        return torch.optim.SGD(groups, self.lr)  # holds the decay of each weight; its step is not used

    def set_lr(self, epoch: int, step: int) -> None:
        total = self.num_epochs * STEPS_PER_EPOCH
        progress = torch.tensor((step - self.warmup_steps) / (total - self.warmup_steps), dtype=torch.float64)
        falling = 0.5 * (1 + torch.cos(torch.pi * progress.clamp(0, 1))).item()
        self.scale = falling * min(1.0, step / self.warmup_steps)

    @torch.no_grad()
    def apply(self) -> None:
        """Update the weights as optax does."""
        self.count += 1
        gradients = [weight.grad for weight in self.trained]
        norm = torch.stack([gradient.square().sum() for gradient in gradients if gradient is not None]).sum().sqrt()
        for (mean, square), gradient, group in zip(self.moments, gradients, self.optimizer.param_groups, strict=True):
            (weight,) = group["params"]
            clipped = gradient / norm if norm > 1.0 else gradient
            mean.mul_(0.9).add_(clipped, alpha=0.1)
            square.mul_(0.999).add_(clipped.square(), alpha=0.001)
            change = (mean / (1 - 0.9**self.count)) / ((square / (1 - 0.999**self.count)).sqrt() + 1e-8)
            weight -= self.scale * (self.lr * change + group["weight_decay"] * weight)

    def update(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.apply()


class Distribuuuu2021(Reference):
    """The 2021 project: Nesterov SGD, and a cosine by epoch times a linear warm-up."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            self.model.parameters(), 0.2, momentum=0.9, dampening=0, weight_decay=5e-5, nesterov=True
        )

    def set_lr(self, epoch: int, step: int) -> None:
        factor = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * epoch / self.num_epochs, dtype=torch.float64))).item()
        factor *= 0.1 * (1 - epoch / 2) + epoch / 2 if epoch < 2 else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = 0.2 * factor


# ---------------------------------------------------------------------------------------- certificates


@dataclass(frozen=True)
class Certificate:
    """A recipe, its reference, the options that make it small, and the tolerance of a difference with its reason."""

    recipe: str
    reference: type[Reference]
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-7
    reason: str = ""


_VIT = {"embed_dim": 48, "depth": 2, "num_heads": 3, "patch_size": 8, "img_size": 32, "drop_path_rate": 0.05}
_DEIT3 = {**_VIT, "init_values": 1e-4}
# Updates until a decay of 0.9 has halved a weight: log(0.5) / log(0.9).
_HALF_LIFE = 6.578813478960585
_SHORT = {"AUG.POLICY": "none", "AUG.MIX_GROUP": 0, "OPTIM.WARMUP_EPOCHS": 2}
_SMALL_TIMM = {**_SHORT, "MODEL.ARCH": "timm/test_resnet", "MODEL.KWARGS": {"drop_path_rate": 0.05}}
CERTIFICATES = {
    "timm, A2": Certificate("resnet50_a2", ProcedureA2, _SMALL_TIMM),
    "timm, A2, EMA": Certificate("resnet50_a2", AveragedA2, {
        **_SMALL_TIMM, "EMA.HALF_LIFE": BATCH * _HALF_LIFE, "EMA.RAMP_UP": 0, "EMA.START_EPOCH": 1}),
    "timm, A2, float16": Certificate("resnet50_a2", ScaledA2, {**_SMALL_TIMM, "TRAIN.AMP": "fp16"}, 1e-4),
    "timm, DeiT-III": Certificate("deit3_small", DeiT3, {
        "MODEL.ARCH": "timm/deit3_small_patch16_224", "MODEL.KWARGS": _DEIT3, **_SHORT}),
    "torchvision, V1": Certificate("resnet50_torchvision_v1", TorchvisionV1,
                                   {"MODEL.ARCH": "torchvision/shufflenet_v2_x0_5", "OPTIM.STEPS": [2, 4]}),
    "torchvision, V2": Certificate("resnet50_torchvision_v2", TorchvisionV2, {
        "MODEL.ARCH": "torchvision/shufflenet_v2_x0_5", "TEST.CROP_SIZE": 32, **_SHORT,
        "EMA.START_EPOCH": 2, "EMA.EVERY_STEPS": 4, "EMA.HALF_LIFE": 4 * BATCH * _HALF_LIFE}),
    "big_vision, plain ViT": Certificate("plain_vit_small", PlainVit, {
        "MODEL.ARCH": "plain_vit_tiny", "MODEL.KWARGS": {"patch": 8, "mlp_head": True}, "AUG.POLICY": "none",
        "OPTIM.WARMUP_EPOCHS": 2}, 1e-4, "torch adds 1e-6 to the norm by which it clips"),
    "distribuuuu, 2021": Certificate("resnet18", Distribuuuu2021, {
        "MODEL.ARCH": "torchvision/shufflenet_v2_x0_5", "OPTIM.BASE_LR": 0.2, "OPTIM.WARMUP_EPOCHS": 2}),
}  # fmt: skip


@dataclass
class Differences:
    """The largest relative differences over the steps so far, and the number of steps."""

    loss: float = 0.0
    weights: float = 0.0
    average: float = 0.0
    steps: int = 0

    @property
    def largest(self) -> float:
        """The largest of all."""
        return max(self.loss, self.weights, self.average)


def difference(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of the floating-point entries of two state dicts, relative to their tensor."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    differences = [((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3)).item()
                   for mine, theirs in pairs if mine.is_floating_point()]  # fmt: skip
    return max(differences) if all(value == value for value in differences) else float("inf")


def use_double(run: Run) -> None:
    """Train in float64, in which rounding stays far below the differences of a schedule, a decay or a loss."""
    state, prepare_batch = run.state, run.task.prepare_batch
    state.model.double()
    for average in state.averages.values():
        average.model.double()
        average.pair_with(state.model)

    def prepare(batch: Batch, key: Any) -> Batch:
        mixed = prepare_batch(batch, key)
        is_soft = mixed.targets.is_floating_point()
        return mixed._replace(
            images=mixed.images.double(), targets=mixed.targets.double() if is_soft else mixed.targets
        )

    run.task.prepare_batch = prepare  # type: ignore[method-assign]


def compare(run: Run, reference: Reference, num_epochs: int) -> Iterator[Differences]:
    """Train with our loop; after each step, train the reference with the same batch, and yield the differences."""
    task, state, found = run.task, run.state, Differences()
    seen: list[tuple[Batch, torch.Tensor, float]] = []
    train_step, finish_step, yielded = task.train_step, state.finish_step, []

    def record(model: nn.Module, batch: Batch, key: Any) -> Any:
        random = torch.get_rng_state()
        output = train_step(model, batch, key)
        seen.append((batch, random, output.loss.item()))
        return output

    def finish() -> None:
        epoch, step = state.epoch, state.step
        finish_step()
        (batch, random, loss), after = seen.pop(), torch.get_rng_state()
        torch.set_rng_state(random)
        theirs = reference.train_step(batch, epoch, step)
        torch.set_rng_state(after)
        found.loss = max(found.loss, abs(loss - theirs) / max(1e-3, abs(theirs)))
        found.weights = max(found.weights, difference(state.model, reference.model))
        if reference.average_decay is not None:
            found.average = max(found.average, difference(state.ema, reference.average))
        found.steps += 1
        yielded.append(copy.copy(found))

    task.train_step, state.finish_step = record, finish  # type: ignore[method-assign, assignment]
    for _ in range(num_epochs):
        train_epoch(run)
        state.finish_epoch()
        yield from yielded
        yielded.clear()


def certify(name: str, num_steps: int = 50, planted: str = "") -> Differences:
    """Return the differences of a certificate over `num_steps`, a multiple of STEPS_PER_EPOCH.

    With a planted difference, the training ends when it is found.
    """
    certificate, num_epochs = CERTIFICATES[name], num_steps // STEPS_PER_EPOCH
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback(logging.disable, logging.NOTSET)
        options = {**COMMON, **certificate.options, "OPTIM.MAX_EPOCH": num_epochs, "OUT_DIR": folder}
        words = [word for pair in options.items() for word in pair]
        cfg = load_cfg(f"imagenet/{certificate.recipe}", words)
        launch, device = detect_launch(), torch.device("cpu")
        loaders = build_loaders(cfg, launch, device)
        loaders[0].sampler.num_images = STEPS_PER_EPOCH * BATCH
        stack.enter_context(open_run(cfg, launch, device, TRAIN_LOG, locks=True))
        run = build_run(cfg, *loaders)
        if cfg.TRAIN.AMP == "none":
            use_double(run)
        reference = certificate.reference(copy.deepcopy(run.state.model), planted, num_epochs)
        with run.stop, run.log:
            for found in compare(run, reference, num_epochs):
                if planted and found.largest > certificate.tolerance:
                    break
    return found


def main() -> int:
    """Print the table; return 1 if a difference is above its tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(CERTIFICATES), metavar="NAME", help=", ".join(CERTIFICATES))
    parser.add_argument("--steps", type=int, default=50, help=f"a multiple of {STEPS_PER_EPOCH}")
    parser.add_argument("--planted", default="", choices=("", *PLANTED), help="a difference to put into the reference")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in CERTIFICATES]:
        parser.error(f"unknown certificate {unknown[0]!r}; expected one of: {'; '.join(CERTIFICATES)}")
    if args.steps < 3 * STEPS_PER_EPOCH or args.steps % STEPS_PER_EPOCH:
        parser.error(
            f"--steps: got {args.steps}; expected a multiple of {STEPS_PER_EPOCH}, {3 * STEPS_PER_EPOCH} or more"
        )
    print(describe_run())
    print(f"{'certificate':<24}{'steps':>6}{'loss':>11}{'weights':>11}{'average':>11}  result")
    failed = False
    for name in args.names:
        found, tolerance = certify(name, args.steps, args.planted), CERTIFICATES[name].tolerance
        verdict = CERTIFICATES[name].reason or "equal up to rounding"
        verdict = f"DIFFERS, tolerance {tolerance:g}" if found.largest > tolerance else verdict
        failed |= found.largest > tolerance
        average = f"{found.average:>11.1e}" if CERTIFICATES[name].reference.average_decay is not None else f"{'-':>11}"
        print(f"{name:<24}{found.steps:>6}{found.loss:>11.1e}{found.weights:>11.1e}{average}  {verdict}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
