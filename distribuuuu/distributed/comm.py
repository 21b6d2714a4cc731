"""The process group, the device and the reductions; with parallel.py, the only file that knows torch.distributed.

Every function works with no group at all: one process is a world of one.
"""

import contextlib
import datetime
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist

from distribuuuu.config import ConfigError
from distribuuuu.distributed.process_group import (
    announce_hub,
    create_store,
    exchange_addresses,
    find_hub,
    refuse_shared_device,
)
from distribuuuu.distributed.watchdog import WatchdogClient
from distribuuuu.distributed.watchdog_server import WatchdogServer
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.signals import SignalState

logger = logging.getLogger(__name__)

T = TypeVar("T")

# What this process has while it is in a group: its number on its node, a group of its own for the host's matters, so
# that they never wait for the device, and the watch.
_local_rank = 0
_host_group: torch_dist.ProcessGroup | None = None
_watch: WatchdogClient | None = None


def pick_device(local_rank: int) -> torch.device:
    """Return this process's device, made the current one: CUDA (one card a process), else Apple's MPS, else the CPU.

    Raises:
        ConfigError: the node has fewer cards than processes.
    """
    if torch.cuda.is_available():
        num_cards = torch.cuda.device_count()
        if local_rank >= num_cards > 1:
            raise ConfigError(f"launcher: process {local_rank + 1} of this node has no GPU: {num_cards} are visible")
        device = torch.device("cuda", local_rank % num_cards)  # one visible card: each process was given its own
        torch.cuda.set_device(device)
        return device
    if torch.backends.mps.is_available() and "RANK" not in os.environ:
        return torch.device("mps")
    return torch.device("cpu")


@contextlib.contextmanager
def process_group(
    launch: Launch,
    device: torch.device,
    timeout_s: float,
    backend: str = "auto",
    report_dir: str = ".",
    startup_timeout_s: float = 0.0,
    shard: str = "none",
) -> Iterator[None]:
    """Join the processes of the run for the length of the block; one process alone joins nothing.

    A group brings threads that come and go. Fork (data loader workers) before: a fork while such a thread holds one of
    the interpreter's locks leaves the child waiting for ever.

    Args:
        launch: where this process stands.
        device: its device.
        timeout_s: seconds to wait for the others.
        backend: 'nccl', 'gloo', or 'auto': nccl on CUDA, else gloo.
        report_dir: gets the stacks of all processes on a time-out.
        startup_timeout_s: seconds to wait for the others in the first step and the first evaluation, if more.
        shard: what the processes share out: 'none', 'zero1' or 'fsdp'.

    Raises:
        ConfigError: the backend does not go with the device, or the port is taken.
    """
    global _local_rank
    _local_rank = launch.local_rank
    SignalState.stacks_file = Path(report_dir) / "stacks" / f"rank_{launch.rank}.txt"
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError(f"DIST.BACKEND: nccl needs CUDA, but the device is {device.type}; use gloo or auto")
    if launch.world_size == 1:
        yield
        return
    if backend == "gloo" and device.type == "cuda" and shard != "none":
        why = "gloo does not send shards of CUDA tensors"
        raise ConfigError(f"DIST.BACKEND: gloo on CUDA does not go with DIST.SHARD {shard}: {why}; use nccl or auto")
    backend = ("nccl" if device.type == "cuda" else "gloo") if backend == "auto" else backend
    store = create_store(launch, timeout_s)
    if backend == "nccl":
        refuse_shared_device(store, launch, f"GPU {torch.cuda.get_device_properties(device).uuid}")
    limits = (timeout_s, max(timeout_s, startup_timeout_s))
    with _watched(launch, store, limits, report_dir), _joined(launch, store, backend, device, max(limits)):
        yield


@contextlib.contextmanager
def _joined(
    launch: Launch, store: torch_dist.Store, backend: str, device: torch.device, timeout_s: float
) -> Iterator[None]:
    """Have a process group for the length of the block.

    After an exception of this process alone it is left as it is: to destroy it may wait for the others for ever.
    """
    global _host_group
    # The watch ends a run that hangs, with a report; the backend's own time-out comes after it.
    patience = datetime.timedelta(seconds=timeout_s + 60)
    torch_dist.init_process_group(
        backend=backend,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=patience,
        store=store,
        device_id=device if backend == "nccl" else None,  # connects now: an error comes here, not in a step
    )
    _host_group = torch_dist.new_group(backend="gloo", timeout=patience)
    is_left = False
    try:
        yield
    except Exception as error:
        is_left = not getattr(error, "on_all_processes", False)
        raise
    finally:
        _host_group = None
        if not is_left:
            torch_dist.destroy_process_group()


@contextlib.contextmanager
def _watched(launch: Launch, store: torch_dist.Store, limits: tuple[float, float], report_dir: str) -> Iterator[None]:
    """Have the processes watch each other for the length of the block, and tell the others of an exception in it."""
    global _watch
    hub = _open_hub(launch, store, limits)
    found = find_hub(store, launch)
    try:
        if found:
            token, address = found
            _watch = WatchdogClient(launch.rank, address, token, report_dir)
            _watch.start()
    except OSError as error:  # e.g. a firewall that knows only the ports of the backend
        logger.warning("nobody watches this process: %s:%d cannot be reached: %s", *address, error)
    try:
        yield
    except Exception as error:
        if not getattr(error, "on_all_processes", False):
            known, SignalState.is_ending = isinstance(error, ConfigError), True
            if _watch:
                consequence = isinstance(error, PeerError) or is_communication_error(error)
                _watch.fail(error.status if known else 1, known, consequence)
            if known:
                error.one_process = True
        raise
    finally:
        if _watch:
            _watch.close()
        _watch = None
        if hub:
            hub.close()


def _open_hub(launch: Launch, store: torch_dist.Store, limits: tuple[float, float]) -> WatchdogServer | None:
    """Start the hub on process 0 and tell the others where it is; it listens where they reach it and nowhere else."""
    places = exchange_addresses(store, launch)
    if places is None:
        return None
    token, addresses = secrets.token_hex(16), sorted(set(places.values()))
    try:
        hub = WatchdogServer(launch.world_size, token, *limits, addresses)
        hub.start()
    except OSError as error:
        logger.warning("the processes do not watch each other: process 0 cannot listen: %s", error)
        announce_hub(store, token, {})
        return None
    ports = dict(zip(addresses, hub.ports, strict=True))
    announce_hub(store, token, {other: (address, ports[address]) for other, address in places.items()})
    return hub


def is_communication_error(error: Exception) -> bool:
    """Tell whether an error may only say that another process has gone."""
    text = str(error).lower()
    return isinstance(error, torch_dist.DistError) or any(word in text for word in ("gloo", "nccl", "closed by peer"))


def mark_position(position: str) -> None:
    """Note where this process is, e.g. 'epoch 2, step 14': it is alive, and what is said if it dies."""
    if _watch:
        _watch.mark(position)


def begin_start_up() -> None:
    """Note that this process may take long, DIST.STARTUP_TIMEOUT_S, until the next position."""
    if _watch:
        _watch.begin_start_up()


def marked(items: Iterable[T], position: str) -> Iterator[T]:
    """Yield the items and note the position after each."""
    for done, item in enumerate(items, 1):
        yield item
        mark_position(f"{position}, batch {done}")


def all_reduce_max(values: Sequence[float]) -> list[float]:
    """Return the greatest of each value over the processes; the device is not waited for."""
    if not is_distributed():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    torch_dist.all_reduce(tensor, torch_dist.ReduceOp.MAX, group=_host_group)
    return tensor.tolist()


def is_distributed() -> bool:
    """Tell whether this process shares the run with others."""
    return torch_dist.is_available() and torch_dist.is_initialized()


def rank() -> int:
    """Return this process's number, from 0."""
    return torch_dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of processes."""
    return torch_dist.get_world_size() if is_distributed() else 1


def is_main() -> bool:
    """Tell whether this is the process that logs and saves."""
    return rank() == 0


def backend() -> str:
    """Return the name of the group's backend, or 'none'."""
    return torch_dist.get_backend() if is_distributed() else "none"


def barrier() -> None:
    """Wait until every process is here; the device is not waited for."""
    if is_distributed():
        torch_dist.barrier(group=_host_group)


def scaled_all_reduce(tensors: Sequence[torch.Tensor], scale: float | None = None) -> Sequence[torch.Tensor]:
    """Sum each tensor over the processes in place, then multiply by `scale` (None: one over their number).

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
    """Return the rows of every process, in the order of their ranks, on every process: (sum of N, ...).

    Args:
        tensor: (N, ...), N of this process, 0 too; the rest of the shape and the type are the same everywhere.
    """
    if not is_distributed():
        return tensor
    counts = torch.zeros(world_size(), dtype=torch.int64, device=tensor.device)
    counts[rank()] = len(tensor)
    torch_dist.all_reduce(counts)
    most = int(counts.max())
    padded = tensor.new_zeros((most, *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in range(world_size())]
    torch_dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts.tolist(), strict=True)])


class _SummedOverProcesses(torch.autograd.Function):
    """A sum over the processes whose gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the processes, in the shape of `tensor`."""
        total = tensor.clone()
        torch_dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        """Return the sum of the gradients, since every process's result depends on this process's tensor."""
        grad = grad.clone()
        torch_dist.all_reduce(grad)
        return grad


def differentiable_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of `tensor` over the processes; gradients flow back to each of them."""
    return _SummedOverProcesses.apply(tensor) if is_distributed() else tensor


def broadcast_object(value: T) -> T:
    """Return the main process's `value` on every process."""
    if not is_distributed():
        return value
    box = [value]
    torch_dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: T) -> list[T]:
    """Return the `value` of every process, in the order of their ranks, on every process."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    torch_dist.all_gather_object(values, value)
    return values


class PeerError(ConfigError):
    """Another process cannot go on and says why; this one only stops."""


def local_main_first(function: Callable[[], T]) -> T:
    """Return function() of every process, called by one process of each node before the others, e.g. to download.

    Raises:
        PeerError: the process that went first on some node failed (there, its own error is raised).
    """
    first = _local_rank == 0 or not is_distributed()
    result, error = None, None
    if first:
        try:
            result = function()
        except Exception as caught:  # raised again below, once the waiting processes know
            error = caught
    failed = [text for text in gather_objects(str(error) if error else None) if text]
    if error:
        raise error
    if failed:
        raise PeerError(failed[0])
    return result if first else function()
