"""Single node, single GPU: the plain training loop that the next five lessons parallelize.

A ResNet with 8 layers is trained on ten classes of small images. Nothing here is distributed. Lessons 7 to 11 are this
file with a few lines changed; `diff -u tutorial/snsc.py tutorial/mnmc_ddp_launch.py` shows which. They print the same
table, because every step uses the same 32 images, for any number of processes. Two properties make this possible. The
order of the images depends on the epoch number only, so every process can compute it and take its share. Metrics are
accumulated as sums (losses, correct predictions, images) and divided once at the end. Sums of shards add up to the
sum of the whole data set; means of shards do not.

Why float64: floating-point sums depend on the order of summation, and training amplifies the difference in each step.
In float32 the printed digits differ within 50 steps. That is acceptable in practice, but not for comparing tables.

Run:
    python tutorial/snsc.py
Also:
    python tutorial/snsc.py --data DATA  # Fashion-MNIST; DATA is the folder that contains FashionMNIST/
Look at:
    The last column, the norm of all weights. The next lessons compare with it.
"""

import argparse

import torch
from torch import nn
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
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)

    print(f"{device}: global batch {BATCH}")
    print("epoch  train loss  train top1  test loss  test top1  norm of weights")
    for epoch in range(EPOCHS):
        train_sampler.generator.manual_seed(epoch)
        train_loss, train_top1 = run_epoch(model, train_loader, device, optimizer)
        test_loss, test_top1 = run_epoch(model, test_loader, device)
        weights = parameters_to_vector(model.parameters()).detach()
        row = f"{train_loss:10.3f}  {train_top1:8.1f} %  {test_loss:9.3f}  {test_top1:7.1f} %  {weights.norm():15.6f}"
        print(f"{epoch + 1:5d}  {row}")

    assert test_top1 > (25 if args.data else 90), f"test top-1 accuracy is only {test_top1:.1f} %"
    assert args.data or abs(weights.norm() - NORM) < 1e-6, f"norm of weights {weights.norm():.6f}; expected {NORM}"
    print(f"ok: test top-1 {test_top1:.1f} % on {len(test_set)} images; norm of weights {weights.norm():.6f}")


if __name__ == "__main__":
    main()
