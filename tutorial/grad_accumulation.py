"""Gradient accumulation: micro-batches give the gradient of the large batch, if every image weighs the same.

A batch that does not fit is cut into micro-batches whose gradients add up in `param.grad`, and the optimizer steps
once. The sum is right when each micro-batch's summed loss is divided by the images of the whole batch. Dividing each by
its own count, which is what a mean loss does, and then by the number of micro-batches is right only while all have the
same size: the last batch of an epoch, padding and masked tokens all break it. And batch norm breaks it always, because
it normalises by the micro-batch it sees (group norm does not look at other images).

Across processes DDP averages gradients at the end of every backward pass, though only the last one matters: `no_sync`
skips the others (Li et al., 2020, PyTorch Distributed, section 3.2.4). All in double precision, so that what is only
rounding is far from what is wrong.

Run:
    torchrun --standalone --nproc_per_node=2 tutorial/grad_accumulation.py
Look at:
    Which rows are at rounding error and which are not; how many all-reduces each way of accumulating pays for.
"""

import contextlib
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, EVEN, UNEVEN = 32, [8, 8, 8, 8], [14, 14, 3, 1]  # images of a process, cut into micro-batches


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


def batch_norms(model):
    """Replace every group norm of `model` by a batch norm."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.GroupNorm):
                setattr(module, name, nn.BatchNorm2d(child.num_channels, dtype=torch.double))
    return model


def accumulate(model, images, labels, sizes, loss_of, quiet=contextlib.nullcontext):
    """Return the gradients that micro-batches of `sizes` add up to, as one vector; all but the last under `quiet`."""
    model.zero_grad()
    for index, (x, y) in enumerate(zip(images.split(sizes), labels.split(sizes), strict=True)):
        with quiet() if index < len(sizes) - 1 else contextlib.nullcontext():
            loss_of(model(x), y).backward()
    return nn.utils.parameters_to_vector([param.grad for param in model.parameters()])


def count_all_reduces(model):
    """Return a list to which the DDP model appends the bytes of each bucket that it all-reduces."""
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
    own, own_labels = images[rank::world], labels[rank::world]
    model = build_model().to(device, torch.double)
    batch_norm = batch_norms(copy.deepcopy(model)).to(device)

    def total(out, y):
        return F.cross_entropy(out, y, reduction="sum") / BATCH

    def own_count(out, y):
        return F.cross_entropy(out, y) / 4  # the mean over the micro-batch, of which there are four

    def show(text):
        if rank == 0:
            print(text)

    def compare(text, found, expected):
        """Return the distance of two gradients, relative to the expected one."""
        off = ((found - expected).norm() / expected.norm()).item()
        show(f"  {text:<50}{off:9.1e}")
        return off

    show(f"one process, {BATCH} images: how far the gradient is from that of the large batch")
    whole = accumulate(model, own, own_labels, [BATCH], total)
    off = [
        compare(f"{sizes}, sum / all images", accumulate(model, own, own_labels, sizes, total), whole)
        for sizes in (EVEN, UNEVEN)
    ]
    off += [compare(f"{EVEN}, mean / 4", accumulate(model, own, own_labels, EVEN, own_count), whole)]
    trap = compare(f"{UNEVEN}, mean / 4", accumulate(model, own, own_labels, UNEVEN, own_count), whole)
    whole = accumulate(batch_norm, own, own_labels, [BATCH], total)
    off_bn = compare(f"{EVEN}, batch norm", accumulate(batch_norm, own, own_labels, EVEN, total), whole)

    show(f"{world} processes, {BATCH} images each: how far from one process with all {BATCH * world}")
    whole = accumulate(model, images, labels, [BATCH * world], total) / world
    ddp = DistributedDataParallel(model, device_ids=[device.index] if on_cuda else None)
    buckets, sent = count_all_reduces(ddp), []
    for name, quiet in (("DDP", contextlib.nullcontext), ("DDP, no_sync", ddp.no_sync)):
        buckets.clear()
        off.append(compare(f"{EVEN}, {name}", accumulate(ddp, own, own_labels, EVEN, total, quiet), whole))
        sent.append(sum(buckets))
        show(f"    {len(buckets)} all-reduces, {sum(buckets) / 1e6:.2f} MB")

    assert max(off) < 1e-12, off
    assert trap > 0.1 and off_bn > 0.1, (trap, off_bn)
    assert sent[0] == len(EVEN) * sent[1], sent
    wrong = f"the wrong count is {trap:.0%} off, batch norm {off_bn:.0%}; no_sync sends 1/{len(EVEN)} of the bytes"
    show(f"ok: micro-batches equal the large batch to {max(off):.0e}; {wrong}")
    dist.barrier()  # gloo still holds the last tensor for a moment: leave together, when all is done
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
