"""CPU offload: the card holds what the next layer needs, the host the rest; same weights, paid for on the bus.

The optimizer's state is touched once a step: it can live on the host and the step run there, if gradients go down
and parameters up (Ren et al., 2021, ZeRO-Offload). Parameters can too, fetched one layer early, so that copying and
computing overlap, and dropped after use (Rajbhandari et al., 2021, ZeRO-Infinity); and activations, by the hooks behind
torch.autograd.graph.save_on_cpu. Without a GPU the card is simulated: it owns what is made inside `with machine`.

Run:
    python tutorial/cpu_offload.py
Look at:
    Row by row the card holds less and the bus carries more. Every layer is fetched before the one before it runs.
"""

import time
import weakref
from contextlib import nullcontext
from itertools import cycle

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REAL, DEVICE, CARD = (True, "cuda", torch.cuda) if torch.cuda.is_available() else (False, "cpu", torch.cpu)
COPIES = CARD.Stream()  # torch.cpu has streams too, which do nothing
STEPS, BATCH, WIDTH, LAYERS = 5, 512, 256, 6
SAVED = 2 * LAYERS + 2  # activations that autograd saves: a Linear's input, a ReLU's output, both inputs of the loss


class Machine(TorchDispatchMode):
    """A card and its bus: bytes alive on the card, their peak, bytes copied, the order of events."""

    alive, peak, bus, events = 0, 0, 0, ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        old = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.device.type == DEVICE and x.untyped_storage()._cdata not in old:
                self.book(x.nbytes)
                weakref.finalize(x.untyped_storage(), self.book, -x.nbytes)
        return out

    def book(self, nbytes):
        self.alive, self.peak = self.alive + nbytes, max(self.peak, self.alive + nbytes)

    def copy(self, source, target):
        """Copy between card and host on the stream for copies, behind what the card has been told to do so far."""
        self.bus += source.nbytes
        COPIES.wait_stream(CARD.current_stream())
        if source.is_cuda:
            source.record_stream(COPIES)  # once freed, its memory is not used again before the copy is done
        with CARD.stream(COPIES):
            return target.copy_(source, non_blocking=True)


class Layer:
    """A layer whose weight lives on the host; what was fetched for forward is dropped, or `stays` for backward."""

    def __init__(self, linear, layers, machine, stays):
        self.card, self.index, self.layers, self.machine = linear.weight.data, len(layers), layers, machine
        self.home, self.gradient = torch.empty(2, WIDTH, WIDTH, pin_memory=REAL)
        self.home.copy_(self.card)
        self.drop()
        linear.register_forward_pre_hook(lambda *_: self.run(self.index + 1))
        linear.register_forward_hook(lambda *_: None if stays else self.drop())
        linear.register_full_backward_pre_hook(lambda *_: self.run(self.index - 1))
        linear.weight.register_post_accumulate_grad_hook(self.send_gradient)

    def run(self, following):
        """Have the weight on the card, and ask for that of the layer that follows."""
        for layer in (self, *self.layers[following : following + 1]):
            if layer.card.untyped_storage().nbytes() == 0:
                layer.card.untyped_storage().resize_(layer.card.nbytes)
                self.machine.book(layer.card.nbytes)
                self.machine.copy(layer.home, layer.card)
                self.machine.events += [f"fetch {layer.index}"]
            if layer is self:
                CARD.current_stream().wait_stream(COPIES)
        self.machine.events += [f"run {self.index}"]

    def drop(self):
        self.card.untyped_storage().resize_(0)
        self.machine.book(-self.card.nbytes)

    def send_gradient(self, weight):
        self.home.grad, weight.grad = self.machine.copy(weight.grad, self.gradient), None
        self.drop()


def activations_on_host(machine):
    """Return hooks that keep on the host what has a row for each example; weights have their own way there."""
    slots = cycle(torch.empty(SAVED, BATCH, WIDTH, pin_memory=REAL))

    def unpack(x):
        if len(x) == BATCH:
            x = machine.copy(x, torch.empty_like(x, device=DEVICE))
            CARD.current_stream().wait_stream(COPIES)
        return x

    return saved_tensors_hooks(lambda x: machine.copy(x, next(slots)) if len(x) == BATCH else x, unpack)


def train(way):
    """Take STEPS steps; return (weights as one tensor, the machine and the milliseconds of the last step)."""
    torch.manual_seed(0)
    layers = []
    with Machine() as machine:
        x, y = torch.randn(2, BATCH, WIDTH, device=DEVICE)
        model = nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH, False, DEVICE), nn.ReLU())))
    for linear in model[::2] if way != "nothing" else ():
        layers.append(Layer(linear, layers, machine, stays=way == "optimizer"))
    hooks = activations_on_host(machine) if way == "+ activations" else nullcontext()
    optimizer = torch.optim.Adam([layer.home for layer in layers] or model.parameters())
    for _ in range(STEPS):
        start, machine.bus, machine.peak, machine.events = time.perf_counter(), 0, 0, []
        with machine, hooks:
            nn.functional.mse_loss(model(x), y).backward()
        CARD.synchronize()
        with nullcontext() if layers else machine:
            optimizer.step()
            optimizer.zero_grad()
    weights = torch.cat([weight.detach().cpu() for weight in optimizer.param_groups[0]["params"]])
    return weights, machine, (time.perf_counter() - start) * 1e3


def main():
    torch.set_num_threads(1)
    size, saved, runs = 4 * LAYERS * WIDTH * WIDTH, 4 * SAVED * BATCH * WIDTH, {}
    bus = {"nothing": 0, "optimizer": 2 * size, "+ parameters": 3 * size, "+ activations": 3 * size + 2 * saved}
    card = torch.cuda.get_device_name() if REAL else "simulated"
    print(f"{LAYERS} layers of width {WIDTH}, batch {BATCH}; card: {card}; MB (1e6 bytes)\n")
    print("on the host     card's peak   on the bus in a step, predicted | counted   ms a step")
    for way, predicted in bus.items():
        _, machine, ms = runs[way] = train(way)
        print(f"{way:<16}{machine.peak / 1e6:>11.2f}{predicted / 1e6:>34.2f} | {machine.bus / 1e6:<7.2f}{ms:>12.1f}")
        assert machine.bus == predicted, (machine.bus, predicted)
    events = runs["+ parameters"][1].events
    forward, backward = ", ".join(events[: 2 * LAYERS]), ", ".join(events[2 * LAYERS :])
    print(f"forward   {forward}\nbackward  {backward}")
    assert all(f"fetch {i}, run {i - 1}" in forward and f"fetch {i - 1}, run {i}" in backward for i in range(1, LAYERS))
    peaks = [runs[way][1].peak for way in bus]
    off = max((weights - runs["nothing"][0]).abs().max().item() for weights, _, _ in runs.values())
    assert off < 1e-5 and peaks == sorted(set(peaks), reverse=True), (off, peaks)
    print(f"ok: card's peak down to {peaks[-1] / peaks[0]:.0%}, bus as predicted, weights off by {off:.0e}")


if __name__ == "__main__":
    main()
