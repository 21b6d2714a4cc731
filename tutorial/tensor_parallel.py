"""Tensor parallelism: layers are cut so that a transformer block costs four all-reduces a step, and nothing else.

Megatron-LM (Shoeybi et al., 2019): cut the first matrix of an MLP by columns (its outputs) and the second by rows (its
inputs): a rank has whole hidden units, and the partial results are added up. Attention is the same with whole heads.
Two conjugate functions make it train: f is the identity forward and an all-reduce backward, g the other way round.
DTensor's parallelize_module does the same from a table of names.

Run:
    torchrun --standalone --nproc_per_node=2 tutorial/tensor_parallel.py
Look at:
    Both ways make two all-reduces forward and two backward, and end with the weights of one process.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, HEADS, TOKENS, BATCH, STEPS = 64, 4, 16, 8, 5
CUT = {"qkv": "columns", "out": "rows", "up": "columns", "down": "rows"}
DIM = {"columns": 0, "rows": 1}  # torch keeps a weight as (outputs, inputs)


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
        torch.manual_seed(0)  # the same on every rank
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        # The outputs of qkv are ordered by head, so a slice of its columns is whole heads: -1 is "those of this rank".
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (-1, 3, WIDTH // HEADS)).permute(3, 0, 2, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def part_of(whole, dim):
    """Return this rank's part of a tensor that is cut along a dimension."""
    return whole.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def sum_over_ranks(tensor):
    """Return the sum of a tensor over the ranks."""
    dist.all_reduce(total := tensor.clone())
    return total


class SumBackward(torch.autograd.Function):
    """f: the input goes to every rank as it is, so the gradients that come back are added."""

    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, gradient: sum_over_ranks(gradient))


class SumForward(torch.autograd.Function):
    """g: the partial results are added, so each of them has the gradient of the sum."""

    forward = staticmethod(lambda ctx, x: sum_over_ranks(x))
    backward = staticmethod(lambda ctx, gradient: gradient)


class SplitLinear(nn.Module):
    """This rank's columns or rows of a Linear."""

    def __init__(self, linear, cut):
        super().__init__()
        self.cut, self.weight = cut, nn.Parameter(part_of(linear.weight, DIM[cut]))
        self.bias = nn.Parameter(part_of(linear.bias, 0)) if cut == "columns" else linear.bias

    def forward(self, x):
        if self.cut == "columns":
            return F.linear(SumBackward.apply(x), self.weight, self.bias)
        return SumForward.apply(F.linear(x, self.weight)) + self.bias  # the bias is added once, after the sum


def split_by_hand(block):
    """Put this rank's part in the place of each matrix; norms are on every rank, and see the same numbers there."""
    for name, cut in CUT.items():
        setattr(block, name, SplitLinear(getattr(block, name), cut))


def split_by_dtensor(block):
    """Make the parameters DTensors, and have hooks redistribute what goes into the modules and comes out."""
    plan = {name: ColwiseParallel() if cut == "columns" else RowwiseParallel() for name, cut in CUT.items()}
    parallelize_module(block, dist.init_device_mesh(block.qkv.weight.device.type, (dist.get_world_size(),)), plan)


def train(block, device):
    """Train on the same batches on every rank; return how many collectives of each kind a step needed."""
    draw = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(block.parameters(), lr=1.0, momentum=0.9)
    for _ in range(STEPS):
        inputs, targets = torch.randn(2, BATCH, TOKENS, WIDTH, generator=draw).to(device)
        with CommDebugMode() as collectives:
            F.mse_loss(block(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {str(kind).split(".")[-1].replace("_", ""): count for kind, count in collectives.get_comm_counts().items()}


def distance(part, whole):
    """Return how far a parameter is from this rank's part of the whole one."""
    part = part.to_local() if isinstance(part, dist.tensor.DTensor) else part
    for dim in range(part.dim()):
        whole = part_of(whole, dim) if part.shape[dim] < whole.shape[dim] else whole
    return (part - whole).detach().abs().max()


def main():
    device = join()
    size, say = dist.get_world_size(), print if dist.get_rank() == 0 else lambda *_: None
    assert HEADS % size == 0, f"{HEADS} heads do not divide by {size} ranks"
    train(alone := Block().to(device), device)
    for split in (split_by_hand, split_by_dtensor):
        split(block := Block().to(device))
        counts = train(block, device)
        error = max(distance(*pair) for pair in zip(block.parameters(), alone.parameters(), strict=True))
        assert error <= 1e-5 and counts == {"allreduce": 4}, f"{split.__name__} is {error} off, with {counts} a step"
        say(f"{split.__name__}: 4 all-reduces a step; {STEPS} steps end {error:.1e} from one process")
    for name, cut in CUT.items():
        whole, part = getattr(alone, name).weight, getattr(block, name).weight.to_local()
        assert part.numel() * size == whole.numel()
        say(f"  {name:4} {tuple(whole.shape)!s:>9} cut by {cut:7} -> {tuple(part.shape)!s:>9} on each rank")
    say(f"ok: {size} ranks with 1/{size} of each matrix equal one process to 1e-5, with 4 all-reduces a step")
    dist.barrier()  # gloo still holds the last tensor for a moment: leave together, when all is done
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
