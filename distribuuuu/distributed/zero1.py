"""ZeRO stage 1: each process updates its share of the parameters and holds only their optimizer state."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
import torch.distributed as torch_dist

from distribuuuu.config import ConfigError, Problem
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.comm import FullStateDict

Optimizer = torch.optim.Optimizer
# Builds an optimizer from parameter groups.
Build = Callable[[list[dict[str, Any]]], Optimizer]


def _flatten(groups: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(group["params"] for group in groups))


class PartitionedOptimizer(Optimizer):
    """Optimizer that is partitioned over the processes (Rajbhandari et al., arXiv 1910.02054, stage 1).

    `optim` is the optimizer of this process's share.

    The optimizer's update of a parameter must not depend on other parameters. ConfigError: it makes groups of its own.
    """

    def __init__(self, groups: list[dict[str, Any]], build: Build):
        shares = _partition(groups, dist.world_size())
        self.optim = build(shares[dist.rank()])
        own = [len(group["params"]) for group in self.optim.param_groups]
        if own != [len(group["params"]) for group in shares[dist.rank()]]:
            message = f"got zero1; {type(self.optim).__name__} makes parameter groups of its own; fix: use fsdp or none"
            raise ConfigError(Problem("DIST.SHARD", message))
        self._shares = [_flatten(share) for share in shares]
        super().__init__(groups, {})
        self.defaults = self.optim.defaults
        _copy_settings(self.optim.param_groups, self.param_groups)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update this process's share, then receive the others'. Every process must call it.

        Takes the memory of all weights for the exchange.
        """
        _copy_settings(self.param_groups, self.optim.param_groups)
        self.optim.step()
        _copy_settings(self.optim.param_groups, self.param_groups)  # with the counters that some keep there
        _exchange(self._shares)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the equivalent single optimizer, on the CPU; without state if not main.

        Every process must call it. The main process receives the shares in host memory.
        """
        indices = {parameter: index for index, parameter in enumerate(_flatten(self.param_groups))}
        host = lambda value: value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value  # noqa: E731
        own = {indices[parameter]: {name: host(value) for name, value in entry.items()}
               for parameter, entry in self.optim.state.items()}  # fmt: skip
        shares: list[Any] | None = [None] * dist.world_size() if dist.is_main() else None
        torch_dist.gather_object(own, shares, group=dist.GroupState.host_group)
        state = dict(sorted(item for share in shares or () for item in share.items()))
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
        _copy_settings(self.optim.param_groups, self.param_groups)


def _partition(groups: list[dict[str, Any]], num: int) -> list[list[dict[str, Any]]]:
    """Return the groups of each of `num` processes: the largest parameter first, to the smallest share so far."""
    shares: list[list[dict[str, Any]]] = [[{**group, "params": []} for group in groups] for _ in range(num)]
    sizes = [0] * num
    for index, group in enumerate(groups):
        for parameter in sorted(group["params"], key=torch.Tensor.numel, reverse=True):
            smallest = sizes.index(min(sizes))
            shares[smallest][index]["params"].append(parameter)
            sizes[smallest] += parameter.numel()
    return shares


def _copy_settings(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Copy the settings of parameter groups, e.g. the learning rate, but not the parameters."""
    for own, other in zip(source, target, strict=True):
        other.update({name: value for name, value in own.items() if name != "params"})


@torch.no_grad()
def _exchange(shares: list[list[torch.Tensor]]) -> None:
    """Copy the share of each process to the other processes, by one collective for each type of parameters."""
    for like in {parameter.dtype: parameter for share in shares for parameter in share}.values():
        typed = [[parameter for parameter in share if parameter.dtype == like.dtype] for share in shares]
        sizes = [[parameter.numel() for parameter in share] for share in typed]
        most = max(map(sum, sizes))
        padding = like.new_zeros(most - sum(sizes[dist.rank()]))
        sent = torch.cat([*(parameter.flatten() for parameter in typed[dist.rank()]), padding])
        received = sent.new_empty(len(shares) * most)
        dist.all_gather_single(received, sent)
        for rank, (share, flat) in enumerate(zip(typed, received.split(most), strict=True)):
            if share and rank != dist.rank():
                values = flat[: sum(sizes[rank])].split(sizes[rank])
                torch._foreach_copy_(share, [value.view_as(own) for value, own in zip(values, share, strict=True)])
