"""Pipeline parallelism: with P stages and M micro-batches, (P-1)/(M+P-1) of the time is idle.

GPipe (Huang et al., 2019) splits the batch into M micro-batches: rank 1 processes the first one while rank 0 processes
the second. Each rank runs all M forward passes, then all M backward passes. The gradients are accumulated for one
optimizer step, which equals the step on the full batch. M = 1 is the naive model parallelism of lesson 21.

To measure the idle time (the bubble) independently of the machine, every rank keeps a logical clock (Lamport, 1978). A
forward or backward pass takes one tick. A message sets the clock of the receiver to that of the sender if it is later.
The clocks of the real run give the schedule. Then torch.distributed.pipelining trains the same stages.

Run:
    torchrun --standalone --nproc_per_node=4 tutorial/pipeline.py
Look at:
    The schedule: F3 is the forward pass of micro-batch 3, B3 its backward pass, a dot is the bubble.
    The bubble shrinks with M, but each rank stores the activations of all M micro-batches.
"""

import os
from fractions import Fraction

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

LAYERS, WIDTH, BATCH, MICRO_BATCHES, STEPS = 8, 64, 128, 8, 5


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
    """Return the whole model, equal on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def train(model, compute_gradients, device):
    """Take STEPS steps; compute_gradients(inputs, targets) gets the same full batch on every rank."""
    rng = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for _ in range(STEPS):
        compute_gradients(*torch.randn(2, BATCH, WIDTH, generator=rng).to(device))
        optimizer.step()
        optimizer.zero_grad()


class Clock:
    """A logical clock: an action takes one tick; a message is received no earlier than it was sent."""

    def __init__(self):
        self.now, self.done = 0, {}

    def tick(self, action):
        self.done[self.now] = action
        self.now += 1

    def send(self, tensor, to):
        dist.send(torch.tensor(self.now, device=tensor.device), to)
        dist.send(tensor, to)

    def receive(self, tensor, source):
        time = torch.tensor(0, device=tensor.device)
        dist.recv(time, source)
        dist.recv(tensor, source)
        self.now = max(self.now, time.item())


def gpipe(stage, inputs, targets, count):
    """Run all forward passes, then all backward passes; return {tick: action}."""
    rank, last, clock = dist.get_rank(), dist.get_world_size() - 1, Clock()
    saved = []  # (input, output) of each micro-batch, until its backward pass
    for number, (x, target) in enumerate(zip(inputs.chunk(count), targets.chunk(count), strict=True)):
        if rank > 0:
            x = torch.empty_like(x)
            clock.receive(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        clock.tick(f"F{number}")
        if rank < last:
            clock.send(y.detach(), rank + 1)
        else:
            y = F.mse_loss(y, target) / count  # mean of the batch = mean of the means, since sizes are equal
        saved.append((x, y))
    for number in reversed(range(count)):
        x, y = saved.pop()
        gradient = torch.empty_like(y) if rank < last else None
        if rank < last:
            clock.receive(gradient, rank + 1)
        y.backward(gradient)
        clock.tick(f"B{number}")
        if rank > 0:
            clock.send(x.grad, rank - 1)
    return clock.done


def main():
    device = init_distributed()
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = slice(rank * LAYERS // size, (rank + 1) * LAYERS // size)

    for count in (1, 2, 4, MICRO_BATCHES, 16):
        stage, batch = build_layers()[layers].to(device), torch.randn(2, BATCH, WIDTH, device=device)
        timeline = [None] * size
        dist.all_gather_object(timeline, gpipe(stage, *batch, count))
        ticks = 1 + max(max(done) for done in timeline)
        bubble = Fraction(sum(ticks - len(done) for done in timeline), ticks * size)
        if rank == 0:
            print(f"M = {count:2} micro-batches: {ticks:2} ticks, bubble {bubble!s:>4} = {float(bubble):.0%}")
        assert bubble == Fraction(size - 1, count + size - 1), f"M = {count}: bubble {bubble}"
        if rank == 0 and count == MICRO_BATCHES:
            for number, done in enumerate(timeline):
                cells = [f"{done.get(tick, '·'):3}" for tick in range(ticks)]
                print(f"  rank {number} |{''.join(cells)}|")

    reference, by_hand, by_torch = build_layers().to(device), *(build_layers()[layers].to(device) for _ in range(2))
    share = 1 if torch.__version__ >= (2, 7) else MICRO_BATCHES  # older versions sum micro-batches without dividing
    stage_by_torch = PipelineStage(by_torch, rank, size, device)
    schedule = ScheduleGPipe(stage_by_torch, MICRO_BATCHES, loss_fn=lambda y, target: F.mse_loss(y, target) / share)
    is_first, is_last = rank == 0, rank == size - 1
    train(reference, lambda x, y: F.mse_loss(reference(x), y).backward(), device)
    train(by_hand, lambda x, y: gpipe(by_hand, x, y, MICRO_BATCHES), device)
    train(by_torch, lambda x, y: schedule.step(*[x] * is_first, target=y if is_last else None), device)
    for name, stage in (("schedule by hand", by_hand), ("torch.distributed.pipelining", by_torch)):
        pairs = zip(stage.parameters(), reference[layers].parameters(), strict=True)
        error = max((a - b).detach().abs().max() for a, b in pairs)
        dist.all_reduce(error, dist.ReduceOp.MAX)
        assert error <= 1e-5, f"{name}: the weights differ by {error}"
        if rank == 0:
            print(f"{name}: after {STEPS} steps the weights equal one process within {error:.1e}")
    if rank == 0:
        print(f"ok: bubble = (P-1)/(M+P-1) for P = {size} and 5 values of M; weights equal one process within 1e-5")
    dist.barrier()  # exit together: gloo may still be sending
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
