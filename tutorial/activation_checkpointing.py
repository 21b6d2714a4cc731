"""Activation checkpointing: store the input of each segment, recompute the rest, get bitwise equal gradients.

Normally the forward pass saves all activations that the backward pass needs. A checkpointed segment saves its input
only and runs a second time when the backward pass reaches it. This costs one more forward pass. With L blocks in k
segments, the memory is k inputs plus the activations of the segment being recomputed: k + cL/k, where the activations
of a block are c times its input. The minimum is at k = sqrt(cL) (Chen et al., 2016, Training Deep Nets with Sublinear
Memory Cost). The second run must equal the first, so the state of the random number generator is saved too. Without it
dropout uses another mask, and the gradient is wrong without an error message.

Run:
    python tutorial/activation_checkpointing.py
Look at:
    The peak memory falls and then rises with the number of segments. The compute rises from 3 forward passes to 4. The
    last row does not save the random state: same memory, wrong gradient, no error message.
"""

import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCKS, WIDTH, BATCH = 32, 64, 512
GENERATOR = torch.cuda if DEVICE.type == "cuda" else torch  # dropout uses the generator of the device


class Block(nn.Module):
    """The MLP block of a transformer: norm, linear, GELU, linear, dropout, residual connection."""

    def __init__(self):
        super().__init__()
        wide = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        self.branch = nn.Sequential(*wide, nn.Dropout(0.1))

    def forward(self, x):
        return x + self.branch(x)


class Checkpoint(torch.autograd.Function):
    """Run a segment without saving its activations; recompute them in the backward pass."""

    @staticmethod
    def forward(ctx, segment, save_rng_state, x, *params):  # params: autograd must see them as inputs
        ctx.segment, ctx.state = segment, GENERATOR.get_rng_state() if save_rng_state else None
        ctx.save_for_backward(x)
        return segment(x)  # autograd is off inside a Function

    @staticmethod
    def backward(ctx, grad_out):
        now = GENERATOR.get_rng_state()
        if ctx.state is not None:
            GENERATOR.set_rng_state(ctx.state)
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.segment(x)
        GENERATOR.set_rng_state(now)  # the recomputation must not change the random state
        grad_x, *grads = torch.autograd.grad(out, [x, *ctx.segment.parameters()], grad_out)
        return None, None, grad_x, *grads


METHODS = {
    "plain": lambda segment, x: segment(x),
    "by hand": lambda segment, x: Checkpoint.apply(segment, True, x, *segment.parameters()),
    "torch": lambda segment, x: checkpoint(segment, x, use_reentrant=False),
    "by hand, no RNG state": lambda segment, x: Checkpoint.apply(segment, False, x, *segment.parameters()),
}


def storages(tree):
    """Return {address: storage} of all tensors in nested containers."""
    found = (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return {storage._cdata: storage for storage in found}


class Meter(TorchDispatchMode):
    """Allocated bytes, their peak, and the FLOPs of matrix products."""

    allocated = peak = flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for address, storage in storages(out).items():
            if address not in storages((args, kwargs)):  # a new storage: neither a view nor in place
                self.count(storage.nbytes())
                weakref.finalize(storage, self.count, -storage.nbytes())
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            *_, left, right = args
            self.flops += 2 * left.numel() * right.shape[1]
        return out

    def count(self, nbytes):
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)


def measure(method, segments):
    """Run one step; return (bytes after forward, peak bytes, FLOPs, gradients as one vector)."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(DEVICE)
    x = torch.randn(BATCH, WIDTH, device=DEVICE)
    for param in blocks.parameters():
        param.grad = torch.zeros_like(param)  # before the meter starts: it must see activations only
    length = BLOCKS // segments
    with Meter() as meter:
        for first in range(0, BLOCKS, length):
            x = METHODS[method](blocks[first : first + length], x)
        loss = x.square().mean()
        del x
        after_forward = meter.allocated
        loss.backward()
    gradients = nn.utils.parameters_to_vector([param.grad for param in blocks.parameters()])
    return after_forward, meter.peak, meter.flops, gradients


def main():
    torch.set_num_threads(1)
    print(f"{BLOCKS} blocks of width {WIDTH}, batch {BATCH}, on {DEVICE.type}; memory in MB (1e6 bytes)\n")
    print(f"{'method':<22}segments  after forward   peak      compute      error")
    forward = BATCH * BLOCKS * 2 * 2 * WIDTH * 4 * WIDTH  # two products per block, multiply and add
    rows = [
        ("plain", 1),
        *(("by hand", segments) for segments in (1, 2, 4, 8, 16, 32)),
        ("torch", 4),
        ("by hand, no RNG state", 4),
    ]
    found = {row: measure(*row) for row in rows}
    _, plain_peak, plain_flops, expected = found["plain", 1]
    for (method, segments), (after_forward, peak, flops, result) in found.items():
        error = (result - expected).norm() / expected.norm()
        numbers = f"{after_forward / 1e6:>15.1f}{peak / 1e6:>7.1f}{flops / forward:>9.2f} fwd{error:>12.1e}"
        print(f"{method:<22}{segments:>8}{numbers}  {'█' * round(peak / 1e6)}")

    for (method, _), (*_, result) in found.items():
        assert result.equal(expected) != (method == "by hand, no RNG state"), method
    least = min(found, key=lambda row: found[row][1])
    _, least_peak, least_flops, _ = found[least]
    assert least[1] == 16 and least_peak < plain_peak / 4, (least, least_peak)
    assert plain_flops == 3 * forward and least_flops == 4 * forward, (plain_flops, least_flops)
    saved = f"{least_peak / plain_peak:.0%} of the memory for {least_flops / plain_flops:.2f}x the compute"
    print(f"ok: {saved}, bitwise equal gradients; wrong gradients without the RNG state")


if __name__ == "__main__":
    main()
