"""Memory of a training step: four categories, each predicted from shapes and then measured.

A step stores the parameters, one gradient per parameter, the optimizer state (none for SGD, one number per parameter
with momentum, two for Adam), and the activations saved for the backward pass. The first three depend on the number of
parameters and not on the batch size; activations depend on the batch size. In fp32 Adam needs 4 + 4 + 8 = 16 bytes per
parameter before the first activation (Rajbhandari et al., 2020, ZeRO, section 3). The largest category decides which of
the next five lessons helps.

On a GPU the memory is read from the caching allocator. On a CPU a dispatch mode sees every tensor that an operation of
the forward pass, the backward pass or the optimizer returns, and follows its storage until it is freed. It does not
use the size of the model.

Run:
    python tutorial/memory.py
Look at:
    Measured against predicted memory per category. In the timeline, activations appear in the forward pass and are
    freed in the backward pass; the optimizer state appears in the first step and remains.
"""

import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTHS = [256, 256, 256, 256, 10]
STATE_BYTES = {"SGD": 0, "SGD + momentum": 4, "Adam": 8}  # bytes per parameter in fp32


def storages(tree):
    """Return {address: storage} of all tensors in nested containers."""
    found = (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return {storage._cdata: storage for storage in found}


class MemoryMeter(TorchDispatchMode):
    """Device memory allocated since the mode was entered, in bytes."""

    def __enter__(self):
        self.allocated, self.peak = 0, 0
        if DEVICE.type == "cuda":
            # cuBLAS allocates a workspace at its first call in each thread: do this before measuring.
            nn.Linear(64, 64, device=DEVICE)(torch.ones(64, 64, device=DEVICE)).sum().backward()
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for address, storage in storages(out).items():
            if address not in storages((args, kwargs)):  # a new storage: neither a view nor in place
                self.count(storage.nbytes())
                weakref.finalize(storage, self.count, -storage.nbytes())
        return out

    def count(self, nbytes):
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)

    def read(self):
        """Return (bytes allocated now, peak since the last call)."""
        if DEVICE.type == "cuda":
            now, peak = torch.cuda.memory_allocated() - self.start, torch.cuda.max_memory_allocated() - self.start
            torch.cuda.reset_peak_memory_stats()
            return now, peak
        peak, self.peak = self.peak, self.allocated
        return self.allocated, peak


def build_mlp():
    """Return an MLP with layers of WIDTHS and ReLU."""
    torch.manual_seed(0)
    pairs = zip(WIDTHS, WIDTHS[1:], strict=False)
    layers = [layer for pair in pairs for layer in (nn.Linear(*pair, device=DEVICE), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def build_optimizer(name, params):
    if name == "Adam":
        return torch.optim.Adam(params, lr=1e-3)
    return torch.optim.SGD(params, lr=0.01, momentum=0.9 if name == "SGD + momentum" else 0)


def predict(name, batch):
    """Return the bytes per category, computed from shapes only."""
    params = sum(width_in * width + width for width_in, width in zip(WIDTHS, WIDTHS[1:], strict=False))
    # ReLU saves its output, which is also the input of the next layer: each hidden activation is stored once.
    # The output of the Linear before it is freed. Cross-entropy saves the log-softmax, as large as the output.
    saved = batch * (sum(WIDTHS[1:-1]) + WIDTHS[-1])
    state = STATE_BYTES[name] * params
    return {"parameters": 4 * params, "gradients": 4 * params, "state": state, "activations": 4 * saved}


def measure(name, batch):
    """Train two steps; return the bytes per category and the timeline {phase: (bytes after it, peak in it)}."""
    images, labels = torch.randn(batch, WIDTHS[0], device=DEVICE), torch.randint(10, (batch,), device=DEVICE)
    timeline = {}
    with MemoryMeter() as meter:
        model = build_mlp()
        timeline["model built"] = meter.read()
        optimizer = build_optimizer(name, model.parameters())
        for step in (1, 2):
            loss = nn.functional.cross_entropy(model(images), labels)
            timeline[f"forward {step}"] = meter.read()
            loss.backward()
            del loss
            timeline[f"backward {step}"] = meter.read()
            optimizer.step()
            timeline[f"step {step}"] = meter.read()
            optimizer.zero_grad()
    built, forward, backward, step = (after for after, _ in list(timeline.values())[:4])
    measured = {"parameters": built, "gradients": backward - built, "state": step - backward}
    return measured | {"activations": forward - built}, timeline


def format_bar(phase, after, peak):
    """Return one line of the timeline: full blocks are the memory after the phase, light blocks its peak."""
    blocks = "█" * round(9 * after / 1e6) + "░" * (round(9 * peak / 1e6) - round(9 * after / 1e6))
    return f"    {phase:<12}{after / 1e6:6.1f}  {blocks}"


def main():
    worst = 0.0
    print(f"MLP {' -> '.join(map(str, WIDTHS))} in fp32 on {DEVICE.type}; unit: MB (1e6 bytes), predicted | measured\n")
    print(f"{'optimizer':<16}{'batch':>6}" + "".join(f"{category:>18}" for category in predict("SGD", 1)))
    for name, batch in (("SGD", 512), ("Adam", 512), ("SGD + momentum", 512), ("Adam", 2048)):
        expected, (measured, timeline) = predict(name, batch), measure(name, batch)
        cells = [f"{expected[category] / 1e6:>9.2f} |{measured[category] / 1e6:>7.2f}" for category in expected]
        print(f"{name:<16}{batch:>6}{''.join(cells)}")
        if batch == 512 and name in ("SGD", "Adam"):
            print("\n".join(format_bar(phase, *values) for phase, values in timeline.items()))
        # The predicted state of SGD is 0: a relative error is undefined, so allow 1 kB.
        worst = max(worst, *(abs(measured[key] - expected[key]) / max(expected[key], 10_000) for key in expected))
    print(f"\n7e9 parameters with Adam in fp32: (4 + 4 + 8) x 7e9 = {(4 + 4 + 8) * 7} GB before the first activation")
    assert worst < 0.1, worst
    print(f"ok: measured memory within {worst:.3%} of the prediction in all four categories (limit 10%)")


if __name__ == "__main__":
    main()
