"""Activation checkpointing: keep the input of each segment, recompute the rest, get the same gradients bit for bit.

Normally the forward pass keeps what every operation will need backward. A checkpointed segment keeps its input only,
and runs a second time when the backward pass reaches it. That costs one more forward pass. Of L blocks in k segments
there remain k inputs and the inside of the one segment that is being recomputed: k + cL/k, where a block holds c times
its input. The least is at k = sqrt(cL) (Chen et al., 2016, Training Deep Nets with Sublinear Memory Cost). The second
run must repeat the first, so the state of the random number generator is kept as well: without it dropout draws another
mask, and the gradient is wrong without any error.

Run:
    python tutorial/activation_checkpointing.py
Look at:
    The peak falls and rises again with the number of segments, the operations go from 3 forward passes' worth to 4,
    and the last row is what forgetting the random state does: as much memory, another gradient, no error.
"""

import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCKS, WIDTH, BATCH = 32, 64, 512
GENERATOR = torch.cuda if DEVICE.type == "cuda" else torch  # dropout draws from the generator of the device


class Block(nn.Module):
    """What a transformer has after attention: norm, wide layer, activation, narrow layer, dropout, residual."""

    def __init__(self):
        super().__init__()
        wide = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        self.branch = nn.Sequential(*wide, nn.Dropout(0.1))

    def forward(self, x):
        return x + self.branch(x)


class Checkpoint(torch.autograd.Function):
    """Run a segment without keeping its inside; run it again, with gradients, when they are asked for."""

    @staticmethod
    def forward(ctx, segment, keep_random_state, x, *params):  # params: so that autograd knows who needs gradients
        ctx.segment, ctx.state = segment, GENERATOR.get_rng_state() if keep_random_state else None
        ctx.save_for_backward(x)
        return segment(x)  # autograd does not record inside a Function

    @staticmethod
    def backward(ctx, grad_out):
        now = GENERATOR.get_rng_state()
        if ctx.state is not None:
            GENERATOR.set_rng_state(ctx.state)
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.segment(x)
        GENERATOR.set_rng_state(now)  # the recomputation must not move the generator for whoever comes next
        grad_x, *grads = torch.autograd.grad(out, [x, *ctx.segment.parameters()], grad_out)
        return None, None, grad_x, *grads


WAYS = {
    "plain": lambda segment, x: segment(x),
    "by hand": lambda segment, x: Checkpoint.apply(segment, True, x, *segment.parameters()),
    "torch": lambda segment, x: checkpoint(segment, x, use_reentrant=False),
    "by hand, forgetful": lambda segment, x: Checkpoint.apply(segment, False, x, *segment.parameters()),
}


def storages(tree):
    """Return {address: storage} of the tensors in nested tuples and dicts."""
    found = (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return {storage._cdata: storage for storage in found}


class Meter(TorchDispatchMode):
    """Bytes of what operations allocate, each storage until it is freed; operations of the matrix products."""

    alive = peak = flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for address, storage in storages(out).items():
            if address not in storages((args, kwargs)):  # neither a view nor in place
                self.count(storage.nbytes())
                weakref.finalize(storage, self.count, -storage.nbytes())
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            *_, left, right = args
            self.flops += 2 * left.numel() * right.shape[1]
        return out

    def count(self, nbytes):
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)


def measure(way, segments):
    """Take one step; return (bytes after forward, bytes at the peak, operations, gradients as one vector)."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(DEVICE)
    x = torch.randn(BATCH, WIDTH, device=DEVICE)
    for param in blocks.parameters():
        param.grad = torch.zeros_like(param)  # made before the meter starts, which so sees activations only
    length = BLOCKS // segments
    with Meter() as meter:
        for first in range(0, BLOCKS, length):
            x = WAYS[way](blocks[first : first + length], x)
        loss = x.square().mean()
        del x
        held = meter.alive
        loss.backward()
    return held, meter.peak, meter.flops, nn.utils.parameters_to_vector([param.grad for param in blocks.parameters()])


def main():
    torch.set_num_threads(1)
    print(f"{BLOCKS} blocks of width {WIDTH}, batch {BATCH}, on {DEVICE.type}; MB (1e6 bytes)\n")
    print(f"{'way':<20}segments  after forward   peak   operations   off plain")
    forward = BATCH * BLOCKS * 2 * 2 * WIDTH * 4 * WIDTH  # two products a block, a multiplication and an addition each
    rows = [
        ("plain", 1),
        *(("by hand", segments) for segments in (1, 2, 4, 8, 16, 32)),
        ("torch", 4),
        ("by hand, forgetful", 4),
    ]
    found = {row: measure(*row) for row in rows}
    _, plain_peak, plain_flops, expected = found["plain", 1]
    for (way, segments), (held, peak, flops, result) in found.items():
        off = (result - expected).norm() / expected.norm()
        numbers = f"{held / 1e6:>15.1f}{peak / 1e6:>7.1f}{flops / forward:>9.2f} fwd{off:>12.1e}"
        print(f"{way:<20}{segments:>8}{numbers}  {'█' * round(peak / 1e6)}")

    assert all(result.equal(expected) != (way == "by hand, forgetful") for (way, _), (*_, result) in found.items())
    least = min(found, key=lambda row: found[row][1])
    _, least_peak, least_flops, _ = found[least]
    assert least[1] == 16 and least_peak < plain_peak / 4, (least, least_peak)
    assert plain_flops == 3 * forward and least_flops == 4 * forward, (plain_flops, least_flops)
    saved = f"{least_peak / plain_peak:.0%} of the memory for {least_flops / plain_flops:.2f}x the operations"
    print(f"ok: {saved}, the gradients equal bit for bit; wrong only where the random state is forgotten")


if __name__ == "__main__":
    main()
