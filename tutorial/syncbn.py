"""SyncBN: batch norm whose mean and variance are those of the batch of all processes, by hand.

Batch norm (Ioffe and Szegedy, 2015) mixes the images of a batch; under DDP each process has its own statistics, so N
processes with 2 images each do not train like one with 2N. SyncBN adds up sum, sum of squares and count, one
all-reduce a layer forward; its gradient needs two more sums, one all-reduce backward. Batches may be uneven, because
counts travel too. (torch's own nn.SyncBatchNorm runs on GPUs only; there it is compared as well.)

When not to use it: when every process has enough images. The mean of b images misses the true one by 1/sqrt(b); beyond
some 32 a process nothing is gained, and each layer waits twice a step for the slowest process. No overlap can hide it.

Run:
    torchrun --standalone --nproc_per_node=3 tutorial/syncbn.py
Look at:
    The errors against plain batch norm over the whole batch; what the collectives cost; what they would buy.
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn

SIZES = [[4, 4, 4], [7, 3, 1]]  # images on processes 0, 1, 2
WIDTH, LAYERS, COLLECTIVES = 16, 53, []  # ResNet-50 has 53 batch norms


def all_reduce(tensor):
    """Add up a tensor over all processes, and count it."""
    COLLECTIVES.append(tensor.numel())
    dist.all_reduce(tensor)
    return tensor


def row(vector):
    """Return a vector of one number a channel so that it broadcasts over images of (N, C, H, W)."""
    return vector[None, :, None, None]


class Normalize(torch.autograd.Function):
    """Subtract the mean and divide by the std of all images; both depend on x, and so the gradient passes them."""

    @staticmethod
    def forward(ctx, x, eps):
        count = x.new_tensor([x.numel() / x.shape[1]])
        sums = all_reduce(torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count]))
        mean, square, count = sums[:WIDTH] / sums[-1], sums[WIDTH:-1] / sums[-1], sums[-1]
        var = square - mean**2  # loses digits where the mean is far larger than the std; torch merges variances
        std = (var + eps).sqrt()
        normal = (x - row(mean)) / row(std)
        ctx.save_for_backward(normal, std, count)
        ctx.mark_non_differentiable(mean, var, count)
        return normal, mean, var, count

    @staticmethod
    def backward(ctx, grad, *_):
        normal, std, count = ctx.saved_tensors
        sums = all_reduce(torch.cat([grad.sum((0, 2, 3)), (grad * normal).sum((0, 2, 3))])) / count
        return (grad - row(sums[:WIDTH]) - normal * row(sums[WIDTH:])) / row(std), None


class SyncBatchNormByHand(nn.BatchNorm2d):
    """Batch norm with the statistics of all processes, in training (evaluation has no need of them)."""

    def forward(self, x):
        normal, mean, var, count = Normalize.apply(x, self.eps)
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(var * count / (count - 1), self.momentum)  # unbiased, as torch keeps it
        return normal * row(self.weight) + row(self.bias)


def run(norm, x, target):
    """Do one forward and backward pass; return output, gradients of x, weight and bias, and running statistics."""
    torch.manual_seed(1)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = x.clone().requires_grad_()
    out = norm(x)
    ((out - target) ** 2).sum().backward()
    return [out.detach(), x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var]


def compare(kind, sizes, rank, device):
    """Return the largest difference from plain batch norm over the concatenated batch."""
    draw = torch.Generator().manual_seed(0)
    x, target = (3 + 2 * torch.randn(2, sum(sizes), WIDTH, 6, 6, generator=draw)).to(device)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    out, grad, *whole = run(nn.BatchNorm2d(WIDTH).to(device), x, target)
    ours = run(kind(WIDTH).to(device), x[mine], target[mine])
    dist.all_reduce(ours[2])  # as each process knows only its share of the gradients of weight and bias
    dist.all_reduce(ours[3])
    scaled = [(a - b).abs().max() / b.abs().max() for a, b in zip(ours, [out[mine], grad[mine], *whole], strict=True)]
    worst = torch.stack(scaled).max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def miss(features, size):
    """Return by how much, in standard deviations, the mean of a batch of `size` images misses the mean of all."""
    draw = torch.Generator().manual_seed(0)
    batches = (features[torch.randint(len(features), (size,), generator=draw)] for _ in range(200))
    means = torch.stack([batch.mean((0, 2, 3)) for batch in batches])
    return ((means - features.mean((0, 2, 3))).square().mean(0) / features.var((0, 2, 3))).mean().sqrt().item()


def main():
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert world_size == len(SIZES[0]), f"SIZES is for {len(SIZES[0])} processes, not for {world_size}"
    torch.set_num_threads(1)

    kinds = [SyncBatchNormByHand] + ([nn.SyncBatchNorm] if cuda else [])
    errors = {(k.__name__, *sizes): compare(k, sizes, rank, device) for k in kinds for sizes in SIZES}
    per_layer = len(COLLECTIVES) / len(SIZES)
    local = compare(nn.BatchNorm2d, SIZES[0], rank, device)

    start = time.perf_counter()
    for _ in range(50):
        dist.all_reduce(sums := torch.ones(2 * WIDTH + 1, device=device))
        sums[0].item()  # on a GPU this waits for the result
    seconds = (time.perf_counter() - start) / 50

    images = torch.randn(512, 1, 1, 1) + torch.randn(512, 1, 12, 12)
    features = nn.functional.conv2d(images, torch.randn(WIDTH, 1, 3, 3))
    misses = {size: miss(features, size) for size in (2, 8, 32, 128)}
    if rank == 0:
        for (name, *sizes), error in errors.items():
            print(f"{name} on {sizes} images: largest relative difference {error:.1e}")
        print(f"BatchNorm2d on {SIZES[0]} images, not synchronised: {local:.1e}")
        print(f"\n{per_layer:.0f} all-reduces a layer and step, {1e3 * seconds:.2f} ms each: ", end="")
        print(f"{1e3 * seconds * per_layer * LAYERS:.0f} ms a step for the {LAYERS} layers of ResNet-50")
        print("\nimages a batch   its mean misses the true one by")
        for size, value in misses.items():
            print(f"{size:14d}   {value:.3f} standard deviations {'#' * round(80 * value)}")

    worst = max(errors.values())
    assert worst < 1e-5 < local, f"differs from batch norm over the whole batch by {worst}"
    assert per_layer == 2, "one all-reduce forward, one backward"
    assert 6 < misses[2] / misses[128] < 10, "64 times the images, 1/8 of the error"
    dist.barrier()  # gloo still holds the last tensor for a moment: leave together, when all is done
    dist.destroy_process_group()
    if rank == 0:
        print(f"ok: {world_size} processes equal plain batch norm over the whole batch to {worst:.1e}, uneven or not")


if __name__ == "__main__":
    main()
