"""Single node, single card: the plain training loop that the next five lessons make parallel by changing a few lines.

A ResNet of 8 layers learns ten classes of small images. Nothing here is distributed. Read it once, slowly: lessons 7 to
11 are this file with a few lines changed, and `diff -u tutorial/snsc.py tutorial/mnmc_ddp_launch.py` shows which. They
print the same table, number for number, because they take the same steps: the same 32 images in every batch, in the
same order, however many processes share them. Two habits make that possible. The order of the images follows from the
number of the epoch alone, so every process can work it out and take its share. And metrics are kept as sums (of losses,
of hits, of images), divided once at the end: sums of shares add up to the sum of the whole; their means do not.

Why float64: a sum taken in another order differs in its last digit, and training multiplies that difference at every
step. In float32 it reaches the printed digits within 50 steps; real training lives with that, our tables cannot.

Run:
    python tutorial/snsc.py
Also:
    python tutorial/snsc.py --data DATA  # Fashion-MNIST; DATA is the folder that holds FashionMNIST/
Look at:
    The last column, the norm of all weights: the fingerprint by which to know this training again in the next lessons.
"""

import argparse

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

EPOCHS, BATCH, LR = 3, 32, 0.01
NORM = 19.197465  # of the weights after training, however many processes share the work


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
    """Return (images, labels): Fashion-MNIST under `root`, else ten patterns under noise, made here."""
    if root:
        from torchvision.datasets import FashionMNIST

        data = FashionMNIST(root)
        return data.data[:count, None].float() / 255, data.targets[:count]
    draw = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 1, 7, 7, generator=draw).repeat_interleave(4, 2).repeat_interleave(4, 3)
    labels = torch.randint(10, (count,), generator=draw)
    return patterns[labels] + torch.randn(count, 1, 28, 28, generator=draw), labels


def one_epoch(model, loader, device, optimizer=None):
    """Go over the loader once, learning if there is an optimizer; return the mean loss and the top-1 accuracy in %."""
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # of losses, of hits, of images
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        with torch.set_grad_enabled(optimizer is not None):
            logits = model(images)
            losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        if optimizer:
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
        hits = logits.argmax(dim=1) == labels
        sums += torch.stack([losses.detach(), hits, torch.ones_like(losses)]).sum(dim=1)
    losses, hits, images = sums.tolist()
    return losses / images, 100 * hits / images


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="the folder that holds FashionMNIST/")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)

    images, labels = build_data(args.data, count=512 + 150)
    images = nn.functional.avg_pool2d(images, 2).double()  # 14 x 14 will do
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
        train_loss, train_top1 = one_epoch(model, train_loader, device, optimizer)
        test_loss, test_top1 = one_epoch(model, test_loader, device)
        weights = parameters_to_vector(model.parameters()).detach()
        row = f"{train_loss:10.3f}  {train_top1:8.1f} %  {test_loss:9.3f}  {test_top1:7.1f} %  {weights.norm():15.6f}"
        print(f"{epoch + 1:5d}  {row}")

    assert test_top1 > (25 if args.data else 90), f"only {test_top1:.1f} % of the test images are right"
    assert args.data or abs(weights.norm() - NORM) < 1e-6, f"norm {weights.norm():.6f}: not the training of one process"
    print(f"ok: {test_top1:.1f} % of {len(test_set)} new images right; norm of weights {weights.norm():.6f}")


if __name__ == "__main__":
    main()
