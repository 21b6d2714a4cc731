"""Naive model parallelism: together ranks hold a model that none could hold alone, but only one works at a time.

The layers of a network are dealt out to the ranks. Going forward, each rank sends its activations to the next one;
going backward, it sends the gradient of its input to the one before. Autograd stops at the edge of a process, so
`y.backward(gradient)` carries it across: this is all there is to training a model that is cut into stages.

It is exact, and it is slow. A rank waits for the one before it on the way up and for the one after it on the way
down, so P ranks give the memory of P and the speed of one. Lesson 22 fills the gaps.

Run:
    torchrun --standalone --nproc_per_node=4 tutorial/model_parallel.py
Look at:
    The timeline: F is forward, B is backward, a dot is waiting. In no column do two ranks compute.
    The stages end with the weights that one process finds when it trains the whole model.
"""

import os
import time
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

LAYERS, WIDTH, BATCH, STEPS, COLUMNS = 8, 512, 512, 5, 64


def join():
    """Join the process group, nccl where each local process has a card, and return this rank's device."""
    torch.set_num_threads(1)
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    return device


def build_layers():
    """Return the layers of the whole model, the same on every rank."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]


def build_batch(step, device):
    """Return (inputs, targets) of a step, the same on every rank."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(2, BATCH, WIDTH, generator=draw).to(device)


def build_optimizer(model):
    """Return SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=5.0, momentum=0.9)


@contextmanager
def computing(kind, spans):
    """Append (start, end, kind) of a block; a GPU is waited for, as its kernels outlive the call that started them."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # nccl's recv only queues: wait for the message outside of the span
    start = time.monotonic()
    yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    spans.append((start, time.monotonic(), kind))


def train_step(stage, inputs, targets, spans):
    """Go forward and backward through the stage of this rank."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = inputs
    if rank > 0:
        x = torch.empty_like(inputs)
        dist.recv(x, rank - 1)
        x.requires_grad_()  # a leaf here, although it is the middle of the model
    with computing("F", spans):
        y = stage(x)
        loss = F.mse_loss(y, targets) if rank == last else None
    if rank < last:
        dist.send(y.detach(), rank + 1)

    gradient = None  # the loss starts the backward pass; every other rank is told the gradient of its output
    if rank < last:
        gradient = torch.empty_like(y)
        dist.recv(gradient, rank + 1)
    with computing("B", spans):
        (loss if rank == last else y).backward(gradient)
    if rank > 0:
        dist.send(x.grad, rank - 1)


def train_alone(device):
    """Train the whole model in one process, for comparison."""
    model = nn.Sequential(*build_layers()).to(device)
    optimizer = build_optimizer(model)
    for step in range(STEPS):
        inputs, targets = build_batch(step, device)
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def draw(spans_of):
    """Print who computed when in a step: rank 0 starts it and ends it."""
    start, end = spans_of[0][0][0], spans_of[0][1][1]
    busy = sum(until - first for spans in spans_of for first, until, _ in spans) / (end - start) / len(spans_of)
    print(f"the last step took {end - start:.3f} s; a rank was busy {busy:.0%} of it on average:")
    for rank, spans in enumerate(spans_of):
        line = ["·"] * COLUMNS
        for first, until, kind in spans:
            left, right = (int((moment - start) / (end - start) * COLUMNS) for moment in (first, until))
            line[left : max(right, left + 1)] = kind * max(right - left, 1)
        print(f"  rank {rank} |{''.join(line)}|")


def main():
    device = join()
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = slice(rank * LAYERS // size, (rank + 1) * LAYERS // size)
    stage = nn.Sequential(*build_layers()[mine]).to(device)
    optimizer, spans = build_optimizer(stage), []
    for step in range(STEPS):
        train_step(stage, *build_batch(step, device), spans)
        optimizer.step()
        optimizer.zero_grad()

    spans_of = [None] * size
    dist.all_gather_object(spans_of, spans)
    if rank == 0:
        print(f"{LAYERS} layers of {WIDTH} x {WIDTH} on {size} ranks, {LAYERS / size:.3g} a rank, on {device.type}")
        draw([spans[-2:] for spans in spans_of])
    in_order = sorted(span for spans in spans_of for span in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(in_order)), "two ranks computed at once"

    whole = train_alone(device)[mine]
    error = max((a - b).detach().abs().max() for a, b in zip(stage.parameters(), whole.parameters(), strict=True))
    dist.all_reduce(error, dist.ReduceOp.MAX)
    assert error <= 1e-5, f"the stages are {error} off"
    if rank == 0:
        print(f"ok: after {STEPS} steps the stages equal one process to {error:.1e}; no two ranks computed at once")
    dist.barrier()  # gloo still holds the last tensor for a moment: leave together, when all is done
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
