"""Tensor parallelism: a transformer block split over ranks needs four all-reduces per step.

Megatron-LM (Shoeybi et al., 2019) splits the first matrix of an MLP by columns (outputs) and the second by rows
(inputs). Each rank computes complete hidden units, and the partial results are summed. Attention is split by heads in
the same way. Two conjugate functions make it trainable. f is the identity in the forward pass and an all-reduce in the
backward pass; g is the reverse. parallelize_module of DTensor does the same from a table of module names.

Run:
    torchrun --standalone --nproc_per_node=2 tutorial/tensor_parallel.py
Look at:
    Both versions use two all-reduces in forward and two in backward, and give the weights of one process.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, HEADS, TOKENS, BATCH, STEPS = 64, 4, 16, 8, 5
SPLIT = {"qkv": "columns", "out": "rows", "up": "columns", "down": "rows"}
DIM = {"columns": 0, "rows": 1}  # the shape of a weight in torch is (outputs, inputs)


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
        torch.manual_seed(0)  # equal on every rank
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        # The outputs of qkv are ordered by head, so a column slice contains complete heads; -1: heads of this rank.
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (-1, 3, WIDTH // HEADS)).permute(3, 0, 2, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def shard_of(tensor, dim):
    """Return this rank's shard of a tensor along a dimension."""
    return tensor.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def sum_over_ranks(tensor):
    """Return the sum of a tensor over the ranks."""
    dist.all_reduce(total := tensor.clone())
    return total


class SumBackward(torch.autograd.Function):
    """f: identity in the forward pass; all-reduce of the gradient in the backward pass."""

    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, gradient: sum_over_ranks(gradient))


class SumForward(torch.autograd.Function):
    """g: all-reduce in the forward pass; identity in the backward pass."""

    forward = staticmethod(lambda ctx, x: sum_over_ranks(x))
    backward = staticmethod(lambda ctx, gradient: gradient)


class ParallelLinear(nn.Module):
    """This rank's columns or rows of a Linear."""

    def __init__(self, linear, split):
        super().__init__()
        self.split, self.weight = split, nn.Parameter(shard_of(linear.weight, DIM[split]))
        self.bias = nn.Parameter(shard_of(linear.bias, 0)) if split == "columns" else linear.bias

    def forward(self, x):
        if self.split == "columns":
            return F.linear(SumBackward.apply(x), self.weight, self.bias)
        return SumForward.apply(F.linear(x, self.weight)) + self.bias  # add the bias once, after the sum


def parallelize_by_hand(block):
    """Replace each Linear by this rank's part; norms are replicated."""
    for name, split in SPLIT.items():
        setattr(block, name, ParallelLinear(getattr(block, name), split))


def parallelize_with_dtensor(block):
    """Convert the parameters to DTensors; hooks redistribute the inputs and outputs of the modules."""
    plan = {name: ColwiseParallel() if split == "columns" else RowwiseParallel() for name, split in SPLIT.items()}
    parallelize_module(block, dist.init_device_mesh(block.qkv.weight.device.type, (dist.get_world_size(),)), plan)


def train(block, device):
    """Train on the same batches on every rank; return the number of collectives per step by kind."""
    rng = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(block.parameters(), lr=1.0, momentum=0.9)
    for _ in range(STEPS):
        inputs, targets = torch.randn(2, BATCH, TOKENS, WIDTH, generator=rng).to(device)
        with CommDebugMode() as collectives:
            F.mse_loss(block(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {str(kind).split(".")[-1].replace("_", ""): count for kind, count in collectives.get_comm_counts().items()}


def max_difference(part, whole):
    """Return the maximum difference between a local parameter and this rank's shard of the full one."""
    part = part.to_local() if isinstance(part, dist.tensor.DTensor) else part
    for dim in range(part.dim()):
        whole = shard_of(whole, dim) if part.shape[dim] < whole.shape[dim] else whole
    return (part - whole).detach().abs().max()


def main():
    device = init_distributed()
    size, log = dist.get_world_size(), print if dist.get_rank() == 0 else lambda *_: None
    assert HEADS % size == 0, f"{HEADS} heads are not divisible by {size} ranks"
    train(reference := Block().to(device), device)
    for parallelize in (parallelize_by_hand, parallelize_with_dtensor):
        parallelize(block := Block().to(device))
        counts = train(block, device)
        error = max(max_difference(*pair) for pair in zip(block.parameters(), reference.parameters(), strict=True))
        assert error <= 1e-5 and counts == {"allreduce": 4}, f"{parallelize.__name__}: error {error}, {counts}"
        log(f"{parallelize.__name__}: 4 all-reduces per step; weights equal one process within {error:.1e}")
    for name, split in SPLIT.items():
        whole, part = getattr(reference, name).weight, getattr(block, name).weight.to_local()
        assert part.numel() * size == whole.numel()
        log(f"  {name:4} {tuple(whole.shape)!s:>9} split by {split:7} -> {tuple(part.shape)!s:>9} on each rank")
    log(f"ok: {size} ranks with 1/{size} of each matrix equal one process within 1e-5, 4 all-reduces per step")
    dist.barrier()  # exit together: gloo may still be sending
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
