"""Single node, multiple GPUs, one process: DataParallel changes one line, but all traffic passes through GPU 0.

In each step DataParallel scatters the batch, copies all weights to every GPU, runs one thread per GPU, gathers the
logits and sums the gradients on GPU 0. With one copy per GPU, the traffic of GPU 0 is 2(N-1) times the weights. With
the ring of DDP it is 4(N-1)/N times the weights on each GPU. (With NCCL torch also uses rings, but in every step and
without overlap.) The N threads share one Python interpreter and its lock, and cannot use a second node. Use DDP.

Run:
    python tutorial/snmc_dp.py
Look at:
    The table of `snsc.py` again. Then the traffic of GPU 0: it grows with the number of GPUs; that of DDP does not.
"""

import argparse

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

EPOCHS, BATCH, LR = 3, 32, 0.01
NORM = 19.197465  # L2 norm of the weights after training, for any number of processes


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


def build_data(root=None, count=1024):
    """Return (images, labels): Fashion-MNIST from `root`, or synthetic: ten patterns plus noise."""
    if root:
        from torchvision.datasets import FashionMNIST

        data = FashionMNIST(root)
        return data.data[:count, None].float() / 255, data.targets[:count]
    rng = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 1, 7, 7, generator=rng).repeat_interleave(4, 2).repeat_interleave(4, 3)
    labels = torch.randint(10, (count,), generator=rng)
    return patterns[labels] + torch.randn(count, 1, 28, 28, generator=rng), labels


def run_epoch(model, loader, device, optimizer=None):
    """Run one epoch, training if there is an optimizer; return the mean loss and the top-1 accuracy in %."""
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct predictions, images
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        with torch.set_grad_enabled(optimizer is not None):
            logits = model(images)
            losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        if optimizer:
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
        correct = logits.argmax(dim=1) == labels
        sums += torch.stack([losses.detach(), correct, torch.ones_like(losses)]).sum(dim=1)
    losses, correct, images = sums.tolist()
    return losses / images, 100 * correct / images


def data_parallel_by_hand(model, images, devices):
    """Do the forward pass of DataParallel; return the logits and the sizes in bytes of all copies from or to GPU 0."""
    copied = []

    def copy_to(tensor, device):
        copy = tensor.to(device, copy=True)
        copied.append(copy.nbytes * (2 if copy.requires_grad else 1))  # twice: the gradient returns the same way
        return copy

    own, *shards = images.chunk(len(devices))
    logits = [model(own)]  # GPU 0 needs no copies; DataParallel runs the GPUs in parallel threads
    for device, shard in zip(devices[1:], shards, strict=True):
        weights = {name: copy_to(weight, device) for name, weight in model.named_parameters()}  # replicate
        output = functional_call(model, weights, copy_to(shard, device))  # scatter, apply
        logits.append(copy_to(output, devices[0]))  # gather
    return torch.cat(logits), copied


def compare(model, images, labels):
    """Print the traffic with 2, 4 and 8 GPUs; return the maximum difference of the gradients from one GPU."""
    weights = list(model.parameters())
    size, error = sum(weight.nbytes for weight in weights), 0
    expected = torch.autograd.grad(nn.functional.cross_entropy(model(images), labels), weights)
    print(f"\ntraffic in MB per step; weights: {size / 1e6:.2f} MB\n GPUs  DataParallel, GPU 0  DDP, each GPU")
    for n in (2, 4, 8):
        logits, copied = data_parallel_by_hand(model, images, [images.device] * n)
        grads = torch.autograd.grad(nn.functional.cross_entropy(logits, labels), weights)
        error = max(error, *((a - b).abs().max().item() for a, b in zip(grads, expected, strict=True)))
        assert 0 < sum(copied) / size - 2 * (n - 1) < 0.1, "the rest is images and logits"
        print(f"{n:5d}  {sum(copied) / 1e6:19.2f}  {4 * (n - 1) / n * size / 1e6:13.2f}")
    return error


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="folder that contains FashionMNIST/")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)

    images, labels = build_data(args.data, count=512 + 150)
    images = nn.functional.avg_pool2d(images, 2).double()  # downsample to 14 x 14
    train_set, test_set = TensorDataset(images[:512], labels[:512]), TensorDataset(images[512:], labels[512:])
    train_sampler = RandomSampler(train_set, generator=torch.Generator())
    train_loader = DataLoader(train_set, BATCH, sampler=train_sampler)
    test_loader = DataLoader(test_set, BATCH)
    model = build_model().double().to(device)
    replicas = nn.DataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)

    print(f"{device}: global batch {BATCH}")
    print("epoch  train loss  train top1  test loss  test top1  norm of weights")
    for epoch in range(EPOCHS):
        train_sampler.generator.manual_seed(epoch)
        train_loss, train_top1 = run_epoch(replicas, train_loader, device, optimizer)
        test_loss, test_top1 = run_epoch(model, test_loader, device)
        weights = parameters_to_vector(model.parameters()).detach()
        row = f"{train_loss:10.3f}  {train_top1:8.1f} %  {test_loss:9.3f}  {test_top1:7.1f} %  {weights.norm():15.6f}"
        print(f"{epoch + 1:5d}  {row}")

    assert test_top1 > (25 if args.data else 90), f"test top-1 accuracy is only {test_top1:.1f} %"
    assert args.data or abs(weights.norm() - NORM) < 1e-6, f"norm of weights {weights.norm():.6f}; expected {NORM}"
    error = compare(model, *(tensor.to(device) for tensor in train_set[:BATCH]))
    assert error < 1e-10, f"the gradients differ by {error}"
    print(f"ok: norm of weights {weights.norm():.6f}, equal to one GPU; gradients by hand equal within {error:.1e}")


if __name__ == "__main__":
    main()
