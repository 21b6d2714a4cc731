"""CPU offload: optimizer state, parameters and activations in host memory, with equal weights and more bus traffic.

The optimizer state is used once per step. It can stay on the host, and the step runs there: gradients are copied to the
host and parameters to the GPU (Ren et al., 2021, ZeRO-Offload). Parameters can stay on the host too: each layer is
prefetched, so that copies overlap with compute, and freed after use (Rajbhandari et al., 2021, ZeRO-Infinity).
Activations use the hooks of torch.autograd.graph.save_on_cpu. Without a GPU it is simulated: memory is only counted.

Run:
    python tutorial/cpu_offload.py
Look at:
    Row by row, less memory on the GPU and more bus traffic. Every layer is fetched before the previous layer runs.
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

HAS_GPU, DEVICE, ACCELERATOR = (True, "cuda", torch.cuda) if torch.cuda.is_available() else (False, "cpu", torch.cpu)
COPY_STREAM = ACCELERATOR.Stream()  # streams of torch.cpu do nothing
STEPS, BATCH, WIDTH, LAYERS = 5, 512, 256, 6
SAVED = 2 * LAYERS + 2  # saved activations: inputs of Linear, outputs of ReLU, both inputs of the loss


class TransferMeter(TorchDispatchMode):
    """Bytes allocated on the GPU, their peak, bytes copied over the bus, the order of events."""

    allocated, peak, bus, events = 0, 0, 0, ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.device.type == DEVICE and x.untyped_storage()._cdata not in known:
                self.count(x.nbytes)
                weakref.finalize(x.untyped_storage(), self.count, -x.nbytes)
        return out

    def count(self, nbytes):
        self.allocated, self.peak = self.allocated + nbytes, max(self.peak, self.allocated + nbytes)

    def copy(self, source, target):
        """Copy between GPU and host on the copy stream, after all work queued on the GPU so far."""
        self.bus += source.nbytes
        COPY_STREAM.wait_stream(ACCELERATOR.current_stream())
        if source.is_cuda:
            source.record_stream(COPY_STREAM)  # its memory is not reused before the copy is done
        with ACCELERATOR.stream(COPY_STREAM):
            return target.copy_(source, non_blocking=True)


class Layer:
    """A layer with its weight on the host; after forward the GPU copy is freed unless `stays`."""

    def __init__(self, linear, layers, meter, stays):
        self.on_gpu, self.index, self.layers, self.meter = linear.weight.data, len(layers), layers, meter
        self.on_host, self.gradient = torch.empty(2, WIDTH, WIDTH, pin_memory=HAS_GPU)
        self.on_host.copy_(self.on_gpu)
        self.free()
        linear.register_forward_pre_hook(lambda *_: self.run(self.index + 1))
        linear.register_forward_hook(lambda *_: None if stays else self.free())
        linear.register_full_backward_pre_hook(lambda *_: self.run(self.index - 1))
        linear.weight.register_post_accumulate_grad_hook(self.send_gradient)

    def run(self, following):
        """Fetch the weight of this layer, if needed, and prefetch that of the following layer."""
        for layer in (self, *self.layers[following : following + 1]):
            if layer.on_gpu.untyped_storage().nbytes() == 0:
                layer.on_gpu.untyped_storage().resize_(layer.on_gpu.nbytes)
                self.meter.count(layer.on_gpu.nbytes)
                self.meter.copy(layer.on_host, layer.on_gpu)
                self.meter.events += [f"fetch {layer.index}"]
            if layer is self:
                ACCELERATOR.current_stream().wait_stream(COPY_STREAM)
        self.meter.events += [f"run {self.index}"]

    def free(self):
        self.on_gpu.untyped_storage().resize_(0)
        self.meter.count(-self.on_gpu.nbytes)

    def send_gradient(self, weight):
        self.on_host.grad, weight.grad = self.meter.copy(weight.grad, self.gradient), None
        self.free()


def activations_on_host(meter):
    """Return hooks that store tensors with BATCH rows on the host; weights are handled by Layer."""
    buffers = cycle(torch.empty(SAVED, BATCH, WIDTH, pin_memory=HAS_GPU))

    def unpack(x):
        if len(x) == BATCH:
            x = meter.copy(x, torch.empty_like(x, device=DEVICE))
            ACCELERATOR.current_stream().wait_stream(COPY_STREAM)
        return x

    return saved_tensors_hooks(lambda x: meter.copy(x, next(buffers)) if len(x) == BATCH else x, unpack)


def train(method):
    """Take STEPS steps; return (weights as one tensor, meter and milliseconds of the last step)."""
    torch.manual_seed(0)
    layers = []
    with TransferMeter() as meter:
        x, y = torch.randn(2, BATCH, WIDTH, device=DEVICE)
        model = nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH, False, DEVICE), nn.ReLU())))
    for linear in model[::2] if method != "nothing" else ():
        layers.append(Layer(linear, layers, meter, stays=method == "optimizer"))
    hooks = activations_on_host(meter) if method == "+ activations" else nullcontext()
    optimizer = torch.optim.Adam([layer.on_host for layer in layers] or model.parameters())
    for _ in range(STEPS):
        start, meter.bus, meter.peak, meter.events = time.perf_counter(), 0, 0, []
        with meter, hooks:
            nn.functional.mse_loss(model(x), y).backward()
        ACCELERATOR.synchronize()
        with nullcontext() if layers else meter:
            optimizer.step()
            optimizer.zero_grad()
    weights = torch.cat([weight.detach().cpu() for weight in optimizer.param_groups[0]["params"]])
    return weights, meter, (time.perf_counter() - start) * 1e3


def main():
    torch.set_num_threads(1)
    size, saved, runs = 4 * LAYERS * WIDTH * WIDTH, 4 * SAVED * BATCH * WIDTH, {}
    bus = {"nothing": 0, "optimizer": 2 * size, "+ parameters": 3 * size, "+ activations": 3 * size + 2 * saved}
    gpu = torch.cuda.get_device_name() if HAS_GPU else "simulated"
    print(f"{LAYERS} layers of width {WIDTH}, batch {BATCH}; GPU: {gpu}; memory and traffic in MB (1e6 bytes)\n")
    print("on the host     peak on GPU   bus traffic per step, predicted | measured   ms per step")
    for method, predicted in bus.items():
        _, meter, ms = runs[method] = train(method)
        print(f"{method:<16}{meter.peak / 1e6:>11.2f}{predicted / 1e6:>34.2f} | {meter.bus / 1e6:<7.2f}{ms:>14.1f}")
        assert meter.bus == predicted, (meter.bus, predicted)
    events = runs["+ parameters"][1].events
    forward, backward = ", ".join(events[: 2 * LAYERS]), ", ".join(events[2 * LAYERS :])
    print(f"forward   {forward}\nbackward  {backward}")
    assert all(f"fetch {i}, run {i - 1}" in forward and f"fetch {i - 1}, run {i}" in backward for i in range(1, LAYERS))
    peaks = [runs[method][1].peak for method in bus]
    error = max((weights - runs["nothing"][0]).abs().max().item() for weights, _, _ in runs.values())
    assert error < 1e-5 and peaks == sorted(set(peaks), reverse=True), (error, peaks)
    print(f"ok: peak on the GPU {peaks[-1] / peaks[0]:.0%}, bus traffic as predicted, weights equal within {error:.0e}")


if __name__ == "__main__":
    main()
