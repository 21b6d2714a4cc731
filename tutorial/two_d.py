"""Two dimensions: on a 2 x 2 mesh TP cuts each layer along one axis, FSDP its part along the other; four equal one.

A device mesh names the ranks by two coordinates. Along its rows ("tp") a layer is cut as in lesson 23: its ranks work
on the same samples and add up activations four times in each block, so they belong together on the fastest link, the
inside of a machine. Along its columns ("dp") the ranks work on other samples, and FSDP2 (Zhao et al., 2023) cuts what
tensor parallelism left of each parameter once more: it is gathered for a block's forward and backward, and its
gradient is reduce-scattered. That is less often and can overlap with computing, so it may cross machines.

Run:
    torchrun --standalone --nproc_per_node=4 tutorial/two_d.py
Look at:
    Who talks to whom about what, and how many numbers a rank holds of a matrix: 1/4 on 4 ranks.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

BLOCKS, WIDTH, HEADS, TOKENS, BATCH, STEPS = 2, 64, 4, 16, 8, 5


def join():
    """Join the process group, nccl where each local process has a card, and return this rank's device."""
    torch.set_num_threads(1)
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    return device


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a shortcut."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        # The outputs of qkv are ordered by head, so a slice of its columns is whole heads: -1 is "those of this rank".
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (-1, 3, WIDTH // HEADS)).permute(3, 0, 2, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def build_model(device):
    """Return a small transformer, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.LayerNorm(WIDTH)).to(device)


def split(model, mesh):
    """Cut the model along both dimensions of the mesh: first the layers, then what is left of each parameter."""
    column, row = ColwiseParallel, RowwiseParallel
    for block in model[:BLOCKS]:
        parallelize_module(block, mesh["tp"], {"qkv": column(), "out": row(), "up": column(), "down": row()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


class Collectives(TorchDispatchMode):
    """Note the bytes of every collective that runs, by operation."""

    def __init__(self):
        super().__init__()
        self.bytes = {"all_reduce": [], "_allgather_base_": [], "_reduce_scatter_base_": []}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as operations on plain tensors
        name = operation.name().split("::")[1]
        if name in self.bytes:
            self.bytes[name].append(max(x.nbytes for x in args if isinstance(x, torch.Tensor)))
        return operation(*args, **(kwargs or {}))


def train(model, device, part=0, parts=1):
    """Train on this part of every batch; return the collectives of the last step."""
    draw = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for _ in range(STEPS):
        inputs, targets = torch.randn(2, BATCH, TOKENS, WIDTH, generator=draw).chunk(parts, 1)[part].to(device)
        with Collectives() as collectives:
            F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(collectives.bytes.values())


def part_of(whole, placements, mesh):
    """Return this rank's part of a parameter: what FSDP leaves of what tensor parallelism leaves of it."""
    dp, tp = mesh.get_coordinate()
    if len(placements) == 2 and placements[1].is_shard():
        whole = whole.chunk(2, placements[1].dim)[tp]
    return whole.chunk(2)[dp].detach()


def draw(mesh, *collectives):
    """Print the mesh, and what a step sends along its two directions."""
    first, second = ("──── tp ────".join(f"[rank {rank}]" for rank in ranks) for ranks in mesh.mesh.tolist())
    reduces, gathers, scatters = (f"{len(sizes)} x {sum(sizes) / len(sizes) / 1024:3.0f} KiB" for sizes in collectives)
    print(f"  {first}  samples 0-3  │ tp: {reduces} all-reduce activations")
    print("      │                   │                  │")
    print(f"      dp                  dp                 │ dp: {gathers} all-gather parameters")
    print(f"      │                   │                  │     {scatters} reduce-scatter gradients")
    print(f"  {second}  samples 4-7  │")


def main():
    device = join()
    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        sys.exit("FSDP2 on a CPU needs torch 2.7 or later")
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    alone, model = build_model(device), build_model(device)
    train(alone, device)
    split(model, mesh)
    collectives, errors = train(model, device, mesh.get_local_rank("dp"), 2), []
    assert len(collectives[0]) == 4 * BLOCKS, "tensor parallelism needs four all-reduces in a block"
    if dist.get_rank() == 0:
        draw(mesh, *collectives)
    for (name, parameter), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
        part, placements = parameter.to_local().detach(), parameter.placements
        errors.append((part - part_of(whole, placements, mesh)).abs().max())
        assert whole.dim() == 1 or part.numel() * 4 == whole.numel(), f"{name} is not in four parts"
        if dist.get_rank() == 0 and name.startswith("0.") and name.endswith("weight"):
            cut = " and ".join(f"dim {p.dim} by {d}" for d, p in zip(("dp", "tp"), placements, strict=False))
            print(f"  {name[2:]:12} {tuple(whole.shape)!s:>9} -> {tuple(part.shape)!s:>9} a rank, cut in {cut}")
    dist.all_reduce(error := max(errors), dist.ReduceOp.MAX)
    assert error <= 1e-5, f"the weights are {error} off"
    if dist.get_rank() == 0:
        print(f"ok: after {STEPS} steps 2 x 2 ranks with 1/4 of each matrix equal one process to {error:.1e}")
    dist.barrier()  # gloo still holds the last tensor for a moment: leave together, when all is done
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
