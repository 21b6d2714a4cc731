"""Simulated CUDA device without a GPU: fake tensors, stream order, lifetimes of memory, and waits of the host."""

import collections
import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
# Operations whose result the host needs: a value, or a shape that depends on values.
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")


class Stream:
    """A stream that records which operations of other streams precede its next one."""

    def __init__(self, timeline: "Timeline", device: object = None):
        self.num, self._timeline = 0, timeline
        self.seen: dict[Stream, int] = {}

    def wait_stream(self, other: "Stream") -> None:
        self._timeline.find_early_frees()
        for stream, num in {**other.seen, other: other.num}.items():
            self.seen[stream] = max(num, self.seen.get(stream, 0))

    def synchronize(self) -> None:
        self._timeline.wait_on_host(self, self.num, "synchronize")

    def is_ordered_after(self, stream: "Stream", num: int) -> bool:
        """Tell whether the next operation runs after the operation `num` of a stream."""
        return stream is self or num <= self.seen.get(stream, 0)


class Event:
    """The end of the operations that a stream has received when it is recorded."""

    def __init__(self, timeline: "Timeline", enable_timing: bool = False, blocking: bool = False):
        self._timeline = timeline
        self._recorded: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._timeline.current
        self._recorded = stream, stream.num

    def synchronize(self) -> None:
        if self._recorded:
            self._timeline.wait_on_host(*self._recorded, "event")

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds until another event: one for each operation in between."""
        assert self._recorded and end._recorded, "an event was not recorded"
        assert all(self._timeline.is_awaited(*event._recorded) for event in (self, end)), "the host has not waited"
        return float(end._recorded[1] - self._recorded[1])


@dataclass
class Memory:
    """Storage on the device: its owner, its last writer, the last use of each stream, the streams of record_stream."""

    storage: StorageWeakRef  # keeps the address from being reused
    owner: Stream
    writer: tuple[Stream, int] | None = None
    uses: dict[Stream, tuple[int, str]] = field(default_factory=dict)
    allowed: set[Stream] = field(default_factory=set)


class Timeline(TorchDispatchMode):
    """Records the operations on CUDA tensors by stream.

    Attributes:
        found: names of operations by fault. `races` read what another stream may not have written yet. `overwrites`
            write what another stream may not have read or written yet. `early_frees` of another stream than the owner
            of the memory may still run when the memory is freed. `unpinned` are asynchronous copies of memory of the
            host that is not page-locked. `incomplete`, on the host, read the target of a copy before it has ended, or
            overwrite its source. For `waits`, the host waits for the newest operation of a stream.
        recorded: the streams that `record_stream` was called with.
        num_operations: the number of operations so far.
    """

    def __init__(self):
        super().__init__()
        self.main = self.current = Stream(self)
        self.second = Stream(self)  # that of the device cuda:1, which is never the current one
        self.found: dict[str, list[str]] = collections.defaultdict(list)
        self.recorded: list[Stream] = []
        self.num_operations = 0
        self._memory: dict[int, Memory] = {}
        # Copies between the host and the device, by the storage of the host, and the operations known to have ended.
        self._copies: dict[int, list[tuple[Stream, int, bool]]] = {}
        self._kept: list[StorageWeakRef] = []
        self._awaited: dict[Stream, int] = {}

    @property
    def waits(self) -> list[str]:
        """The operations that the host has waited for."""
        return self.found["waits"]

    @property
    def faults(self) -> dict[str, list[str]]:
        """The faults and waits so far."""
        self.find_early_frees()
        return {kind: names for kind, names in self.found.items() if names}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        is_pinned = bool(kwargs.pop("pin_memory", False))
        # torch has no rule for fused SGD, and for a rate that is a tensor, on tensors without values.
        has_rule = name != "_fused_sgd_" and func._schema.overload_name != "tensor_lr"
        result = func(*args, **kwargs) if has_rule else None
        given, made, written = _tensors((args, kwargs)), _tensors(result), _written(func, args, kwargs)
        self.num_operations += 1
        self.find_early_frees()
        before, is_second = self.current, any(tensor.is_cuda and tensor.device.index == 1 for tensor in given + made)
        self.current = self.second if is_second else before
        if is_pinned:
            _set_pinned(made[0])
        storages = {_storage_of(tensor) for tensor in given}
        if func._schema.is_mutable or any(_storage_of(tensor) not in storages for tensor in made):  # no view
            self._use(name, given, made, written)
            self._find_host_faults(name, given, written)
        self._find_waits(name, func, given, made, args, kwargs)
        self.current = before
        return result

    def _use(self, name: str, given: list, made: list, written: list) -> None:
        both = (given, made + written)
        sources, targets = ({_storage_of(tensor) for tensor in each if tensor.is_cuda} for each in both)
        if not sources | targets:
            return
        self.current.num += 1
        for tensor in (*given, *made):
            if tensor.is_cuda and _storage_of(tensor) not in self._memory:
                self._memory[_storage_of(tensor)] = Memory(StorageWeakRef(tensor.untyped_storage()), self.current)
        for memory in map(self._memory.get, sources):
            if memory.writer and not self.current.is_ordered_after(*memory.writer):
                self.found["races"].append(name)
        for memory in map(self._memory.get, targets):
            if any(not self.current.is_ordered_after(stream, num) for stream, (num, _) in memory.uses.items()):
                self.found["overwrites"].append(name)
            memory.writer = self.current, self.current.num
        for key in sources | targets:
            self._memory[key].uses[self.current] = self.current.num, name

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the memory of a tensor until a stream no longer uses it."""
        self.recorded.append(stream)
        self._memory[_storage_of(tensor)].allowed.add(stream)

    def find_early_frees(self) -> None:
        """Look for memory that was freed since the last call, and that its owner may reuse too early."""
        for key in [key for key, memory in self._memory.items() if memory.storage.expired()]:
            memory = self._memory.pop(key)
            for stream, (num, name) in memory.uses.items():
                if stream not in memory.allowed and not memory.owner.is_ordered_after(stream, num):
                    self.found["early_frees"].append(name)

    def wait_on_host(self, stream: Stream, num: int, name: str) -> None:
        """Let the host wait for an operation of a stream and all before it."""
        if num == stream.num and not self.is_awaited(stream, num):
            self.waits.append(name)
        for other, position in {**stream.seen, stream: num}.items():
            self._awaited[other] = max(position, self._awaited.get(other, 0))

    def is_awaited(self, stream: Stream, num: int) -> bool:
        """Tell whether the host knows that an operation has ended."""
        return num <= self._awaited.get(stream, 0)

    def _find_waits(self, name: str, func, given: list, made: list, args: tuple, kwargs: dict) -> None:
        on_device = any(tensor.is_cuda for tensor in given)
        indices = [tensor for tensor in given[1:] if name in ("index", "index_put_", "index_put")]
        is_masked = any(tensor.dtype is torch.bool for tensor in indices) and not (
            name != "index" and given[-1].numel() == 1  # torch fills by the mask
        )
        if on_device and (name in READS or is_masked):
            self.wait_on_host(self.current, self.current.num, name)
        elif on_device and any(not tensor.is_cuda and tensor.ndim for tensor in indices):
            self.wait_on_host(self.current, self.current.num, f"{name} from cpu")
        if name in ("_to_copy", "copy_"):
            source, target = (given[1], given[0]) if name == "copy_" else (given[0], made[0])
            asynchronous = kwargs.get("non_blocking") or name == "copy_" and len(args) > 2 and args[2]
            if source.is_cuda != target.is_cuda:
                self._copy(name, source, target, bool(asynchronous))

    def _copy(self, name: str, source: torch.Tensor, target: torch.Tensor, asynchronous: bool) -> None:
        on_host, label = target if source.is_cuda else source, f"{name} from {source.device.type}"
        if asynchronous and is_pinned(on_host):
            self._kept.append(StorageWeakRef(on_host.untyped_storage()))
            self._copies.setdefault(_storage_of(on_host), []).append((self.current, self.current.num, source.is_cuda))
            return
        if asynchronous:
            self.found["unpinned"].append(label)
        self.wait_on_host(self.current, self.current.num, label)

    def _find_host_faults(self, name: str, given: list, written: list) -> None:
        if any(tensor.is_cuda for tensor in given):
            return
        changed = {_storage_of(tensor) for tensor in written}
        for key in {_storage_of(tensor) for tensor in given} & self._copies.keys():
            left = [copy for copy in self._copies[key] if not self.is_awaited(*copy[:2])]
            if any(from_device or key in changed for _, _, from_device in left):
                self.found["incomplete"].append(name)


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(func, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the tensors that an operation changes."""
    changed = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed += _tensors(args[position] if position < len(args) else kwargs.get(argument.name))
    return changed


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _set_pinned(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().in_locked_pages = True
    return tensor


def is_pinned(tensor: torch.Tensor, device: object = None) -> bool:
    """Tell whether a tensor, or the one that it is a view of, comes from `pin_memory`."""
    return hasattr(tensor.untyped_storage(), "in_locked_pages")


@contextlib.contextmanager
def fake_cuda(monkeypatch) -> Iterator[Timeline]:
    """Run the block with a CUDA device whose tensors have no values; yield the timeline of its operations."""
    timeline = Timeline()
    if torch.cuda.is_available():
        torch.cuda.init()  # it sets `default_generators`, which would be lost after the block

    @contextlib.contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        before, timeline.current = timeline.current, stream
        yield
        timeline.current = before

    for name, value in {
        "Stream": functools.partial(Stream, timeline), "Event": functools.partial(Event, timeline), "stream": on_stream,
        "current_stream": lambda device=None: timeline.second if device == SECOND else timeline.current,
        "default_generators": (torch.Generator(),),
        "synchronize": lambda device=None: timeline.current.synchronize(), "is_bf16_supported": lambda *args: True,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: _set_pinned(tensor.clone()))
    monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: timeline.record_stream(tensor, stream))
    with FakeTensorMode(allow_non_fake_inputs=True), timeline:
        yield timeline
