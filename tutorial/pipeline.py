"""Pipeline: P stages idle (P-1)/(M+P-1) of the time, so the more micro-batches M, the smaller the bubble.

GPipe (Huang et al., 2019) cuts the batch into M micro-batches, so that rank 1 works on the first while rank 0 works
on the second. Each rank goes forward through all M, then backward through all M; gradients add up, and one optimizer
step follows, the step of the whole batch. M = 1 is the naive scheme of lesson 21.

To count the bubble and not the noise of this machine, every rank keeps a logical clock (Lamport, 1978): a forward or
a backward takes one tick, and a message sets its receiver's clock to the sender's if that is later. The clocks of the
real run are the schedule. torch.distributed.pipelining then trains the same stages.

Run:
    torchrun --standalone --nproc_per_node=4 tutorial/pipeline.py
Look at:
    The drawing: F3 is the forward of micro-batch 3, B3 its backward, a dot is the bubble.
    The bubble shrinks with M, but each rank holds all M micro-batches' activations when it turns around.
"""

import os
from fractions import Fraction

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

LAYERS, WIDTH, BATCH, MICRO_BATCHES, STEPS = 8, 64, 128, 8, 5


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
    """Return the whole model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def train(model, compute_gradients, device):
    """Take STEPS steps on a model; compute_gradients(inputs, targets) gets the same whole batch on every rank."""
    draw = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for _ in range(STEPS):
        compute_gradients(*torch.randn(2, BATCH, WIDTH, generator=draw).to(device))
        optimizer.step()
        optimizer.zero_grad()


class Clock:
    """A logical clock: an action takes one tick, and nothing is received before it was sent."""

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
    """Go forward through all micro-batches, then backward through all of them; return what was done at which tick."""
    rank, last, clock = dist.get_rank(), dist.get_world_size() - 1, Clock()
    held = []  # the input and output of each micro-batch, until its backward
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
            y = F.mse_loss(y, target) / count  # the batch's mean is the mean of the micro-batches' means
        held.append((x, y))
    for number in reversed(range(count)):
        x, y = held.pop()
        gradient = torch.empty_like(y) if rank < last else None
        if rank < last:
            clock.receive(gradient, rank + 1)
        y.backward(gradient)
        clock.tick(f"B{number}")
        if rank > 0:
            clock.send(x.grad, rank - 1)
    return clock.done


def main():
    device = join()
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = slice(rank * LAYERS // size, (rank + 1) * LAYERS // size)

    for count in (1, 2, 4, MICRO_BATCHES, 16):
        stage, batch = build_layers()[mine].to(device), torch.randn(2, BATCH, WIDTH, device=device)
        timeline = [None] * size
        dist.all_gather_object(timeline, gpipe(stage, *batch, count))
        ticks = 1 + max(max(done) for done in timeline)
        bubble = Fraction(sum(ticks - len(done) for done in timeline), ticks * size)
        if rank == 0:
            print(f"M = {count:2} micro-batches: {ticks:2} ticks, the bubble is {bubble!s:>4} = {float(bubble):.0%}")
        assert bubble == Fraction(size - 1, count + size - 1), f"M = {count}: the bubble is {bubble}"
        if rank == 0 and count == MICRO_BATCHES:
            for number, done in enumerate(timeline):
                cells = [f"{done.get(tick, '·'):3}" for tick in range(ticks)]
                print(f"  rank {number} |{''.join(cells)}|")

    whole, by_hand, by_torch = build_layers().to(device), *(build_layers()[mine].to(device) for _ in range(2))
    share = 1 if torch.__version__ >= (2, 7) else MICRO_BATCHES  # older ones add micro-batches up and do not divide
    stage_by_torch = PipelineStage(by_torch, rank, size, device)
    schedule = ScheduleGPipe(stage_by_torch, MICRO_BATCHES, loss_fn=lambda y, target: F.mse_loss(y, target) / share)
    is_first, is_last = rank == 0, rank == size - 1
    train(whole, lambda x, y: F.mse_loss(whole(x), y).backward(), device)
    train(by_hand, lambda x, y: gpipe(by_hand, x, y, MICRO_BATCHES), device)
    train(by_torch, lambda x, y: schedule.step(*[x] * is_first, target=y if is_last else None), device)
    for name, stage in (("the schedule by hand", by_hand), ("torch.distributed.pipelining", by_torch)):
        pairs = zip(stage.parameters(), whole[mine].parameters(), strict=True)
        error = max((a - b).detach().abs().max() for a, b in pairs)
        dist.all_reduce(error, dist.ReduceOp.MAX)
        assert error <= 1e-5, f"{name} is {error} off"
        if rank == 0:
            print(f"{name}: {STEPS} steps end {error:.1e} from the weights of one process")
    if rank == 0:
        print(f"ok: the bubble is (P-1)/(M+P-1) for P = {size} and 5 values of M; both equal one process to 1e-5")
    dist.barrier()  # gloo still holds the last tensor for a moment: leave together, when all is done
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
