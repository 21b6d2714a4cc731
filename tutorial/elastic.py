"""Elastic training: a worker is killed, torchrun starts all anew, and the weights end as if nothing had happened.

A collective needs everybody, so the death of one worker stops all. torchrun notices, ends the rest, and starts a new
generation of as many workers as there are now; RANK and WORLD_SIZE may differ. Two things make it harmless: a snapshot
every two steps, and steps that depend on nothing but their number: the same 32 images, whoever and however many share
them. Here the last worker kills itself in generation 0; what is lost is the one step since the snapshot, done twice.

Run:
    torchrun --standalone --nproc_per_node=2 --max-restarts=1 tutorial/elastic.py
Also:
    torchrun --nnodes=1:2 --max-restarts=3 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 tutorial/elastic.py
Look at:
    Generation 1 goes on from the snapshot; what torchrun says of the death on stderr is meant. The second form, on one
    node or two, lets nodes come and go; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 there, as a node that joins starts a
    new generation without a new number, and it must not find the addresses of the last one in the store.
"""

import os
import signal
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, SNAPSHOT_EVERY, DEATH = 8, 32, 2, 5  # the last worker dies before step 5


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
    """Return (images, labels): ten patterns under noise, made here."""
    draw = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 1, 7, 7, generator=draw).repeat_interleave(4, 2).repeat_interleave(4, 3)
    labels = torch.randint(10, (count,), generator=draw)
    return patterns[labels] + torch.randn(count, 1, 28, 28, generator=draw), labels


def take_step(model, optimizer, images, labels, step, rank, world_size):
    """Train on this worker's share of batch `step`. Shares may differ by one image: sum, then divide by the whole."""
    share = slice(step * BATCH + rank, (step + 1) * BATCH, world_size)
    losses = nn.functional.cross_entropy(model(images[share]), labels[share], reduction="sum")
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
    # torchrun keeps the store from one generation to the next: do not read the letters of the dead.
    store = dist.PrefixStore(f"generation {generation}", store)
    backend, device_id = ("nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device_id)
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # TF32 convolutions round to 10 bits: an error of 1e-3, not 1e-7

    images, labels = (x.to(device) for x in build_data(count=STEPS * BATCH))
    model, optimizer = build_training(device)
    path = os.path.join(tempfile.gettempdir(), f"elastic-{os.environ['TORCHELASTIC_RUN_ID']}.pt")
    found = rank == 0 and os.path.exists(path)
    box = [torch.load(path, map_location="cpu") if found else {"step": 0}]
    dist.broadcast_object_list(box, src=0, device=device)  # all have to go on from the same step
    first = box[0]["step"]
    if first:
        model.load_state_dict(box[0]["model"])
        optimizer.load_state_dict(box[0]["optimizer"])
    if rank == 0:
        print(f"generation {generation}: {world_size} workers, going on from step {first}", flush=True)

    replica = DistributedDataParallel(model)
    for step in range(first, STEPS):
        if generation == 0 and step == DEATH:
            if rank == 0:
                print(f"generation 0: worker {world_size - 1} dies", flush=True)
            if rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        try:
            take_step(replica, optimizer, images, labels, step, rank, world_size)
            if cuda:
                torch.cuda.synchronize(device)  # nccl only queues: no step is printed or saved before it is done
        except RuntimeError:  # the others' side of a death: the connection breaks (with nccl torchrun has to kill us)
            sys.exit(1)
        if rank == 0:
            print(f"generation {generation}: step {step}", flush=True)
            if (step + 1) % SNAPSHOT_EVERY == 0:
                state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, f"{path}.part")
                os.replace(f"{path}.part", path)

    single, optimizer = build_training(device)  # the same training in one life, by one worker
    for step in range(STEPS):
        take_step(single, optimizer, images, labels, step, rank=0, world_size=1)
    pairs = zip(model.parameters(), single.parameters(), strict=True)
    difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    assert generation > 0, "somebody should have died"
    assert difference < 1e-5, f"the weights differ by {difference} from those of a run without the loss"
    dist.barrier()  # gloo still holds the last tensor for a moment: leave together, when all is done
    dist.destroy_process_group()
    if rank == 0:
        os.remove(path)
        print(f"ok: a worker was lost and regained, and the weights equal those of an unhurt run to {difference:.1e}")


if __name__ == "__main__":
    main()
