"""Multiple nodes and GPUs under Slurm: srun is the launcher, and SLURM_* variables identify each process.

srun starts one process per task on every node of the job, so torchrun is not needed: rank, local rank and world size
are environment variables with other names. Two values are missing, and every process must derive the same ones without
communication. The address is the first host of the node list (`scontrol` expands "node[1-4,7]"). The port is computed
from the job ID, so that two jobs on one node use different ports.

Request GPUs per node (--gpus-per-node=8), not per task: each process must see all GPUs of its node.

Run:
    srun -n 2 python tutorial/mnmc_ddp_slurm.py
Also:
    srun -N 2 -n 4 python tutorial/mnmc_ddp_slurm.py
    srun -N 2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12 python tutorial/mnmc_ddp_slurm.py
Look at:
    The same table again: it depends neither on the launcher nor on the number of nodes.
"""

import argparse
import os
import re
import subprocess

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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
    dist.all_reduce(sums)  # sum over all processes before dividing
    losses, correct, images = sums.tolist()
    return losses / images, 100 * correct / images


def read_slurm_env():
    """Return (rank, local rank, world size, maximum tasks per node, init method) from the variables of srun."""
    rank, local_rank, world_size = (int(os.environ[f"SLURM_{name}"]) for name in ("PROCID", "LOCALID", "NTASKS"))
    tasks = max(int(n) for n in re.findall(r"(\d+)(?:\(x\d+\))?", os.environ["SLURM_STEP_TASKS_PER_NODE"]))  # "4(x2),3"
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
    hosts = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    port = 20000 + int(os.environ["SLURM_JOB_ID"]) % 10000
    return rank, local_rank, world_size, tasks, f"tcp://{hosts[0]}:{port}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="folder that contains FashionMNIST/")
    args = parser.parse_args()

    rank, local_rank, world_size, local_world_size, init_method = read_slurm_env()
    cuda = torch.cuda.device_count() >= local_world_size
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    backend, device_id = ("nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(backend, init_method, rank=rank, world_size=world_size, device_id=device_id)
    assert BATCH % world_size == 0, f"the batch of {BATCH} is not divisible by {world_size} processes"
    torch.set_num_threads(1)

    images, labels = build_data(args.data, count=512 + 150)
    images = nn.functional.avg_pool2d(images, 2).double()  # downsample to 14 x 14
    train_set, test_set = TensorDataset(images[:512], labels[:512]), TensorDataset(images[512:], labels[512:])
    train_sampler = DistributedSampler(train_set)  # position i goes to rank i % world_size
    train_loader = DataLoader(train_set, BATCH // world_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, BATCH // world_size, sampler=range(rank, len(test_set), world_size))

    model = build_model().double().to(device)
    replica = DistributedDataParallel(model)  # averages the gradients in backward()
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)

    if rank == 0:
        print(f"{device.type} x {world_size}: global batch {BATCH} = {world_size} x {BATCH // world_size}")
        print("epoch  train loss  train top1  test loss  test top1  norm of weights")
    for epoch in range(EPOCHS):
        train_sampler.set_epoch(epoch)
        train_loss, train_top1 = run_epoch(replica, train_loader, device, optimizer)
        test_loss, test_top1 = run_epoch(model, test_loader, device)
        weights = parameters_to_vector(model.parameters()).detach()
        row = f"{train_loss:10.3f}  {train_top1:8.1f} %  {test_loss:9.3f}  {test_top1:7.1f} %  {weights.norm():15.6f}"
        if rank == 0:
            print(f"{epoch + 1:5d}  {row}")

    assert test_top1 > (25 if args.data else 90), f"test top-1 accuracy is only {test_top1:.1f} %"
    assert args.data or abs(weights.norm() - NORM) < 1e-6, f"norm of weights {weights.norm():.6f}; expected {NORM}"
    first = weights.clone()
    dist.broadcast(first, src=0)
    assert torch.equal(weights, first), f"the weights on rank {rank} differ from those on rank 0"
    dist.barrier()  # exit together: gloo may still be sending
    dist.destroy_process_group()
    if rank == 0:
        print(f"ok: {world_size} bitwise equal replicas; norm of weights {weights.norm():.6f}, equal to one process")


if __name__ == "__main__":
    main()
