"""SyncBN by hand: batch normalization with the mean and variance of the global batch.

Batch norm (Ioffe and Szegedy, 2015) couples the images of a batch. Under DDP each process has its own statistics, so N
processes with 2 images each train differently from one process with 2N images. SyncBN sums the values, their squares
and the count over all processes: one all-reduce per layer in the forward pass. Its gradient needs two more sums: one
all-reduce in the backward pass. Since counts are summed too, the shards may be uneven. (nn.SyncBatchNorm of torch runs
on GPUs only; there it is compared as well.)

Do not use it if every process has enough images. The error of the mean of b images falls as 1/sqrt(b). Above about 32
images per process there is no benefit, and each layer waits twice per step for the slowest process, without overlap.

Run:
    torchrun --standalone --nproc_per_node=3 tutorial/syncbn.py
Look at:
    The differences from batch norm over the global batch; the time of the collectives; the error of the batch mean.
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn

SIZES = [[4, 4, 4], [7, 3, 1]]  # images on processes 0, 1, 2
WIDTH, LAYERS, COLLECTIVES = 16, 53, []  # ResNet-50 has 53 batch norms


def all_reduce(tensor):
    """Sum a tensor over all processes and record the call."""
    COLLECTIVES.append(tensor.numel())
    dist.all_reduce(tensor)
    return tensor


def per_channel(vector):
    """Return a vector of C numbers as a view that broadcasts over (N, C, H, W)."""
    return vector[None, :, None, None]


class Normalize(torch.autograd.Function):
    """Normalize with the mean and std of all images; the gradient includes their dependence on x."""

    @staticmethod
    def forward(ctx, x, eps):
        count = x.new_tensor([x.numel() / x.shape[1]])
        sums = all_reduce(torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count]))
        mean, square, count = sums[:WIDTH] / sums[-1], sums[WIDTH:-1] / sums[-1], sums[-1]
        var = square - mean**2  # inaccurate if mean >> std; torch merges variances instead
        std = (var + eps).sqrt()
        normal = (x - per_channel(mean)) / per_channel(std)
        ctx.save_for_backward(normal, std, count)
        ctx.mark_non_differentiable(mean, var, count)
        return normal, mean, var, count

    @staticmethod
    def backward(ctx, grad, *_):
        normal, std, count = ctx.saved_tensors
        sums = all_reduce(torch.cat([grad.sum((0, 2, 3)), (grad * normal).sum((0, 2, 3))])) / count
        return (grad - per_channel(sums[:WIDTH]) - normal * per_channel(sums[WIDTH:])) / per_channel(std), None


class SyncBatchNormByHand(nn.BatchNorm2d):
    """Training-mode batch norm with the statistics of all processes (evaluation uses the running statistics)."""

    def forward(self, x):
        normal, mean, var, count = Normalize.apply(x, self.eps)
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(var * count / (count - 1), self.momentum)  # unbiased, as in torch
        return normal * per_channel(self.weight) + per_channel(self.bias)


def run(norm, x, target):
    """Run forward and backward; return the output, gradients of x, weight and bias, and running statistics."""
    torch.manual_seed(1)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = x.clone().requires_grad_()
    out = norm(x)
    ((out - target) ** 2).sum().backward()
    return [out.detach(), x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var]


def compare(kind, sizes, rank, device):
    """Return the largest difference from plain batch norm over the concatenated batch."""
    rng = torch.Generator().manual_seed(0)
    x, target = (3 + 2 * torch.randn(2, sum(sizes), WIDTH, 6, 6, generator=rng)).to(device)
    shard = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    out, grad, *whole = run(nn.BatchNorm2d(WIDTH).to(device), x, target)
    ours = run(kind(WIDTH).to(device), x[shard], target[shard])
    dist.all_reduce(ours[2])  # each process has only its part of the gradients of weight and bias
    dist.all_reduce(ours[3])
    scaled = [(a - b).abs().max() / b.abs().max() for a, b in zip(ours, [out[shard], grad[shard], *whole], strict=True)]
    worst = torch.stack(scaled).max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def mean_error(features, size):
    """Return the RMS error of the mean of `size` images, in standard deviations."""
    rng = torch.Generator().manual_seed(0)
    batches = (features[torch.randint(len(features), (size,), generator=rng)] for _ in range(200))
    means = torch.stack([batch.mean((0, 2, 3)) for batch in batches])
    return ((means - features.mean((0, 2, 3))).square().mean(0) / features.var((0, 2, 3))).mean().sqrt().item()


def main():
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert world_size == len(SIZES[0]), f"needs {len(SIZES[0])} processes, got {world_size}"
    torch.set_num_threads(1)

    kinds = [SyncBatchNormByHand] + ([nn.SyncBatchNorm] if cuda else [])
    errors = {(k.__name__, *sizes): compare(k, sizes, rank, device) for k in kinds for sizes in SIZES}
    per_layer = len(COLLECTIVES) / len(SIZES)
    local = compare(nn.BatchNorm2d, SIZES[0], rank, device)

    start = time.perf_counter()
    for _ in range(50):
        dist.all_reduce(sums := torch.ones(2 * WIDTH + 1, device=device))
        sums[0].item()  # waits for the GPU
    seconds = (time.perf_counter() - start) / 50

    images = torch.randn(512, 1, 1, 1) + torch.randn(512, 1, 12, 12)
    features = nn.functional.conv2d(images, torch.randn(WIDTH, 1, 3, 3))
    mean_errors = {size: mean_error(features, size) for size in (2, 8, 32, 128)}
    if rank == 0:
        for (name, *sizes), error in errors.items():
            print(f"{name} on {sizes} images: largest relative difference {error:.1e}")
        print(f"BatchNorm2d on {SIZES[0]} images, not synchronized: {local:.1e}")
        print(f"\n{per_layer:.0f} all-reduces per layer and step, {1e3 * seconds:.2f} ms each: ", end="")
        print(f"{1e3 * seconds * per_layer * LAYERS:.0f} ms per step for the {LAYERS} layers of ResNet-50")
        print("\nimages per batch  error of the batch mean")
        for size, value in mean_errors.items():
            print(f"{size:16d}  {value:.3f} standard deviations {'#' * round(80 * value)}")

    worst = max(errors.values())
    assert worst < 1e-5 < local, f"differs from batch norm over the global batch by {worst}"
    assert per_layer == 2, "one all-reduce forward, one backward"
    assert 6 < mean_errors[2] / mean_errors[128] < 10, "64 x the images must give 1/8 of the error"
    dist.barrier()  # exit together: gloo may still be sending
    dist.destroy_process_group()
    if rank == 0:
        print(f"ok: {world_size} processes equal batch norm over the global batch within {worst:.1e}, even and uneven")


if __name__ == "__main__":
    main()
