"""ZeRO: data parallelism that does not hold everything N times, in three stages, each cutting one more thing into N.

With data parallelism all N ranks hold the same parameters, gradients and Adam state, 1 + 1 + 2 times the parameters. In
stage 1 each rank keeps and updates the state of its own 1/N; in stage 2 a gradient goes to its owner, and its memory
away, as soon as its layer is through; in stage 3 a layer's parameters are gathered just before they are needed. An
all-reduce is a reduce-scatter and an all-gather, so stages 1 and 2 send no more than DDP; stage 3 gathers twice, 1.5
times as much (Rajbhandari et al., 2020, ZeRO). ZeroRedundancyOptimizer all-reduces, then broadcasts. FSDP2 is stage 3.

Run:
    torchrun --standalone --nproc_per_node=2 tutorial/zero.py
Look at:
    Memory after backward and bytes sent in a step (as around a ring), in sizes of the parameters, predicted | counted.
"""

import os
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STEPS, BATCH, WIDTH, LAYERS = 5, 24, 64, 8


class Layer:
    """The parameters of one layer as views of one flat vector, of which each rank owns a part."""

    def __init__(self, module, stage):
        self.params, self.stage = list(module.parameters()), stage
        self.flat = parameters_to_vector(self.params).detach()  # N divides its size here; else it would be padded
        vector_to_parameters(self.flat, self.params)  # makes them views
        self.own = self.flat.chunk(dist.get_world_size())[dist.get_rank()]
        for param in self.params if stage >= 2 else ():
            param.register_post_accumulate_grad_hook(self.reduce)
        if stage == 3:
            self.own = self.own.clone()
            self.free()
            module.register_forward_pre_hook(self.gather)
            module.register_forward_hook(self.free)
            module.register_full_backward_pre_hook(self.gather)

    def gather(self, *_):
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        dist.all_gather_into_tensor(self.flat, self.own)

    def free(self, *_):
        self.flat.untyped_storage().resize_(0)  # its views are good again after the next gather

    def reduce(self, *_):
        """Once all gradients are there, average them over the ranks and keep the own part."""
        if any(param.grad is None for param in self.params):
            return
        grad = parameters_to_vector([param.grad for param in self.params]) / dist.get_world_size()
        self.own.grad = torch.empty_like(self.own)
        dist.reduce_scatter_tensor(self.own.grad, grad)
        for param in self.params:
            param.grad = None
        if self.stage == 3:
            self.free()


class Meter(TorchDispatchMode):
    """What is alive of all that was allocated under the mode, and what its collectives sent, in bytes."""

    def __enter__(self):
        self.storages, self.sent = [], 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if dist.tensor.DTensor in types:
            return NotImplemented  # and come again with the operation on the local part
        out = func(*args, **(kwargs or {}))
        given, made = ([x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)] for tree in ((args, kwargs), out))
        if func.namespace == "c10d":
            rounds = 2 if func is torch.ops.c10d.allreduce_.default else 1  # each sends (N-1)/N of the tensor
            self.sent += rounds * max(tensor.nbytes for tensor in given)
        known = {tensor.untyped_storage()._cdata for tensor in given}  # of views and of what was changed in place
        self.storages += [weakref.ref(x.untyped_storage()) for x in made if x.untyped_storage()._cdata not in known]
        return out

    def held(self):
        return sum(storage().nbytes() for storage in self.storages if storage() is not None)


def train(way, device):
    """Take STEPS steps; return (all weights as one vector, bytes held after backward, bytes sent in a step)."""
    rank, n = (0, 1) if way == "one process" else (dist.get_rank(), dist.get_world_size())
    x, y = torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(1))[:, rank::n].to(device)
    torch.manual_seed(0)
    with Meter() as meter:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))).to(device)
        layers = [Layer(block[0], stage=int(way[6])) for block in model] if way.startswith("stage") else []
        if way == "FSDP2":
            for module in (*model, model):
                fully_shard(module, mesh=dist.init_device_mesh(device.type, (n,)))
        elif way in ("DDP", "ZeroRedundancyOptimizer"):
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.Adam([layer.own for layer in layers] or model.parameters())
        if way == "ZeroRedundancyOptimizer":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
        for _ in range(STEPS):
            meter.sent = 0
            nn.functional.mse_loss(model(x), y).backward()
            held = meter.held()
            for layer in layers if way == "stage 1" else ():
                layer.reduce()
            optimizer.step()
            optimizer.zero_grad()
            for layer in layers if way in ("stage 1", "stage 2") else ():
                layer.gather()
    for layer in layers if way == "stage 3" else ():
        layer.gather()
    weights = [param.full_tensor() if way == "FSDP2" else param for param in model.parameters()]
    return parameters_to_vector(weights).detach(), held, meter.sent * (n - 1) / n


def main():
    on_cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    torch.cuda.set_device(device if on_cuda else -1)  # where FSDP2 puts its parameters; -1 does nothing
    dist.init_process_group("nccl" if on_cuda else "gloo", device_id=device if on_cuda else None)
    n, worst, expected = dist.get_world_size(), 0.0, train("one process", device)[0]
    assert WIDTH * (WIDTH + 1) % n == BATCH % n == 0, f"a layer or a batch does not divide by {n} processes"
    ways = {"DDP": (4, 2), "stage 1": (2 + 2 / n, 2), "stage 2": (1 + 3 / n, 2), "stage 3": (4 / n, 3)}
    has_fsdp2 = on_cuda or hasattr(torch.cpu.Stream, "record_event")
    ways |= {"ZeroRedundancyOptimizer": (2 + 2 / n, 3)} | ({"FSDP2": (4 / n, 3)} if has_fsdp2 else {})
    table = [f"{n} processes on {device.type}; 1 = {len(expected)} parameters = {expected.nbytes / 1e3:.1f} kB\n"]
    table += [f"{'':<25}  memory held    sent in a step   off one process"]
    for way, (memory, rounds) in ways.items():
        weights, held, sent = train(way, device)
        off, wire, held, sent = weights - expected, rounds * (n - 1) / n, held / expected.nbytes, sent / expected.nbytes
        worst = max(worst, off.abs().max().item())
        table += [f"{way:<25}{memory:.3f} | {held:.3f}    {wire:.3f} | {sent:.3f}      {off.abs().max():.1e}"]
        assert worst < 1e-5 and abs(held / memory - 1) < 0.01 and abs(sent / wire - 1) < 0.01, table[-1]
    table += ["FSDP2                    not tried: on a CPU it needs torch 2.7"] if not has_fsdp2 else []
    table += [f"ok: {len(ways)} ways end {worst:.1e} from one process's weights; memory and bytes as predicted to 1%"]
    if dist.get_rank() == 0:
        print("\n".join(table))
    dist.barrier()  # gloo still holds the last tensor for a moment: leave together, when all is done
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
