"""ZeRO: data parallelism with sharded optimizer state, gradients and parameters, in three stages.

With data parallelism all N ranks store the same parameters, gradients and Adam state: 1 + 1 + 2 parameter sizes. In
stage 1 each rank stores and updates 1/N of the optimizer state. In stage 2 the gradient of a layer is reduced to its
owners as soon as it is complete, and freed. In stage 3 the parameters of a layer are gathered just before they are
needed. An all-reduce is a reduce-scatter plus an all-gather, so stages 1 and 2 send as much as DDP. Stage 3 gathers
twice: 1.5 times as much (Rajbhandari et al., 2020, ZeRO). FSDP2 is stage 3.

Run:
    torchrun --standalone --nproc_per_node=2 tutorial/zero.py
Look at:
    Memory after backward and bytes sent per step (with a ring), in parameter sizes, predicted | measured.
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
    """The parameters of one layer as views of one flat vector; each rank owns one shard of it."""

    def __init__(self, module, stage):
        self.params, self.stage = list(module.parameters()), stage
        self.flat = parameters_to_vector(self.params).detach()  # divisible by N here; otherwise padding is needed
        vector_to_parameters(self.flat, self.params)  # parameters become views of it
        self.shard = self.flat.chunk(dist.get_world_size())[dist.get_rank()]
        for param in self.params if stage >= 2 else ():
            param.register_post_accumulate_grad_hook(self.reduce)
        if stage == 3:
            self.shard = self.shard.clone()
            self.free()
            module.register_forward_pre_hook(self.gather)
            module.register_forward_hook(self.free)
            module.register_full_backward_pre_hook(self.gather)

    def gather(self, *_):
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(self.flat, self.shard)  # before torch 2.14

    def free(self, *_):
        self.flat.untyped_storage().resize_(0)  # the views are valid again after the next gather

    def reduce(self, *_):
        """When all gradients are complete, average them over the ranks and keep this rank's shard."""
        if any(param.grad is None for param in self.params):
            return
        grad = parameters_to_vector([param.grad for param in self.params]) / dist.get_world_size()
        self.shard.grad = torch.empty_like(self.shard)
        getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(self.shard.grad, grad)
        for param in self.params:
            param.grad = None
        if self.stage == 3:
            self.free()


class Meter(TorchDispatchMode):
    """Allocated memory and bytes sent by collectives, both since the mode was entered."""

    def __enter__(self):
        self.storages, self.sent = [], 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if dist.tensor.DTensor in types:
            return NotImplemented  # dispatch again on the local tensors
        out = func(*args, **(kwargs or {}))
        inputs, outputs = ([x for x in tree_leaves(y) if isinstance(x, torch.Tensor)] for y in ((args, kwargs), out))
        if func.namespace == "c10d":
            rounds = 2 if func is torch.ops.c10d.allreduce_.default else 1  # each sends (N-1)/N of the tensor
            self.sent += rounds * max(tensor.nbytes for tensor in inputs)
        known = {tensor.untyped_storage()._cdata for tensor in inputs}  # views and in-place results
        self.storages += [weakref.ref(x.untyped_storage()) for x in outputs if x.untyped_storage()._cdata not in known]
        return out

    def allocated(self):
        return sum(storage().nbytes() for storage in self.storages if storage() is not None)


def train(method, device):
    """Take STEPS steps; return (all weights as one vector, memory after backward, bytes sent per step)."""
    rank, n = (0, 1) if method == "one process" else (dist.get_rank(), dist.get_world_size())
    x, y = torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(1))[:, rank::n].to(device)
    torch.manual_seed(0)
    with Meter() as meter:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))).to(device)
        layers = [Layer(block[0], stage=int(method[6])) for block in model] if method.startswith("stage") else []
        if method == "FSDP2":
            for module in (*model, model):
                fully_shard(module, mesh=dist.init_device_mesh(device.type, (n,)))
        elif method in ("DDP", "ZeroRedundancyOptimizer"):
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.Adam([layer.shard for layer in layers] or model.parameters())
        if method == "ZeroRedundancyOptimizer":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
        for _ in range(STEPS):
            meter.sent = 0
            nn.functional.mse_loss(model(x), y).backward()
            memory = meter.allocated()
            for layer in layers if method == "stage 1" else ():
                layer.reduce()
            optimizer.step()
            optimizer.zero_grad()
            for layer in layers if method in ("stage 1", "stage 2") else ():
                layer.gather()
    for layer in layers if method == "stage 3" else ():
        layer.gather()
    weights = [param.full_tensor() if method == "FSDP2" else param for param in model.parameters()]
    return parameters_to_vector(weights).detach(), memory, meter.sent * (n - 1) / n


def main():
    on_cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    torch.cuda.set_device(device if on_cuda else -1)  # FSDP2 uses the current device; -1 does nothing
    dist.init_process_group("nccl" if on_cuda else "gloo", device_id=device if on_cuda else None)
    n, worst, expected = dist.get_world_size(), 0.0, train("one process", device)[0]
    assert WIDTH * (WIDTH + 1) % n == BATCH % n == 0, f"a layer or the batch is not divisible by {n} processes"
    methods = {"DDP": (4, 2), "stage 1": (2 + 2 / n, 2), "stage 2": (1 + 3 / n, 2), "stage 3": (4 / n, 3)}
    has_fsdp2 = on_cuda or hasattr(torch.cpu.Stream, "record_event")
    methods |= {"ZeroRedundancyOptimizer": (2 + 2 / n, 3)} | ({"FSDP2": (4 / n, 3)} if has_fsdp2 else {})
    table = [f"{n} processes on {device.type}; unit: {len(expected)} parameters = {expected.nbytes / 1e3:.1f} kB\n"]
    table += [f"{'':<25}     memory        sent per step       error"]
    for method, (predicted, rounds) in methods.items():
        weights, memory, sent = train(method, device)
        error, traffic = (weights - expected).abs().max().item(), rounds * (n - 1) / n
        worst, memory, sent = max(worst, error), memory / expected.nbytes, sent / expected.nbytes
        table += [f"{method:<25}{predicted:.3f} | {memory:.3f}    {traffic:.3f} | {sent:.3f}      {error:.1e}"]
        assert worst < 1e-5 and abs(memory / predicted - 1) < 0.01 and abs(sent / traffic - 1) < 0.01, table[-1]
    table += ["FSDP2                    skipped: needs torch 2.7 on a CPU"] if not has_fsdp2 else []
    table += [f"ok: {len(methods)} methods equal one process within {worst:.1e}; memory and traffic as predicted"]
    if dist.get_rank() == 0:
        print("\n".join(table))
    dist.barrier()  # exit together: gloo may still be sending
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
