"""Simulated CUDA device without a GPU: fake tensors, stream order, lifetimes of memory, and waits of the host."""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
# Operations whose result the host needs: a value, or a shape that depends on values.
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")


class Stream:
    """A stream that records which operations of other streams precede its next one."""

    def __init__(self, timeline: "Timeline", device: object = None):
        self.num = 0
        self.seen: dict[Stream, int] = {}
        self._timeline = timeline

    def wait_stream(self, other: "Stream") -> None:
        """Order the next operation after all operations that `other` has received so far."""
        self._timeline.find_early_frees()
        for stream, num in {**other.seen, other: other.num}.items():
            self.seen[stream] = max(num, self.seen.get(stream, 0))

    def synchronize(self) -> None:
        """Let the host wait for all operations."""
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
        """Record the current position of a stream."""
        stream = stream or self._timeline.current
        self._recorded = stream, stream.num

    def synchronize(self) -> None:
        """Let the host wait for the recorded operations; a wait only if one of them is the newest of its stream."""
        if self._recorded:
            self._timeline.wait_on_host(*self._recorded, "event")

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds until another event: one for each operation in between."""
        assert self._recorded and end._recorded, "an event was not recorded"
        for event in (self, end):
            assert self._timeline.is_awaited(*event._recorded), "the host has not waited for an event"
        return float(end._recorded[1] - self._recorded[1])


class Timeline(TorchDispatchMode):
    """Records the operations on CUDA tensors by stream.

    Attributes:
        races: names of operations that read what another stream may not have written yet.
        overwrites: names of operations that write what another stream may not have read or written yet.
        early_frees: names of the last operations, of another stream than the owner of the memory, that may still run
            when the memory is freed and reused.
        unpinned: names of asynchronous copies to or from memory of the host that is not page-locked, and may therefore
            be reused before the copy ends.
        incomplete: names of operations on the host that read the target of a copy before it has ended, or overwrite its
            source.
        waits: names of operations for which the host waits for the newest operation of a stream.
        past_waits: numbers of operations that the device still had to run when the host waited for older ones.
        recorded: the streams that `record_stream` was called with.
        num_operations: the number of operations so far.
    """

    def __init__(self):
        super().__init__()
        self.main = self.current = Stream(self)
        self.races: list[str] = []
        self.overwrites: list[str] = []
        self.early_frees: list[str] = []
        self.unpinned: list[str] = []
        self.incomplete: list[str] = []
        self.waits: list[str] = []
        self.past_waits: list[int] = []
        self.recorded: list[Stream] = []
        self.num_operations = 0
        # By storage: its last writer, and the last operation of each stream that uses it.
        self._writers: dict[int, tuple[Stream, int]] = {}
        self._uses: dict[int, dict[Stream, tuple[int, str]]] = {}
        # The stream that owns the memory, and those that `record_stream` has named.
        self._owners: dict[int, Stream] = {}
        self._allowed: dict[int, set[Stream]] = {}
        # A weak reference keeps the address of a storage from being reused.
        self._alive: dict[int, StorageWeakRef] = {}
        # Copies between the host and the device, by the storage of the host, and the operations known to have ended.
        self._copies: dict[int, list[tuple[Stream, int, bool]]] = {}
        self._kept: list[StorageWeakRef] = []
        self._awaited: dict[Stream, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        is_pinned = bool(kwargs.pop("pin_memory", False))
        # torch has no rule for fused SGD on tensors without values.
        result = None if name == "_fused_sgd_" else func(*args, **kwargs)
        given, made = _tensors((args, kwargs)), _tensors(result)
        written = _written(func, args, kwargs)
        self.num_operations += 1
        self.find_early_frees()
        if is_pinned:
            _set_pinned(made[0])
        sources = {_storage_of(tensor) for tensor in given if tensor.is_cuda}
        is_view = not func._schema.is_mutable and all(
            _storage_of(tensor) in {_storage_of(other) for other in given} for tensor in made
        )
        if not is_view:
            if any(tensor.is_cuda for tensor in (*given, *made)):
                self.current.num += 1
                targets = {_storage_of(tensor) for tensor in [*made, *written] if tensor.is_cuda}
                self._find_races(name, sources, {key for key in targets if key in self._uses})
                self._record(name, sources, targets, [*given, *made])
            self._find_host_faults(name, given, written)
        self._find_waits(name, func, given, made, args, kwargs)
        return result

    @property
    def faults(self) -> dict[str, list[str]]:
        """The faults and waits so far, by attribute; those without any are left out."""
        self.find_early_frees()
        names = ("races", "overwrites", "early_frees", "unpinned", "incomplete", "waits")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    def _find_races(self, name: str, sources: set[int], targets: set[int]) -> None:
        for source in sources & self._writers.keys():
            if not self.current.is_ordered_after(*self._writers[source]):
                self.races.append(name)
        for target in targets:
            if any(not self.current.is_ordered_after(stream, num) for stream, (num, _) in self._uses[target].items()):
                self.overwrites.append(name)

    def _record(self, name: str, sources: set[int], targets: set[int], tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_cuda and _storage_of(tensor) not in self._alive:
                self._alive[_storage_of(tensor)] = StorageWeakRef(tensor.untyped_storage())
                self._owners[_storage_of(tensor)] = self.current
        for target in targets:
            self._writers[target] = self.current, self.current.num
        for key in sources | targets:
            self._uses.setdefault(key, {})[self.current] = self.current.num, name

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the memory of a tensor until a stream no longer uses it."""
        self.recorded.append(stream)
        self._allowed.setdefault(_storage_of(tensor), set()).add(stream)

    def find_early_frees(self) -> None:
        """Look for memory that was freed since the last call, and that its owner may reuse too early."""
        for key in [key for key, storage in self._alive.items() if storage.expired()]:
            owner, allowed = self._owners.pop(key), self._allowed.pop(key, set())
            for stream, (num, name) in self._uses.pop(key, {}).items():
                if stream not in allowed and not owner.is_ordered_after(stream, num):
                    self.early_frees.append(name)
            del self._alive[key]
            self._writers.pop(key, None)

    def wait_on_host(self, stream: Stream, num: int, name: str) -> None:
        """Let the host wait for an operation of a stream and all before it."""
        if num and not self.is_awaited(stream, num):
            if num == stream.num:
                self.waits.append(name)
            else:
                self.past_waits.append(stream.num - num)
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
            self.unpinned.append(label)
        self.wait_on_host(self.current, self.current.num, label)

    def _find_host_faults(self, name: str, given: list, written: list) -> None:
        if any(tensor.is_cuda for tensor in given):
            return
        changed = {_storage_of(tensor) for tensor in written}
        for key in {_storage_of(tensor) for tensor in given} & self._copies.keys():
            left = [copy for copy in self._copies[key] if not self.is_awaited(*copy[:2])]
            if any(from_device or key in changed for _, _, from_device in left):
                self.incomplete.append(name)


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


def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that is treated as page-locked memory."""
    return _set_pinned(tensor.clone())


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

    monkeypatch.setattr(torch.cuda, "Stream", functools.partial(Stream, timeline))
    monkeypatch.setattr(torch.cuda, "Event", functools.partial(Event, timeline))
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: timeline.current)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: timeline.current.synchronize())
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args: True)
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: timeline.record_stream(tensor, stream))
    with FakeTensorMode(allow_non_fake_inputs=True), timeline:
        yield timeline
