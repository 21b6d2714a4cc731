"""Memory of a training step: four consumers, each predicted by arithmetic before it is measured.

A step holds parameters, one gradient for each, what the optimizer remembers of each (SGD nothing, momentum one number,
Adam two), and the activations that the forward pass keeps for the backward pass. The first three are counted in
parameters and do not care about the batch; the fourth is counted in samples. In fp32 that makes 4 + 4 + 8 = 16 bytes a
parameter for Adam before the first activation (Rajbhandari et al., 2020, ZeRO, section 3). Whoever knows which of the
four fills the card knows which of the next five lessons helps.

On a GPU the measure is the caching allocator's. On a CPU a dispatch mode sees every tensor that any operation of the
forward pass, the backward pass or the optimizer returns, and follows its storage until it is freed: it never asks the
model how large it is.

Run:
    python tutorial/memory.py
Look at:
    Measured against predicted, category by category; in the bars, activations come with the forward pass and are gone
    after the backward pass, while optimizer state comes with the first step and never leaves.
"""

import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTHS = [256, 256, 256, 256, 10]
STATE_BYTES = {"SGD": 0, "SGD + momentum": 4, "Adam": 8}  # a parameter, in fp32


def storages(tree):
    """Return {address: storage} of the tensors in nested tuples and dicts."""
    found = (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return {storage._cdata: storage for storage in found}


class Meter(TorchDispatchMode):
    """Bytes that live on the device and were allocated since the mode was entered."""

    def __enter__(self):
        self.alive, self.high = 0, 0
        if DEVICE.type == "cuda":
            # cuBLAS keeps a workspace from its first call in each thread on: take it before counting starts.
            nn.Linear(64, 64, device=DEVICE)(torch.ones(64, 64, device=DEVICE)).sum().backward()
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for address, storage in storages(out).items():
            if address not in storages((args, kwargs)):  # neither a view nor in place, so this is new
                self.count(storage.nbytes())
                weakref.finalize(storage, self.count, -storage.nbytes())
        return out

    def count(self, nbytes):
        self.alive += nbytes
        self.high = max(self.high, self.alive)

    def read(self):
        """Return (bytes alive now, the most that were alive since the last reading)."""
        if DEVICE.type == "cuda":
            now, high = torch.cuda.memory_allocated() - self.start, torch.cuda.max_memory_allocated() - self.start
            torch.cuda.reset_peak_memory_stats()
            return now, high
        high, self.high = self.high, self.alive
        return self.alive, high


def build_mlp():
    """Return Linear layers of WIDTHS with ReLU between."""
    torch.manual_seed(0)
    pairs = zip(WIDTHS, WIDTHS[1:], strict=False)
    layers = [layer for pair in pairs for layer in (nn.Linear(*pair, device=DEVICE), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def build_optimizer(name, params):
    if name == "Adam":
        return torch.optim.Adam(params, lr=1e-3)
    return torch.optim.SGD(params, lr=0.01, momentum=0.9 if name == "SGD + momentum" else 0)


def predict(name, batch):
    """Return bytes by category from the shapes alone."""
    params = sum(width_in * width + width for width_in, width in zip(WIDTHS, WIDTHS[1:], strict=False))
    # A ReLU keeps its output, which is the next layer's input, so each hidden width is held once. What the Linear
    # before it returned is held by nobody. Cross-entropy keeps the log of the softmax, the size of the output.
    held = batch * (sum(WIDTHS[1:-1]) + WIDTHS[-1])
    state = STATE_BYTES[name] * params
    return {"parameters": 4 * params, "gradients": 4 * params, "state": state, "activations": 4 * held}


def measure(name, batch):
    """Train two steps; return bytes by category and the timeline {moment: (bytes held, peak on the way)}."""
    images, labels = torch.randn(batch, WIDTHS[0], device=DEVICE), torch.randint(10, (batch,), device=DEVICE)
    timeline = {}
    with Meter() as meter:
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
    built, forward, backward, step = (held for held, _ in list(timeline.values())[:4])
    found = {"parameters": built, "gradients": backward - built, "state": step - backward}
    return found | {"activations": forward - built}, timeline


def draw(moment, held, high):
    """Return one line of the timeline: full blocks are held, light ones were held for a while on the way there."""
    blocks = "█" * round(9 * held / 1e6) + "░" * (round(9 * high / 1e6) - round(9 * held / 1e6))
    return f"    {moment:<12}{held / 1e6:6.1f}  {blocks}"


def main():
    worst = 0.0
    print(f"an MLP {' -> '.join(map(str, WIDTHS))} in fp32 on {DEVICE.type}; MB (1e6 bytes), predicted | measured\n")
    print(f"{'optimizer':<16}{'batch':>6}" + "".join(f"{category:>18}" for category in predict("SGD", 1)))
    for name, batch in (("SGD", 512), ("Adam", 512), ("SGD + momentum", 512), ("Adam", 2048)):
        expected, (found, timeline) = predict(name, batch), measure(name, batch)
        cells = [f"{expected[category] / 1e6:>9.2f} |{found[category] / 1e6:>7.2f}" for category in expected]
        print(f"{name:<16}{batch:>6}{''.join(cells)}")
        if batch == 512 and name in ("SGD", "Adam"):
            print("\n".join(draw(moment, *reading) for moment, reading in timeline.items()))
        # Where nothing is predicted (the state of plain SGD) there is no per cent: at most 1 kB may be found.
        worst = max(worst, *(abs(found[key] - expected[key]) / max(expected[key], 10_000) for key in expected))
    print(f"\n7e9 parameters with Adam in fp32: (4 + 4 + 8) x 7e9 = {(4 + 4 + 8) * 7} GB before the first activation")
    assert worst < 0.1, worst
    print(f"ok: parameters, gradients, state and activations measured within {worst:.3%} of predicted (10% is allowed)")


if __name__ == "__main__":
    main()
