"""DDP by hand: broadcast the weights, hook the gradients, all-reduce buckets during the backward pass.

Autograd calls a hook of each parameter when its gradient is complete. Gradients are computed from the last layer to
the first, so buckets are filled in reverse order. A complete bucket starts its all-reduce, which overlaps with the rest
of backward(). Small buckets cost many messages; one large bucket has no overlap; DDP uses 25 MB (Li et al., 2020).

Run:
    torchrun --standalone --nproc_per_node=2 tutorial/ddp_by_hand.py
Look at:
    The timeline: when the all-reduce of each bucket starts. All but the last start while gradients are still pending.
"""

import os
import time
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 5, 16  # two such batches per step


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al., 2015)."""

    def __init__(self, width_in, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(4, width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(4, width)
        self.shortcut = nn.Conv2d(width_in, width, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        out = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (out + self.shortcut(x)).relu()


def build_model():
    """Return a ResNet of 8 layers for 1 x 28 x 28 images and 10 classes."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.GroupNorm(4, 16), nn.ReLU())
    blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
    return nn.Sequential(stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def build_data(count=1024):
    """Return synthetic (images, labels): ten patterns plus noise."""
    rng = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 1, 7, 7, generator=rng).repeat_interleave(4, 2).repeat_interleave(4, 3)
    labels = torch.randint(10, (count,), generator=rng)
    return patterns[labels] + torch.randn(count, 1, 28, 28, generator=rng), labels


class DDPByHand(nn.Module):
    """DistributedDataParallel, except that wait() is called explicitly after backward()."""

    def __init__(self, module, bucket_bytes=64 * 1024):
        super().__init__()
        self.module, self.syncing, self.trace = module, True, []
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)
        self.buckets = [[]]
        for param in reversed(list(module.parameters())):
            if sum(p.nbytes for p in self.buckets[-1]) >= bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(param)
            param.register_post_accumulate_grad_hook(partial(self.on_gradient, len(self.buckets) - 1))

    def forward(self, x):
        self.pending, self.sent = [len(bucket) for bucket in self.buckets], []
        return self.module(x)

    def on_gradient(self, number, param):
        """Start the all-reduce of every complete bucket, in the same order on all ranks."""
        self.pending[number] -= 1
        while self.syncing and len(self.sent) < len(self.buckets) and self.pending[len(self.sent)] == 0:
            flat = torch.cat([p.grad.flatten() for p in self.buckets[len(self.sent)]]) / dist.get_world_size()
            self.sent.append((flat, dist.all_reduce(flat, async_op=True)))
            self.trace.append((time.perf_counter(), sum(self.pending)))

    def wait(self):
        """Wait for all buckets and write the averages into the gradients."""
        for bucket, (flat, work) in zip(self.buckets, self.sent, strict=True):
            work.wait()
            for param, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                param.grad.copy_(mean.view_as(param))

    @contextmanager
    def no_sync(self):
        """Accumulate gradients locally; only the last of several micro-batches needs an all-reduce."""
        self.syncing = False
        yield
        self.syncing = True


def train(model, images, labels, no_sync=nullcontext, wait=lambda: None):
    """Take STEPS steps of two micro-batches; return (weights, start and end time of the last backward())."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        with no_sync():
            nn.functional.cross_entropy(model(images[step, 0]), labels[step, 0]).div(2).backward()
        loss, start = nn.functional.cross_entropy(model(images[step, 1]), labels[step, 1]).div(2), time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        wait()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), start, end


def main():
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert BATCH % world_size == 0, f"the batch of {BATCH} is not divisible by {world_size} processes"
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # TF32 rounds to 10 bits: an error of 1e-3 instead of 1e-7
    images, labels = (x.to(device).unflatten(0, (STEPS, 2, BATCH)) for x in build_data(count=STEPS * 2 * BATCH))
    shard = images[:, :, rank::world_size], labels[:, :, rank::world_size]
    model = build_model().to(device)
    model[-1].weight.data *= rank == 0  # zero except on rank 0; the broadcast must correct this
    ours, ddp = DDPByHand(model), DistributedDataParallel(build_model().to(device))
    by_hand, start, end = train(ours, *shard, ours.no_sync, ours.wait)
    library, _, _ = train(ddp, *shard, ddp.no_sync)
    single, _, _ = train(build_model().to(device), images, labels)

    count, trace = sum(map(len, ours.buckets)), ours.trace[-len(ours.buckets) :]  # of the last step
    if rank == 0:
        print(f"backward() of the last step: {1e3 * (end - start):.1f} ms, {count} gradients, {len(trace)} buckets")
        for i, (bucket, (moment, pending)) in enumerate(zip(ours.buckets, trace, strict=True)):
            part, size = min((moment - start) / (end - start), 1), sum(p.nbytes for p in bucket) / 1024
            line = f"{'=' * round(40 * part)}>".ljust(42)
            print(f"bucket {i} {size:4.0f} KB |{line}| started at {100 * part:3.0f} %, {pending:2d} gradients pending")

    difference = max((by_hand - other).abs().max().item() for other in (library, single))
    assert difference < 1e-5, f"the weights differ by {difference} from DDP or from one process"
    assert trace[0][1] > count // 2, "no overlap: the first bucket must start before half of the gradients"
    assert len(ours.trace) == STEPS * len(ours.buckets), "no_sync must not communicate"
    dist.destroy_process_group()
    if rank == 0:
        print(f"ok: after {STEPS} steps the weights are equal to DDP and to one process within {difference:.1e}")


if __name__ == "__main__":
    main()
