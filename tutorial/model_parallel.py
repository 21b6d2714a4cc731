"""Naive model parallelism: the layers are split over the ranks, and only one rank computes at a time.

Each rank holds some layers of the network. In the forward pass it sends its activations to the next rank; in the
backward pass it sends the gradient of its input to the previous rank. Autograd does not cross process boundaries, so
each rank calls `y.backward(gradient)` with the received gradient.

The result is exact, but slow. Each rank waits for the previous rank in the forward pass and for the next rank in the
backward pass. P ranks have the memory of P GPUs and the speed of one. Lesson 22 reduces the waiting time.

Run:
    torchrun --standalone --nproc_per_node=4 tutorial/model_parallel.py
Look at:
    The timeline: F is forward, B is backward, a dot is waiting. No column has more than one active rank.
    The final weights are equal to those of one process that trains the whole model.
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


def init_distributed():
    """Initialize the process group, with nccl if each local process has a GPU; return this rank's device."""
    torch.set_num_threads(1)
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    return device


def build_layers():
    """Return all layers of the model, equal on every rank."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]


def build_batch(step, device):
    """Return (inputs, targets) of a step, equal on every rank."""
    rng = torch.Generator().manual_seed(step)
    return torch.randn(2, BATCH, WIDTH, generator=rng).to(device)


def build_optimizer(model):
    """Return SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=5.0, momentum=0.9)


@contextmanager
def record_span(kind, spans):
    """Append (start, end, kind) of a code block, including its GPU kernels."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # nccl is asynchronous: wait for the message before the span
    start = time.monotonic()
    yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    spans.append((start, time.monotonic(), kind))


def train_step(stage, inputs, targets, spans):
    """Run forward and backward through the stage of this rank."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = inputs
    if rank > 0:
        x = torch.empty_like(inputs)
        dist.recv(x, rank - 1)
        x.requires_grad_()  # a leaf of the local graph
    with record_span("F", spans):
        y = stage(x)
        loss = F.mse_loss(y, targets) if rank == last else None
    if rank < last:
        dist.send(y.detach(), rank + 1)

    gradient = None  # the last rank starts from the loss, the others from the gradient of their output
    if rank < last:
        gradient = torch.empty_like(y)
        dist.recv(gradient, rank + 1)
    with record_span("B", spans):
        (loss if rank == last else y).backward(gradient)
    if rank > 0:
        dist.send(x.grad, rank - 1)


def train_reference(device):
    """Train the whole model in one process."""
    model = nn.Sequential(*build_layers()).to(device)
    optimizer = build_optimizer(model)
    for step in range(STEPS):
        inputs, targets = build_batch(step, device)
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def print_timeline(all_spans):
    """Print when each rank computed in a step, which rank 0 starts and ends."""
    start, end = all_spans[0][0][0], all_spans[0][1][1]
    busy = sum(last - first for spans in all_spans for first, last, _ in spans) / (end - start) / len(all_spans)
    print(f"last step: {end - start:.3f} s; ranks busy {busy:.0%} of the time on average")
    for rank, spans in enumerate(all_spans):
        line = ["·"] * COLUMNS
        for first, last, kind in spans:
            left, right = (int((moment - start) / (end - start) * COLUMNS) for moment in (first, last))
            line[left : max(right, left + 1)] = kind * max(right - left, 1)
        print(f"  rank {rank} |{''.join(line)}|")


def main():
    device = init_distributed()
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = slice(rank * LAYERS // size, (rank + 1) * LAYERS // size)
    stage = nn.Sequential(*build_layers()[layers]).to(device)
    optimizer, spans = build_optimizer(stage), []
    for step in range(STEPS):
        train_step(stage, *build_batch(step, device), spans)
        optimizer.step()
        optimizer.zero_grad()

    all_spans = [None] * size
    dist.all_gather_object(all_spans, spans)
    if rank == 0:
        print(f"{LAYERS} layers of {WIDTH} x {WIDTH} on {size} ranks, {LAYERS / size:.3g} per rank, on {device.type}")
        print_timeline([spans[-2:] for spans in all_spans])
    in_order = sorted(span for spans in all_spans for span in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(in_order)), "two ranks computed at the same time"

    reference = train_reference(device)[layers]
    error = max((a - b).detach().abs().max() for a, b in zip(stage.parameters(), reference.parameters(), strict=True))
    dist.all_reduce(error, dist.ReduceOp.MAX)
    assert error <= 1e-5, f"the weights differ by {error}"
    if rank == 0:
        print(f"ok: after {STEPS} steps the weights equal one process within {error:.1e}; one rank computed at a time")
    dist.barrier()  # exit together: gloo may still be sending
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
