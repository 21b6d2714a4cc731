"""2-D parallelism on a 2 x 2 mesh: tensor parallelism along one dimension, FSDP along the other.

A device mesh gives each rank two coordinates. Along its rows ("tp") each layer is split as in lesson 23. The ranks of a
row process the same samples and all-reduce activations four times per block, so they need the fastest link, inside one
machine. Along its columns ("dp") the ranks process different samples. FSDP2 (Zhao et al., 2023) shards the local
parameters again: it gathers them for the forward and backward pass of a block and reduce-scatters the gradients. These
messages are fewer and can overlap with compute, so dp may cross machines.

Run:
    torchrun --standalone --nproc_per_node=4 tutorial/two_d.py
Look at:
    The traffic along each dimension, and the shard of each matrix: 1/4 on 4 ranks.
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


def init_distributed():
    """Initialize the process group, with nccl if each local process has a GPU; return this rank's device."""
    torch.set_num_threads(1)
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    return device


class Block(nn.Module):
    """A pre-norm transformer block: attention and an MLP, each with a residual connection."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        # The outputs of qkv are ordered by head, so a column slice contains complete heads; -1: heads of this rank.
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (-1, 3, WIDTH // HEADS)).permute(3, 0, 2, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def build_model(device):
    """Return a small transformer, equal on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.LayerNorm(WIDTH)).to(device)


def parallelize(model, mesh):
    """Apply tensor parallelism to the layers, then FSDP to the local parameters."""
    column, row = ColwiseParallel, RowwiseParallel
    for block in model[:BLOCKS]:
        parallelize_module(block, mesh["tp"], {"qkv": column(), "out": row(), "up": column(), "down": row()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


class CollectiveMeter(TorchDispatchMode):
    """Record the bytes of every collective, by operation."""

    def __init__(self):
        super().__init__()
        self.bytes = {"all_reduce": [], "_allgather_base_": [], "_reduce_scatter_base_": []}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # dispatch again on the local tensors
        name = operation.name().split("::")[1]
        if name in self.bytes:
            self.bytes[name].append(max(x.nbytes for x in args if isinstance(x, torch.Tensor)))
        return operation(*args, **(kwargs or {}))


def train(model, device, part=0, parts=1):
    """Train on one part of every batch; return the collectives of the last step."""
    rng = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for _ in range(STEPS):
        inputs, targets = torch.randn(2, BATCH, TOKENS, WIDTH, generator=rng).chunk(parts, 1)[part].to(device)
        with CollectiveMeter() as collectives:
            F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(collectives.bytes.values())


def shard_of(whole, placements, mesh):
    """Return this rank's shard of a parameter, split by tensor parallelism and then by FSDP."""
    dp, tp = mesh.get_coordinate()
    if len(placements) == 2 and placements[1].is_shard():
        whole = whole.chunk(2, placements[1].dim)[tp]
    return whole.chunk(2)[dp].detach()


def print_mesh(mesh, *collectives):
    """Print the mesh and the traffic of a step along its two dimensions."""
    first, second = ("──── tp ────".join(f"[rank {rank}]" for rank in ranks) for ranks in mesh.mesh.tolist())
    reduces, gathers, scatters = (f"{len(sizes)} x {sum(sizes) / len(sizes) / 1024:3.0f} KiB" for sizes in collectives)
    print(f"  {first}  samples 0-3  │ tp: {reduces} all-reduce activations")
    print("      │                   │                  │")
    print(f"      dp                  dp                 │ dp: {gathers} all-gather parameters")
    print(f"      │                   │                  │     {scatters} reduce-scatter gradients")
    print(f"  {second}  samples 4-7  │")


def main():
    device = init_distributed()
    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        sys.exit("FSDP2 on a CPU needs torch 2.7 or later")
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    reference, model = build_model(device), build_model(device)
    train(reference, device)
    parallelize(model, mesh)
    collectives, errors = train(model, device, mesh.get_local_rank("dp"), 2), []
    assert len(collectives[0]) == 4 * BLOCKS, "expected four all-reduces per block"
    if dist.get_rank() == 0:
        print_mesh(mesh, *collectives)
    for (name, parameter), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        part, placements = parameter.to_local().detach(), parameter.placements
        errors.append((part - shard_of(whole, placements, mesh)).abs().max())
        assert whole.dim() == 1 or part.numel() * 4 == whole.numel(), f"{name} is not split into four parts"
        if dist.get_rank() == 0 and name.startswith("0.") and name.endswith("weight"):
            split = " and ".join(f"dim {p.dim} by {d}" for d, p in zip(("dp", "tp"), placements, strict=False))
            print(f"  {name[2:]:12} {tuple(whole.shape)!s:>9} -> {tuple(part.shape)!s:>9} per rank, split in {split}")
    dist.all_reduce(error := max(errors), dist.ReduceOp.MAX)
    assert error <= 1e-5, f"the weights differ by {error}"
    if dist.get_rank() == 0:
        print(f"ok: after {STEPS} steps 2 x 2 ranks with 1/4 of each matrix equal one process within {error:.1e}")
    dist.barrier()  # exit together: gloo may still be sending
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
