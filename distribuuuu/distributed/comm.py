"""Rank, world size, progress, stops and collectives. Without a process group, all act as in a world of one process."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import nn

from distribuuuu.config import ConfigError
from distribuuuu.launch.signals import OUT_OF_TIME, RunStopped, SignalState, handled_by

T = TypeVar("T")

# The processes exchange their stop requests about this often, and at least every so many calls: steps may turn slower.
AGREE_EVERY_S = 1.0
MAX_CALLS = 50
_NO_REASON = 0


class GroupState:
    """State of this process in the process group, set by `process_group`.

    Attributes:
        rank, local_rank: the rank in the group, and the one on this node.
        host_group: a gloo group for values of the host, whose collectives never wait for the device.
        stall_timer: the thread that ends this process if it makes no progress; None: there is one process.
        phase: what this process does between two steps, for reports, e.g. 'waiting for data'; '' if it computes.
    """

    rank = local_rank = 0
    host_group: torch_dist.ProcessGroup | None = None
    stall_timer: Any = None
    phase = ""


def is_distributed() -> bool:
    """Tell whether this process is in a process group."""
    return torch_dist.is_available() and torch_dist.is_initialized()


def rank() -> int:
    """Return the rank of this process."""
    return GroupState.rank


def world_size() -> int:
    """Return the number of processes."""
    return torch_dist.get_world_size() if is_distributed() else 1


def is_main() -> bool:
    """Tell whether this is the process that logs and saves."""
    return rank() == 0


def backend() -> str:
    """Return the name of the backend, or 'none'."""
    return torch_dist.get_backend() if is_distributed() else "none"


def barrier() -> None:
    """Wait for every process, but not for the device."""
    if is_distributed():
        torch_dist.barrier(group=GroupState.host_group)


def all_reduce_max(values: Sequence[float]) -> list[float]:
    """Return the maximum of each value over the processes; does not wait for the device."""
    if not is_distributed():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    torch_dist.all_reduce(tensor, torch_dist.ReduceOp.MAX, group=GroupState.host_group)
    return tensor.tolist()


def scaled_all_reduce(tensors: Sequence[torch.Tensor], scale: float | None = None) -> Sequence[torch.Tensor]:
    """Sum each tensor over the processes in place, then multiply it by `scale` (None: 1 / world size).

    Every process must call it, with tensors of the same shapes. After pycls (Radosavovic et al.).
    """
    if not is_distributed():
        return tensors
    scale = 1.0 / world_size() if scale is None else scale
    pending = [torch_dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for reduction in pending:
        reduction.wait()
    if scale != 1.0:
        for tensor in tensors:
            tensor.mul_(scale)
    return tensors


def gather_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of every process in the order of ranks, on every process: (sum of N, ...).

    Args:
        tensor: (N, ...), where N may differ between processes and be 0; the other sizes and the type may not.
    """
    if not is_distributed():
        return tensor
    counts = torch.zeros(world_size(), dtype=torch.int64, device=tensor.device)
    counts[rank()] = len(tensor)
    torch_dist.all_reduce(counts)
    padded = tensor.new_zeros((int(counts.max()), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in range(world_size())]
    torch_dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts.tolist(), strict=True)])


class _DifferentiableSum(torch.autograd.Function):
    """Sum over the processes. The result of every process depends on each tensor, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        torch_dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _DifferentiableSum.forward(ctx, grad)


def all_gather_single(gathered: torch.Tensor, tensor: torch.Tensor, group: Any = None) -> None:
    """Write the tensors of all processes, of one shape, to `gathered`, one after the other; the group must exist."""
    name = "all_gather_single" if hasattr(torch_dist, "all_gather_single") else "all_gather_into_tensor"  # torch < 2.14
    getattr(torch_dist, name)(gathered, tensor, group)


def differentiable_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of `tensor` over the processes; gradients flow back to each of them."""
    return _DifferentiableSum.apply(tensor) if is_distributed() else tensor


def broadcast_object(value: T) -> T:
    """Return the main process's `value` on every process."""
    if not is_distributed():
        return value
    values = [value]
    torch_dist.broadcast_object_list(values, src=0)
    return values[0]


def on_main(function: Callable[[], T]) -> T:
    """Return function() of the main process, or raise its ConfigError, on every process."""
    outcome: Any = None
    if is_main():
        try:
            outcome = function()
        except ConfigError as error:
            error.on_all_processes = True
            outcome = error
    outcome = broadcast_object(outcome)
    if isinstance(outcome, ConfigError):
        raise outcome
    return outcome


def gather_objects(value: T) -> list[T]:
    """Return the `value` of every process in the order of ranks, on every process."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    torch_dist.all_gather_object(values, value)
    return values


class PeerError(ConfigError):
    """Another process failed with this error; this process only stops."""


def local_main_first(function: Callable[[], T]) -> T:
    """Return function() on every process, called on local rank 0 of each node before the others, e.g. to download.

    Raises:
        PeerError: local rank 0 of some node failed (there, its own error is raised).
    """
    is_first = GroupState.local_rank == 0 or not is_distributed()
    error = None
    if is_first:
        try:
            result = function()
        except Exception as caught:  # raised below, after the waiting processes have been notified
            error = caught
    failures = [text for text in gather_objects(str(error) if error else None) if text]
    if error:
        raise error
    if failures:
        raise PeerError(failures[0])
    return result if is_first else function()


def is_communication_error(error: Exception) -> bool:
    """Tell whether an error may be the consequence of the end of another process."""
    text = str(error).lower()
    return isinstance(error, torch_dist.DistError) or any(word in text for word in ("gloo", "nccl", "closed by peer"))


def gradient_sync(model: nn.Module, enabled: bool) -> contextlib.AbstractContextManager:
    """Return the context of a micro-batch; its gradients are averaged over the processes only if `enabled`.

    A sharded model always reduces them: to accumulate them locally would take the memory of the full model.
    """
    no_sync: Any = None if enabled else getattr(model, "no_sync", None)  # of DDP
    return no_sync() if no_sync else contextlib.nullcontext()


class FullStateDict(dict):
    """State dict of full CPU tensors that nothing else refers to; without tensors on all but the main process."""


def to_local(tensor: Any) -> torch.Tensor:
    """Return this process's rows of a sharded tensor, which share its memory; any other tensor unchanged."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor


def mark_position(position: str) -> None:
    """Report progress, e.g. 'epoch 2, step 14', which is logged if this process dies or stalls."""
    GroupState.phase = ""
    if GroupState.stall_timer:
        GroupState.stall_timer.mark(position)


def begin_slow_phase() -> None:
    """Apply DIST.STARTUP_TIMEOUT_S, if larger than DIST.TIMEOUT_S, until the next position."""
    if timer := GroupState.stall_timer:
        timer.begin_phase(timer.limits[1])


@contextlib.contextmanager
def unlimited_phase(name: str) -> Iterator[None]:
    """Let the other processes wait for this one within the block, e.g. while it writes to a slow disk."""
    timer, GroupState.phase = GroupState.stall_timer, name
    before = timer.begin_phase(math.inf) if timer else 0.0
    try:
        yield
    finally:
        GroupState.phase = ""
        if timer:
            timer.begin_phase(before)


class StopRequest:
    """A request of any process to stop; every process calls `check` equally often and stops at the same call.

    On SIGTERM, `handled_by` of launch/signals.py passes it to this process's `SignalState`; the next `check` on which
    the processes agree raises `RunStopped` on all of them; the trainer saves a checkpoint; the command exits with the
    status of the signal. A second signal ends the process at once.

    Args:
        max_hours: stop so many hours after the start of the process, or of a later run in it; 0: never.
    """

    def __init__(self, max_hours: float = 0.0):
        self._signals = SignalState.current.begin_run()
        self._deadline = self._signals.started + 3600 * max_hours if max_hours else float("inf")
        self._handling = handled_by(self._signals.receive)
        self._begun = {""}
        self.begin_phase()

    def __enter__(self) -> "StopRequest":
        self._handling.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._handling.__exit__(*error)
        self._signals.started = time.monotonic()

    def begin_phase(self, name: str = "") -> None:
        """Exchange stop requests at the next call, because the calls of a new phase may be slower or faster.

        Args:
            name: if new in this start, the start-up timeout applies until the next call: it may include a compilation.
        """
        if name not in self._begun:
            self._begun.add(name)
            begin_slow_phase()
        self._agreed_at, self._calls, self._calls_to_wait = time.monotonic(), 0, 1

    def check(self, position: str) -> None:
        """Record the position for the stall timer, and stop if any process has a reason to.

        Several processes communicate about once a second; a single one stops at the next call.

        Raises:
            RunStopped: on every process, after the same call.
        """
        mark_position(position)
        self._calls += 1
        if self._calls < self._calls_to_wait and (self._signals.first is None or is_distributed()):
            return
        now = time.monotonic()
        reason, call_s = all_reduce_max([self._reason(now), (now - self._agreed_at) / self._calls])
        if reason != _NO_REASON:
            raise RunStopped(int(reason))
        self._agreed_at, self._calls = now, 0
        self._calls_to_wait = min(max(int(AGREE_EVERY_S / max(call_s, 1e-6)), 1), MAX_CALLS)

    def _reason(self, now: float) -> int:
        if self._signals.first is not None:
            return int(self._signals.first)
        return OUT_OF_TIME if now > self._deadline else _NO_REASON


def marked(items: Iterable[T], position: str) -> Iterator[T]:
    """Yield the items and report progress after each."""
    for number, item in enumerate(items, 1):
        yield item
        mark_position(f"{position}, batch {number}")
