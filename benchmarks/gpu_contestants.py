"""The loops that ours is measured against, a bare one and those of timm's and torchvision's scripts; and their turns.

The scripts are not ours and are not copied: each is imported from where its project was cloned to, and its own
`train_one_epoch` runs, on a model, an optimizer and batches that it is handed.
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
    """One batch `num_steps` times, in the place of a loader."""

    def __init__(self, batch: tuple[torch.Tensor, torch.Tensor], num_steps: int):
        self.batch = batch
        self.num_steps = num_steps

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return itertools.repeat(self.batch, self.num_steps)


class UnderAutocast(nn.Module):
    """A module that computes under autocast by itself, for a loop that knows only float16."""

    def __init__(self, inner: nn.Module, autocast: Autocast):
        super().__init__()
        self.inner = inner
        self.autocast = autocast

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return what the module makes of the inputs."""
        with self.autocast():
            return self.inner(*inputs)


def bare_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, criterion: nn.Module, batches: Batches, autocast: Autocast
) -> Callable[[], None]:
    """Return a loop with nothing around its steps."""

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
    """Return timm's loop as its script runs it with --channels-last and bfloat16; its log goes to a file."""
    images = batches.batch[0]
    words = ["--channels-last", "--log-interval", str(len(batches)), "--batch-size", str(len(images))]
    args = _parse_timm(script, words)
    # What its main() adds; the batches are on the device, as its prefetcher leaves them.
    args.prefetcher, args.distributed, args.device = True, False, str(images.device)
    args.rank, args.local_rank, args.world_size = 0, 0, 1
    logger = logging.getLogger("train")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(logging.FileHandler(log_file))
    offered = {"epoch": 0, "model": model, "loader": batches, "optimizer": optimizer, "args": args,
               "device": images.device, "amp_autocast": autocast, "loss_fn": criterion}  # fmt: skip
    known = inspect.signature(script.train_one_epoch).parameters
    if "task" in known:  # newer scripts: a task holds the model and the loss
        from timm.task import ClassificationTask

        offered["task"] = ClassificationTask(model, criterion, device=images.device, verbose=False)
    offered = {name: value for name, value in offered.items() if name in known}
    return lambda: script.train_one_epoch(**offered)


def _parse_timm(script: ModuleType, words: list[str]) -> argparse.Namespace:
    """Return the options of timm's script, which reads them from the command line of the process."""
    own, sys.argv = sys.argv, ["train.py", *words]
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
    """Return torchvision's loop; its --amp is float16, so the model and the loss bring the autocast along."""
    args = script.get_args_parser().parse_args(["--print-freq", str(len(batches))])
    model, criterion = UnderAutocast(model, autocast), UnderAutocast(criterion, autocast)
    device = batches.batch[0].device
    return lambda: script.train_one_epoch(model, criterion, optimizer, batches, device, 0, args)


def import_script(path: Path, name: str) -> ModuleType:
    """Return the script at `path` as a module; the folder it lies in is searched last, for files that go with it.

    Raises:
        SystemExit: it does not go with what is installed, or it is another script.
    """
    sys.path.append(str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise SystemExit(f"{path}: is not a Python file")
    script = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(script)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"{path}: {error}; clone the tag of the version that is installed") from error
    if not hasattr(script, "train_one_epoch"):
        raise SystemExit(f"{path}: has no train_one_epoch; --timm takes train.py of pytorch-image-models, "
                         "--torchvision takes references/classification/train.py of vision")  # fmt: skip
    return script


@dataclass
class Contestant:
    """A loop to time, and what it has taken.

    Attributes:
        run: takes a block of steps.
        optimizer: the one it uses.
        held: tensors that it needs from step to step, beside the optimizer's.
        bucket_bytes: memory of gradients that DDP never gives back.
        seconds: of each block after the warm-up.
        peak_bytes: the most that it had at a time, without the other contestants.
    """

    run: Callable[[], None]
    optimizer: torch.optim.Optimizer
    held: list[torch.Tensor]
    bucket_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def take_block(self, device: torch.device, counts: bool) -> None:
        """Run a block, and note its seconds and its memory if it counts."""
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
        self.optimizer.zero_grad()  # the next one's peak must not hold these gradients

    def held_bytes(self) -> int:
        """Return what it holds between two blocks."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = self.held + [value for value in states if torch.is_tensor(value)]
        return self.bucket_bytes + sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def take_turns(contestants: dict[str, Contestant], max_num_batches: int, device: torch.device) -> None:
    """Time blocks: every round runs each loop once, beginning with another one."""
    names = list(contestants)
    for number in range(WARM_UP_ROUNDS + max_num_batches):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            contestants[name].take_block(device, counts=number >= WARM_UP_ROUNDS)


def speed_ratios(one: Contestant, other: Contestant) -> list[float]:
    """Return how many times as fast `one` is as `other`, of each round."""
    return [theirs / own for own, theirs in zip(one.seconds, other.seconds, strict=True)]
