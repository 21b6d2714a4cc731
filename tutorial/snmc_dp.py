"""Single node, many cards, one process: DataParallel changes one line, and sends everything through the first card.

At every step DataParallel scatters the batch, copies all weights to every card, runs one thread a card, gathers the
logits, and adds up the gradients on card 0. Copied card by card, 2(N-1) times the weights pass it, where DDP's ring
moves 4(N-1)/N through each card. (With NCCL torch broadcasts and reduces along a ring as well, but in every step, with
nothing to hide behind.) And N threads share one interpreter and its lock, on one node only. So use DDP. Without GPUs
DataParallel just calls the module; `by_hand` has all "cards" on one device, and the bytes are the same.

Run:
    python tutorial/snmc_dp.py
Look at:
    The table of `snsc.py` again; then how the traffic of card 0 grows with the number of cards, and DDP's does not.
"""

import argparse

import torch
from torch import nn
from torch.func import functional_call
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


def by_hand(model, images, cards):
    """Do what DataParallel does in a forward pass; return the logits and a list of the bytes that pass card 0."""
    moved = []

    def move(tensor, card):
        copy = tensor.to(card, copy=True)
        moved.append(copy.nbytes * (2 if copy.requires_grad else 1))  # twice: its gradient comes back the same way
        return copy

    own, *shards = images.chunk(len(cards))
    logits = [model(own)]  # card 0 has all it needs; the real one runs the cards in threads, not one after the other
    for card, shard in zip(cards[1:], shards, strict=True):
        weights = {name: move(weight, card) for name, weight in model.named_parameters()}  # replicate
        logits.append(move(functional_call(model, weights, move(shard, card)), cards[0]))  # scatter, apply, gather
    return torch.cat(logits), moved


def compare(model, images, labels):
    """Print the traffic with 2, 4 and 8 cards; return by how much the gradients differ from those of one card."""
    weights = list(model.parameters())
    size, error = sum(weight.nbytes for weight in weights), 0
    wanted = torch.autograd.grad(nn.functional.cross_entropy(model(images), labels), weights)
    print(f"\nMB a step; the weights are {size / 1e6:.2f}\ncards  DataParallel, card 0  DDP, any card")
    for n in (2, 4, 8):
        logits, moved = by_hand(model, images, [images.device] * n)
        grads = torch.autograd.grad(nn.functional.cross_entropy(logits, labels), weights)
        error = max(error, *((grad - want).abs().max().item() for grad, want in zip(grads, wanted, strict=True)))
        assert 0 < sum(moved) / size - 2 * (n - 1) < 0.1, "besides weights and gradients only images and logits pass"
        print(f"{n:5d}  {sum(moved) / 1e6:20.2f}  {4 * (n - 1) / n * size / 1e6:13.2f}")
    return error


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
    replicas = nn.DataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)

    print(f"{device}: global batch {BATCH}")
    print("epoch  train loss  train top1  test loss  test top1  norm of weights")
    for epoch in range(EPOCHS):
        train_sampler.generator.manual_seed(epoch)
        train_loss, train_top1 = one_epoch(replicas, train_loader, device, optimizer)
        test_loss, test_top1 = one_epoch(model, test_loader, device)
        weights = parameters_to_vector(model.parameters()).detach()
        row = f"{train_loss:10.3f}  {train_top1:8.1f} %  {test_loss:9.3f}  {test_top1:7.1f} %  {weights.norm():15.6f}"
        print(f"{epoch + 1:5d}  {row}")

    assert test_top1 > (25 if args.data else 90), f"only {test_top1:.1f} % of the test images are right"
    assert args.data or abs(weights.norm() - NORM) < 1e-6, f"norm {weights.norm():.6f}: not the training of one process"
    error = compare(model, *(tensor.to(device) for tensor in train_set[:BATCH]))
    assert error < 1e-10, f"the gradients by hand differ by {error}"
    print(f"ok: norm of weights {weights.norm():.6f}, as from one card; gradients by hand equal to {error:.1e}")


if __name__ == "__main__":
    main()
