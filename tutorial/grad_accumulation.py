"""Gradient accumulation: micro-batches give the gradient of the large batch if all images have equal weight.

A batch that does not fit into memory is split into micro-batches. Their gradients are summed in `param.grad`, and the
optimizer takes one step. The result is correct if the summed loss of each micro-batch is divided by the number of
images of the whole batch. The mean loss of each micro-batch, divided by the number of micro-batches, is correct only if
all have the same size: the last batch of an epoch, padding and masked tokens break it. Batch norm always breaks it,
because it normalizes over the micro-batch (group norm normalizes each image separately).

DDP averages gradients during every backward pass, but only the last average is needed: `no_sync` skips the
others (Li et al., 2020, PyTorch Distributed, section 3.2.4). Double precision separates rounding from real errors.

Run:
    torchrun --standalone --nproc_per_node=2 tutorial/grad_accumulation.py
Look at:
    The rows with rounding errors only, and the rows with real errors. Then the all-reduces with and without no_sync.
"""

import contextlib
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, EVEN, UNEVEN = 32, [8, 8, 8, 8], [14, 14, 3, 1]  # images per process, sizes of micro-batches


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


def replace_group_norm(model):
    """Replace every GroupNorm of `model` by BatchNorm2d."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.GroupNorm):
                setattr(module, name, nn.BatchNorm2d(child.num_channels, dtype=torch.double))
    return model


def accumulate(model, images, labels, sizes, loss_fn, no_sync=contextlib.nullcontext):
    """Accumulate micro-batches of `sizes`, all but the last under `no_sync`; return the gradients as one vector."""
    model.zero_grad()
    for index, (x, y) in enumerate(zip(images.split(sizes), labels.split(sizes), strict=True)):
        with no_sync() if index < len(sizes) - 1 else contextlib.nullcontext():
            loss_fn(model(x), y).backward()
    return nn.utils.parameters_to_vector([param.grad for param in model.parameters()])


def count_all_reduces(model):
    """Return a list to which the DDP model appends the bytes of each all-reduced bucket."""
    buckets = []

    def average(_, bucket):
        buckets.append(bucket.buffer().nbytes)
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, average)
    return buckets


def main():
    torch.set_num_threads(1)
    on_cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    dist.init_process_group("nccl" if on_cuda else "gloo", device_id=device if on_cuda else None)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images = torch.randn(BATCH * world, 1, 28, 28, dtype=torch.double).to(device)
    labels = torch.randint(10, (BATCH * world,)).to(device)
    shard, shard_labels = images[rank::world], labels[rank::world]
    model = build_model().to(device, torch.double)
    batch_norm = replace_group_norm(copy.deepcopy(model)).to(device)

    def sum_over_batch(out, y):
        return F.cross_entropy(out, y, reduction="sum") / BATCH

    def mean_over_4(out, y):
        return F.cross_entropy(out, y) / 4  # mean of the micro-batch, divided by the number of micro-batches

    def log(text):
        if rank == 0:
            print(text)

    def compare(text, found, expected):
        """Print and return the relative difference of two gradients."""
        error = ((found - expected).norm() / expected.norm()).item()
        log(f"  {text:<50}{error:9.1e}")
        return error

    log(f"one process, {BATCH} images: relative difference from the gradient of the large batch")
    whole = accumulate(model, shard, shard_labels, [BATCH], sum_over_batch)
    errors = [
        compare(f"{sizes}, sum / 32", accumulate(model, shard, shard_labels, sizes, sum_over_batch), whole)
        for sizes in (EVEN, UNEVEN)
    ]
    errors += [compare(f"{EVEN}, mean / 4", accumulate(model, shard, shard_labels, EVEN, mean_over_4), whole)]
    wrong_mean = compare(f"{UNEVEN}, mean / 4", accumulate(model, shard, shard_labels, UNEVEN, mean_over_4), whole)
    whole = accumulate(batch_norm, shard, shard_labels, [BATCH], sum_over_batch)
    bn_error = compare(f"{EVEN}, batch norm", accumulate(batch_norm, shard, shard_labels, EVEN, sum_over_batch), whole)

    log(f"{world} processes, {BATCH} images each: relative difference from one process with {BATCH * world} images")
    whole = accumulate(model, images, labels, [BATCH * world], sum_over_batch) / world
    ddp = DistributedDataParallel(model, device_ids=[device.index] if on_cuda else None)
    buckets, sent = count_all_reduces(ddp), []
    for name, no_sync in (("DDP", contextlib.nullcontext), ("DDP, no_sync", ddp.no_sync)):
        buckets.clear()
        found = accumulate(ddp, shard, shard_labels, EVEN, sum_over_batch, no_sync)
        errors.append(compare(f"{EVEN}, {name}", found, whole))
        sent.append(sum(buckets))
        log(f"    {len(buckets)} all-reduces, {sum(buckets) / 1e6:.2f} MB")

    assert max(errors) < 1e-12, errors
    assert wrong_mean > 0.1 and bn_error > 0.1, (wrong_mean, bn_error)
    assert sent[0] == len(EVEN) * sent[1], sent
    others = f"mean of means {wrong_mean:.0%}, batch norm {bn_error:.0%}; no_sync sends 1/{len(EVEN)} of the bytes"
    log(f"ok: error of micro-batches {max(errors):.0e}, {others}")
    dist.barrier()  # exit together: gloo may still be sending
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
