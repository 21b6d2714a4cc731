"""Simulated CUDA device without a GPU: fake tensors, stream order, races and synchronizations of the host."""

import contextlib
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
# Operations whose result the host needs: a value, or a shape that depends on values.
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")


class Stream:
    """A stream that records which operations of other streams precede its next one."""

    def __init__(self, device: object = None):
        self.num = 0
        self.seen: dict[Stream, int] = {}

    def wait_stream(self, other: "Stream") -> None:
        """Order the next operation after all operations that `other` has received so far."""
        for stream, num in {**other.seen, other: other.num}.items():
            self.seen[stream] = max(num, self.seen.get(stream, 0))


class Timeline(TorchDispatchMode):
    """Records the operations on CUDA tensors by stream.

    Attributes:
        races: names of operations that read what another stream may not have written yet.
        waits: names of operations for which the host waits for the device.
        recorded: the streams that `record_stream` was called with.
        num_operations: the number of operations so far.
    """

    def __init__(self):
        super().__init__()
        self.main = self.current = Stream()
        self.races: list[str] = []
        self.waits: list[str] = []
        self.recorded: list[Stream] = []
        self.num_operations = 0
        self._writers: dict[int, tuple[Stream, int]] = {}
        self._kept: list[torch.UntypedStorage] = []  # keeps the address of a storage from being reused

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        # torch has no rule for fused SGD on tensors without values.
        result = None if name == "_fused_sgd_" else func(*args, **kwargs)
        given, made = _tensors((args, kwargs)), _tensors(result)
        self.num_operations += 1
        self._find_waits(name, given, made, args, kwargs)
        sources = {_storage_of(tensor) for tensor in given if tensor.is_cuda}
        is_view = not func._schema.is_mutable and all(_storage_of(tensor) in sources for tensor in made)
        if not is_view and any(tensor.is_cuda for tensor in (*given, *made)):
            self._find_races(name, sources)
            self._kept += [tensor.untyped_storage() for tensor in made]
            for tensor in [*made, *given[:1]] if func._schema.is_mutable else made:
                self._writers[_storage_of(tensor)] = self.current, self.current.num
        return result

    def _find_races(self, name: str, sources: set[int]) -> None:
        self.current.num += 1
        for source in sources & self._writers.keys():
            stream, num = self._writers[source]
            if stream is not self.current and num > self.current.seen.get(stream, 0):
                self.races.append(name)

    def _find_waits(self, name: str, given: list, made: list, args: tuple, kwargs: dict) -> None:
        reads = name in READS or name == "index" and any(tensor.dtype is torch.bool for tensor in given[1:])
        if reads and any(tensor.is_cuda for tensor in given):
            self.waits.append(name)
        if name in ("_to_copy", "copy_"):
            source, target = (given[1], given[0]) if name == "copy_" else (given[0], made[0])
            asynchronous = kwargs.get("non_blocking") or name == "copy_" and len(args) > 2 and args[2]
            pinned = target.is_cuda and getattr(source, "in_locked_pages", False)
            if source.is_cuda != target.is_cuda and not (asynchronous and pinned):
                self.waits.append(f"{name} from {source.device.type}")


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that is treated as page-locked memory."""
    copy = tensor.clone()
    copy.in_locked_pages = True
    return copy


@contextlib.contextmanager
def fake_cuda(monkeypatch) -> Iterator[Timeline]:
    """Run the block with a CUDA device whose tensors have no values; yield the timeline of its operations."""
    timeline = Timeline()

    @contextlib.contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        before, timeline.current = timeline.current, stream
        yield
        timeline.current = before

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: timeline.current)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args: True)
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: timeline.recorded.append(stream))
    with FakeTensorMode(allow_non_fake_inputs=True), timeline:
        yield timeline
