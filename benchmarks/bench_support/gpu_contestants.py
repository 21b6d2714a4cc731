"""Training loops for the GPU benchmark: a bare loop, those of timm's and torchvision's scripts, and their timing.

The scripts are not copied. Each is imported from a clone of its project, and its own `train_one_epoch` runs on the
given model, optimizer and batches.
"""

import argparse
import importlib.util
import inspect
import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

WARM_UP_ROUNDS = 3

Autocast = Callable[[], AbstractContextManager]


class Batches:
    """A loader that returns one batch `num_steps` times."""

    def __init__(self, batch: tuple[torch.Tensor, torch.Tensor], num_steps: int):
        self.batch = batch
        self.num_steps = num_steps

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return itertools.repeat(self.batch, self.num_steps)


class UnderAutocast(nn.Module):
    """A module that enters autocast itself, for a loop that supports float16 only."""

    def __init__(self, inner: nn.Module, autocast: Autocast):
        super().__init__()
        self.inner = inner
        self.autocast = autocast

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the output of the module under autocast."""
        with self.autocast():
            return self.inner(*inputs)


def bare_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, criterion: nn.Module, batches: Batches, autocast: Autocast
) -> Callable[[], None]:
    """Return a loop of bare training steps."""

    def run() -> None:
        model.train()
        for images, labels in batches:
            optimizer.zero_grad()
            with autocast():
                loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()

    return run


def timm_loop(
    script: ModuleType,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: nn.Module,
    batches: Batches,
    autocast: Autocast,
    log_file: Path,
) -> Callable[[], None]:
    """Return timm's loop with --channels-last and bfloat16; its log is written to a file."""
    images = batches.batch[0]
    options = ["--channels-last", "--log-interval", str(len(batches)), "--batch-size", str(len(images))]
    args = _parse_timm(script, options)
    # As set by its main(); the batches are on the device, as after its prefetcher.
    args.prefetcher, args.distributed, args.device = True, False, str(images.device)
    args.rank, args.local_rank, args.world_size = 0, 0, 1
    logger = logging.getLogger("train")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(logging.FileHandler(log_file))
    arguments = {"epoch": 0, "model": model, "loader": batches, "optimizer": optimizer, "args": args,
                 "device": images.device, "amp_autocast": autocast, "loss_fn": criterion}  # fmt: skip
    known = inspect.signature(script.train_one_epoch).parameters
    if "task" in known:  # newer scripts wrap the model and the loss in a task
        from timm.task import ClassificationTask

        arguments["task"] = ClassificationTask(model, criterion, device=images.device, verbose=False)
    arguments = {name: value for name, value in arguments.items() if name in known}
    return lambda: script.train_one_epoch(**arguments)


def _parse_timm(script: ModuleType, options: list[str]) -> argparse.Namespace:
    """Return the parsed options of timm's script, which reads sys.argv."""
    own, sys.argv = sys.argv, ["train.py", *options]
    try:
        return script._parse_args()[0]
    finally:
        sys.argv = own


def torchvision_loop(
    script: ModuleType,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: nn.Module,
    batches: Batches,
    autocast: Autocast,
) -> Callable[[], None]:
    """Return torchvision's loop; its --amp is float16 only, so the model and the loss enter autocast themselves."""
    args = script.get_args_parser().parse_args(["--print-freq", str(len(batches))])
    model, criterion = UnderAutocast(model, autocast), UnderAutocast(criterion, autocast)
    device = batches.batch[0].device
    return lambda: script.train_one_epoch(model, criterion, optimizer, batches, device, 0, args)


def import_script(path: Path, name: str) -> ModuleType:
    """Import the script at `path` as a module; its folder is appended to sys.path for the modules beside it.

    Raises:
        SystemExit: the script does not match the installed version, or it is another script.
    """
    sys.path.append(str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise SystemExit(f"{path}: not a Python file")
    script = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(script)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"{path}: {error}; fix: clone the tag of the installed version") from error
    if not hasattr(script, "train_one_epoch"):
        raise SystemExit(f"{path}: no function train_one_epoch; --timm expects train.py of pytorch-image-models, "
                         "--torchvision expects references/classification/train.py of vision")  # fmt: skip
    return script


@dataclass
class Contestant:
    """A training loop to time, with its measurements.

    Attributes:
        run: function that runs a block of steps.
        optimizer: optimizer of the loop.
        held: tensors that stay allocated between steps, except the optimizer state.
        bucket_bytes: gradient buckets that DDP keeps allocated.
        prepare: function that is called before each block; it is not timed.
        seconds: duration of each block after the warm-up.
        peak_bytes: peak memory of this loop, without the other loops.
    """

    run: Callable[[], None]
    optimizer: torch.optim.Optimizer
    held: list[torch.Tensor]
    bucket_bytes: int = 0
    prepare: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def take_block(self, device: torch.device, counts: bool) -> None:
        """Run a block; record its duration and peak memory if `counts`."""
        self.prepare()
        if device.type == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        self.run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if counts:
            self.seconds.append(time.perf_counter() - start)
        if counts and device.type == "cuda":
            extra = torch.cuda.max_memory_allocated() - before
            self.peak_bytes = max(self.peak_bytes, extra + self.held_bytes())
        self.optimizer.zero_grad()  # these gradients must not count in the peak of the next loop

    def held_bytes(self) -> int:
        """Return the bytes that stay allocated between two blocks."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = self.held + [value for value in states if torch.is_tensor(value)]
        return self.bucket_bytes + sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def take_turns(contestants: dict[str, Contestant], num_blocks: int, device: torch.device) -> None:
    """Time the loops in rounds; each round runs every loop once, starting with a different one."""
    names = list(contestants)
    for number in range(WARM_UP_ROUNDS + num_blocks):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            contestants[name].take_block(device, counts=number >= WARM_UP_ROUNDS)


def speed_ratios(one: Contestant, other: Contestant) -> list[float]:
    """Return the speed of `one` relative to `other` in each round."""
    return [theirs / own for own, theirs in zip(one.seconds, other.seconds, strict=True)]
