"""Training script for torchrun and Slurm with checkpoints: it resumes after a kill and reaches the same weights.

It adds two things to `mnmc_ddp_launch.py`: a checkpoint of the weights and the optimizer state after every epoch, and
an evaluation that counts each image once, although 150 images are not divisible by 4.

Run:
    torchrun --standalone --nproc_per_node=2 tutorial/imagenet.py --stop-after 2
    torchrun --standalone --nproc_per_node=4 tutorial/imagenet.py
Also:
    srun -N 2 -n 4 python tutorial/imagenet.py
    torchrun --standalone --nproc_per_node=8 tutorial/imagenet.py --data IMAGENET --checkpoint DISK/imagenet.pt
Look at:
    The first run stops after epoch 2. The second run resumes on 4 processes and completes the table of `snsc.py`.
"""

import argparse
import os
import subprocess

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, LR = 3, 32, 0.01
NORMS = 18.875360, 19.011800, 19.197465  # L2 norm of the weights after training, for any number of processes


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
    """Return (training set, test set): the class folders of root/train/ and root/val/, or synthetic images."""
    if root:
        from torchvision import datasets, io, transforms

        steps = [lambda path: io.decode_image(path, "GRAY"), transforms.Resize((64, 64)), lambda pixels: pixels / 255]
        transform = transforms.Compose(steps)  # includes reading: the default reader starts Ghostscript for EPS files
        return [datasets.ImageFolder(os.path.join(root, part), transform, loader=str) for part in ("train", "val")]
    rng = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 1, 7, 7, generator=rng).repeat_interleave(4, 2).repeat_interleave(4, 3)
    labels = torch.randint(10, (count,), generator=rng)
    images = nn.functional.avg_pool2d(patterns[labels] + torch.randn(count, 1, 28, 28, generator=rng), 2).double()
    return TensorDataset(images[:512], labels[:512]), TensorDataset(images[512:], labels[512:])


def run_epoch(model, loader, device, optimizer=None):
    """Run one epoch, training if there is an optimizer; return the mean loss and the top-1 accuracy in %."""
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct predictions, images
    for images, labels in loader:
        images, labels = images.double().to(device), labels.to(device)
        with torch.set_grad_enabled(optimizer is not None):
            logits = model(images)
            losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        if optimizer:
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
        correct = logits.argmax(dim=1) == labels
        sums += torch.stack([losses.detach(), correct, torch.ones_like(losses)]).sum(dim=1)
    dist.all_reduce(sums)  # sum over all processes before dividing
    losses, correct, images = sums.tolist()
    assert optimizer or images == len(loader.dataset), "each test image must be counted once"
    return losses / images, 100 * correct / images


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="ImageNet folder with train/ and val/")
    parser.add_argument("--checkpoint", default="imagenet.pt")
    parser.add_argument("--stop-after", type=int, default=EPOCHS, help="stop after this epoch, to test resuming")
    args = parser.parse_args()
    env = os.environ
    if "RANK" not in env:  # under srun: set the variables that torchrun sets
        env.update(RANK=env["SLURM_PROCID"], LOCAL_RANK=env["SLURM_LOCALID"], WORLD_SIZE=env["SLURM_NTASKS"])
        hosts = subprocess.check_output(["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]).decode().split()
        env.update(MASTER_ADDR=hosts[0], MASTER_PORT=str(20000 + int(env["SLURM_JOB_ID"]) % 10000))
        env.update(LOCAL_WORLD_SIZE=str(-(-int(env["SLURM_NTASKS"]) // len(hosts))))  # rounded up
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert BATCH % world_size == 0, f"the batch of {BATCH} is not divisible by {world_size} processes"
    torch.set_num_threads(1)
    train_set, test_set = build_data(args.data, count=512 + 150)
    train_sampler = DistributedSampler(train_set)  # position i goes to rank i % world_size
    train_loader = DataLoader(train_set, BATCH // world_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, BATCH // world_size, sampler=range(rank, len(test_set), world_size))
    model = build_model()
    model[-1] = nn.Linear(64, len(test_set.classes)) if args.data else model[-1]  # or use your own model
    model = model.double().to(device)
    replica = DistributedDataParallel(model)  # averages the gradients in backward()
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    if rank == 0:
        print(f"{device.type} x {world_size}: global batch {BATCH} = {world_size} x {BATCH // world_size}")
        print("epoch  train loss  train top1  test loss  test top1  norm of weights")
    state = {"epoch": 0, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if os.path.exists(args.checkpoint):  # on a file system shared by all nodes
        state = torch.load(args.checkpoint, map_location=device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for epoch in range(state["epoch"], args.stop_after):
        train_sampler.set_epoch(epoch)
        train_loss, train_top1 = run_epoch(replica, train_loader, device, optimizer)
        test_loss, test_top1 = run_epoch(model, test_loader, device)
        norm = parameters_to_vector(model.parameters()).norm()
        row = f"{train_loss:10.3f}  {train_top1:8.1f} %  {test_loss:9.3f}  {test_top1:7.1f} %  {norm:15.6f}"
        if rank == 0:
            print(f"{epoch + 1:5d}  {row}")
            state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{args.checkpoint}.part")
            os.replace(f"{args.checkpoint}.part", args.checkpoint)  # atomic: a kill leaves no partial checkpoint
    weights = parameters_to_vector(model.parameters()).detach()
    assert args.data or abs(weights.norm() - NORMS[args.stop_after - 1]) < 1e-6, "weights differ from one process"
    first = weights.clone()
    dist.broadcast(first, src=0)
    assert torch.equal(weights, first), f"the weights on rank {rank} differ from those on rank 0"
    dist.barrier()  # exit together: gloo may still be sending
    dist.destroy_process_group()
    if rank == 0:
        if args.stop_after == EPOCHS and not args.data:
            os.remove(args.checkpoint)  # the next run starts from epoch 1
        print(f"ok: {world_size} bitwise equal replicas; norm of weights {weights.norm():.6f}, equal to one process")


if __name__ == "__main__":
    main()
