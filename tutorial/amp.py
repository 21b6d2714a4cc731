"""Mixed precision by hand: autocast and loss scaling, without which fp16 training fails.

Matrix products tolerate 16 bits; sums and logarithms need more. The weights stay in fp32, or small updates are lost.
Autocast is a table: cast the inputs of some functions down, of others up, and leave the rest unchanged. bf16 has the
exponent range of fp32 and needs nothing else. In fp16 gradients below 3e-8 become zero. Therefore the loss is
multiplied by a large power of two before the backward pass, and the gradients are divided by it afterwards. If the
scale is too large, gradients are inf: the step is skipped and the scale halved. After several finite steps it is
doubled (Micikevicius et al., 2018, Mixed Precision Training). The loss here has weight 1e-5, like an auxiliary loss.

Run:
    python tutorial/amp.py
Look at:
    The share of zero gradients per format; the scale over the steps; the last table: only fp16 without scaling fails.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOSS_WEIGHT, STEPS, BATCH = 1e-5, 30, 128
FIRST_SCALE, GROWTH_INTERVAL = 2.0**40, 8  # defaults: 2**16 and 2000; changed so that 30 steps show both


class Autocast(TorchFunctionMode):
    """Cast inputs: matrix products to 16 bits, losses to fp32, all other functions unchanged."""

    to_16_bits = {F.linear, F.conv2d, torch.matmul}
    to_fp32 = {F.cross_entropy, F.mse_loss}  # torch lists about 100 more, such as softmax and norms on CUDA

    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.calls = dtype, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        dtype = self.dtype if func in self.to_16_bits else torch.float32 if func in self.to_fp32 else None
        if dtype:
            args = [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
        out = func(*args, **(kwargs or {}))
        self.calls.append(f"{func.__name__} {out.dtype}".replace("torch.", ""))
        return out


class Scaler:
    """Dynamic loss scaling: on inf skip the step and halve the scale; double it after GROWTH_INTERVAL finite steps."""

    factor, finite_steps = FIRST_SCALE, 0

    def scale(self, loss):
        return loss * self.factor

    def step(self, optimizer):
        grads = [param.grad.div_(self.factor) for param in optimizer.param_groups[0]["params"]]
        self.overflow = not all(grad.isfinite().all() for grad in grads)
        if not self.overflow:
            optimizer.step()

    def update(self):
        self.finite_steps = 0 if self.overflow else (self.finite_steps + 1) % GROWTH_INTERVAL
        if self.overflow:
            self.factor /= 2
        elif self.finite_steps == 0:
            self.factor *= 2

    def get_scale(self):
        return self.factor


def build_data(count=1024):
    """Return synthetic (vectors, labels): ten patterns plus noise."""
    rng = torch.Generator().manual_seed(0)
    patterns, labels = torch.randn(10, 256, generator=rng), torch.randint(10, (count,), generator=rng)
    return (patterns[labels] + torch.randn(count, 256, generator=rng)).to(DEVICE), labels.to(DEVICE)


def build_mlp():
    torch.manual_seed(0)
    pairs = (256, 128), (128, 128), (128, 128)
    return nn.Sequential(*(nn.Sequential(nn.Linear(*p), nn.ReLU()) for p in pairs), nn.Linear(128, 10)).to(DEVICE)


def gradients(context, scale=1):
    """Return the gradients of the first step as one vector, with the loss multiplied by `scale`."""
    model, (images, labels) = build_mlp(), build_data(BATCH)
    with context:
        loss = scale * LOSS_WEIGHT * F.cross_entropy(model(images), labels)
    loss.backward()
    return nn.utils.parameters_to_vector([param.grad for param in model.parameters()])


def train(autocast, scaler=None):
    """Return (weights as one vector, scale before and after each step, loss, top-1 accuracy in %)."""
    model, (images, labels), scaler = build_mlp(), build_data(), scaler or torch.amp.GradScaler(enabled=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-12)  # eps must be far below the gradients
    scales = [scaler.get_scale()]
    for first in range(0, STEPS * BATCH, BATCH):
        indices = torch.arange(first, first + BATCH, device=DEVICE) % len(images)
        with autocast:
            loss = LOSS_WEIGHT * F.cross_entropy(model(images[indices]), labels[indices])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    logits, weights = model(images).detach(), nn.utils.parameters_to_vector(model.parameters()).detach()
    top1 = (logits.argmax(1) == labels).float().mean() * 100
    return weights, scales, F.cross_entropy(logits, labels).item(), top1.item()


def main():
    torch.set_num_threads(1)
    print("format     largest  smallest  next after 1    scale   zero gradients   autocast by hand, last calls")
    exact = gradients(nullcontext())
    for dtype, scale in ((torch.bfloat16, 1), (torch.float16, 1), (torch.float16, 2**16)):
        info, by_hand = torch.finfo(dtype), Autocast(dtype)
        ours = gradients(by_hand, scale)
        assert ours.equal(gradients(torch.autocast(DEVICE.type, dtype), scale))
        lost = (ours == 0)[exact != 0].float().mean()
        numbers = (
            f"{info.max:>8.1e}{info.smallest_normal * info.eps:>10.1e}{1 + info.eps:>14.7f}{scale:>9}{lost:>17.1%}"
        )
        print(f"{str(dtype)[6:]:<10}{numbers}   {', '.join(by_hand.calls[-3:-1])}")

    library = torch.amp.GradScaler(DEVICE.type, FIRST_SCALE, growth_interval=GROWTH_INTERVAL)
    runs = {
        "fp32": train(nullcontext()),
        "bf16": train(Autocast(torch.bfloat16)),
        "fp16": train(Autocast(torch.float16)),
        "fp16, scaled by hand": train(Autocast(torch.float16), Scaler()),
        "fp16, GradScaler": train(torch.autocast(DEVICE.type, torch.float16), library),
    }
    weights, scales, *_ = runs["fp16, scaled by hand"]
    pairs = zip(scales, scales[1:], strict=False)
    history = [f"{torch.tensor(old).log2():.0f}{'x' * (new < old)}" for old, new in pairs]
    print(f"\nlog2(scale) per step, x = skipped: {' '.join(history)}\n\nafter {STEPS} steps           loss      top-1")
    for name, (_, _, loss, top1) in runs.items():
        print(f"{name:<22}{loss:8.4f}{top1:9.1f} %")

    assert weights.equal(runs["fp16, GradScaler"][0]) and scales == runs["fp16, GradScaler"][1]
    behind = {name: runs["fp32"][3] - top1 for name, (_, _, _, top1) in runs.items()}
    assert behind["bf16"] < 1 and behind["fp16, scaled by hand"] < 1 and behind["fp16"] > 10, behind
    gap = f"{behind['fp16']:.0f} points below fp32 without scaling, {behind['fp16, scaled by hand']:.0f} with"
    print(f"ok: autocast and scaler by hand bitwise equal torch over {STEPS} steps; fp16 is {gap}")


if __name__ == "__main__":
    main()
