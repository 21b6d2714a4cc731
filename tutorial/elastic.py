"""Elastic training: after a worker is killed, torchrun restarts all workers; the final weights do not change.

A collective needs all ranks, so the loss of one worker stops all of them. torchrun detects it, stops the remaining
workers and starts a new generation with the workers that are available; RANK and WORLD_SIZE may differ. Two things make
this safe. A snapshot is saved every two steps, and a step depends on its index only: it uses the same 32 images for any
number of workers. Here the last worker kills itself in generation 0; only one step since the snapshot is repeated.

Run:
    torchrun --standalone --nproc_per_node=2 --max-restarts=1 tutorial/elastic.py
Also:
    torchrun --nnodes=1:2 --max-restarts=3 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 tutorial/elastic.py
Look at:
    Generation 1 starts from the snapshot. The failure report of torchrun on stderr is expected. The second command runs
    on one or two nodes, and nodes may join or leave. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for it: each agent counts
    its own restarts, so a joining node has another number, and each generation needs a new store. Put the snapshot on a
    shared file system, as the node of rank 0 may leave.
"""

import os
import signal
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, SNAPSHOT_EVERY, KILL_STEP = 8, 32, 2, 5  # the last worker is killed before step 5


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


def build_data(count=1024):
    """Return synthetic (images, labels): ten patterns plus noise."""
    rng = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 1, 7, 7, generator=rng).repeat_interleave(4, 2).repeat_interleave(4, 3)
    labels = torch.randint(10, (count,), generator=rng)
    return patterns[labels] + torch.randn(count, 1, 28, 28, generator=rng), labels


def take_step(model, optimizer, images, labels, step, rank, world_size):
    """Train on this worker's shard of batch `step`. Shards may differ by one image: sum, then divide by BATCH."""
    shard = slice(step * BATCH + rank, (step + 1) * BATCH, world_size)
    losses = nn.functional.cross_entropy(model(images[shard]), labels[shard], reduction="sum")
    optimizer.zero_grad()
    (losses * world_size / BATCH).backward()  # DDP divides by world_size
    optimizer.step()


def build_training(device):
    """Return a new model and its optimizer."""
    model = build_model().to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def main():
    local_rank, generation = int(os.environ["LOCAL_RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    store, rank, world_size = next(dist.rendezvous("env://"))
    # torchrun may keep the store between generations: the prefix hides the keys of the previous one.
    is_kept = os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    store = dist.PrefixStore(f"generation {generation}", store) if is_kept else store
    backend, device_id = ("nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device_id)
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # TF32 rounds to 10 bits: an error of 1e-3 instead of 1e-7

    images, labels = (x.to(device) for x in build_data(count=STEPS * BATCH))
    model, optimizer = build_training(device)
    path = os.path.join(tempfile.gettempdir(), f"elastic-{os.environ['TORCHELASTIC_RUN_ID']}.pt")
    found = rank == 0 and os.path.exists(path)
    state = [torch.load(path, map_location="cpu") if found else {"step": 0}]
    dist.broadcast_object_list(state, src=0, device=device)  # all ranks resume from the same step
    first = state[0]["step"]
    if first:
        model.load_state_dict(state[0]["model"])
        optimizer.load_state_dict(state[0]["optimizer"])
    if rank == 0:
        print(f"generation {generation}: {world_size} workers, starting from step {first}", flush=True)

    replica = DistributedDataParallel(model)
    for step in range(first, STEPS):
        if generation == 0 and step == KILL_STEP:
            if rank == 0:
                print(f"generation 0: worker {world_size - 1} is killed", flush=True)
            if rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        try:
            take_step(replica, optimizer, images, labels, step, rank, world_size)
            if cuda:
                torch.cuda.synchronize(device)  # nccl is asynchronous: finish the step before saving
        except RuntimeError:  # the connection to the killed worker is lost (with nccl, torchrun kills this process)
            sys.exit(1)
        if rank == 0:
            print(f"generation {generation}: step {step}", flush=True)
            if (step + 1) % SNAPSHOT_EVERY == 0:
                state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, f"{path}.part")
                os.replace(f"{path}.part", path)

    single, optimizer = build_training(device)  # the same training without interruption, by one worker
    for step in range(STEPS):
        take_step(single, optimizer, images, labels, step, rank=0, world_size=1)
    pairs = zip(model.parameters(), single.parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    assert generation > 0 or first > 0, "no worker was killed"
    assert difference < 1e-5, f"the weights differ by {difference} from an uninterrupted run"
    dist.barrier()  # exit together: gloo may still be sending
    dist.destroy_process_group()
    if rank == 0:
        os.remove(path)
        print(f"ok: after a kill and a restart the weights equal an uninterrupted run within {difference:.1e}")


if __name__ == "__main__":
    main()
