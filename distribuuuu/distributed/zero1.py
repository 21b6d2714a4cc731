"""ZeRO stage 1: each process updates its share of the parameters and holds only their optimizer state."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.fsdp import FullStateDict, use_full_state_dict

Optimizer = torch.optim.Optimizer
# Builds an optimizer from parameter groups.
Build = Callable[[list[dict[str, Any]]], Optimizer]


def _flatten(groups: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(group["params"] for group in groups))


class _TensorSpec(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


class PartitionedOptimizer(ZeroRedundancyOptimizer):
    """Optimizer that is partitioned over the processes (Rajbhandari et al., arXiv 1910.02054, stage 1).

    Args:
        groups: parameter groups.
        build: builds the optimizer of one process; its update of a parameter must not depend on other parameters.
    """

    def __init__(self, groups: list[dict[str, Any]], build: Build):
        super().__init__(groups, optimizer_class=build)  # type: ignore[arg-type]  # it is only called
        self.defaults = self.optim.defaults

    def _get_is_trainable_mask(self) -> list[bool]:
        """Return an empty mask: parameters that are frozen later are skipped anyway, for lack of a gradient."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the equivalent single optimizer; without state if not main.

        Every process must call it. The main process receives one tensor at a time.
        """
        parameters = _flatten(self.param_groups)
        indices = {parameter: index for index, parameter in enumerate(parameters)}
        own = {indices[parameter]: entry for parameter, entry in self.optim.state.items()}
        specs = {index: {name: _spec_of(value) for name, value in entry.items()} for index, entry in own.items()}
        owners = {
            index: (rank, entry)
            for rank, entries in enumerate(dist.gather_objects(specs))
            for index, entry in entries.items()
        }
        state = {}
        for index, (rank, entry) in sorted(owners.items()):
            device, values = parameters[index].device, own.get(index, {})
            received = {name: _send_to_main(values.get(name), spec, rank, device) for name, spec in entry.items()}
            if dist.is_main():
                state[index] = received
        return FullStateDict(state=state, param_groups=Optimizer.state_dict(self)["param_groups"])

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Load this process's share of the state dict of a single optimizer.

        Raises:
            ValueError: the groups or their sizes differ, or the state is another optimizer's.
        """
        saved = content["param_groups"]
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("its parameter groups have other sizes")
        index_of = dict(zip(_flatten(self.param_groups), _flatten(saved), strict=True))
        groups = [
            {**group, "params": [index_of[parameter] for parameter in own["params"]]}
            for group, own in zip(saved, self.optim.param_groups, strict=True)
        ]
        state = {index: content["state"][index] for index in _flatten(groups) if index in content["state"]}
        self.optim.load_state_dict({"state": state, "param_groups": groups})
        self._sync_param_groups(self.optim.param_groups, self.param_groups)  # type: ignore[attr-defined]  # untyped class


def _spec_of(value: Any) -> Any:
    """Return shape and type of a tensor; single numbers themselves."""
    if not isinstance(value, torch.Tensor):
        return value
    return _TensorSpec(value.shape, value.dtype) if value.dim() else value.cpu()


def _send_to_main(value: Any, spec: Any, owner: int, device: torch.device) -> Any:
    """Return the owner's value on the CPU of the main process, None elsewhere; single numbers on every process."""
    if not isinstance(spec, _TensorSpec):
        return spec
    if owner == 0:
        return value.detach().to("cpu", copy=True) if dist.is_main() else None
    if dist.is_main():
        received = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        torch_dist.recv(received, src=owner)
        return received.cpu()
    if dist.rank() == owner:
        torch_dist.send(value.contiguous(), dst=0)
    return None


def build_sharded_optimizer(cfg, groups: list[dict[str, Any]], build: Build) -> Optimizer:
    """Return `build(groups)`, partitioned if DIST.SHARD is zero1; its state dict is full for any DIST.SHARD."""
    if cfg.DIST.SHARD == "zero1" and dist.is_distributed():
        return PartitionedOptimizer(groups, build)
    return use_full_state_dict(build(groups))
