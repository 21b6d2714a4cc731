"""Ring all-reduce: no rank sends more than two tensors, however many ranks there are.

The tensor is cut into N chunks. In N - 1 steps each rank passes a chunk to the right and adds the one that comes from
the left, until it holds one chunk of the sum (reduce-scatter); in N - 1 more the finished chunks go round (all-gather).
Summing on rank 0 and sending back, or up and down a binary tree, moves the same 2(N-1) tensors in total, but loads the
busiest link more. The ring's price is 2(N-1) steps of latency: trees win for small messages. Bytes are counted where
sent. If N does not divide the size, some chunks are an element longer, and 2(N-1)/N is exact for the mean over ranks.
Sources: Patarasuk and Yuan, 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations"; Gibiansky,
2017, "Bringing HPC Techniques to Deep Learning"; Thakur et al., 2005, "Optimization of Collective Communication".

Run:
    torchrun --standalone --nproc_per_node=4 tutorial/ring_all_reduce.py
Look at:
    what the busiest rank sends: N-1 tensors, about log2 N, or below 2. On one machine all ranks share one memory, so
    time follows the total: the ring's advantage is on the links between machines. A bar's step is a factor of 3.2.
"""

import math
import os
import time

import torch
import torch.distributed as dist

CHECKED = (1, 3, 1003, 12000)  # floats in a tensor; of these only the last is divisible by 2, 3 and 4
TIMED = (2**10, 2**14, 2**18, 2**20)


class Wire:
    """A group of ranks 0 ... n - 1, which counts the bytes that this rank sends."""

    def __init__(self, n, rank, group):
        self.n, self.rank, self.group, self.sent = n, rank, group, 0

    def move(self, *messages):
        """Carry out messages (dist.isend or dist.irecv, tensor, peer), all at the same time."""
        self.sent += sum(x.nbytes for call, x, _ in messages if call is dist.isend)
        works = [dist.P2POp(call, x, peer % self.n, self.group) for call, x, peer in messages]
        for work in dist.batch_isend_irecv(works):
            work.wait()


def ring(x, wire):
    """Sum x over the ranks, in place: N - 1 steps of adding, N - 1 of copying, always to the right."""
    n, me, chunks = wire.n, wire.rank, x.tensor_split(wire.n)
    for step in range(n - 1):
        mine, theirs = chunks[(me - step) % n], chunks[(me - step - 1) % n]
        arrived = torch.empty_like(theirs)
        wire.move((dist.isend, mine, me + 1), (dist.irecv, arrived, me - 1))
        theirs += arrived
    for step in range(n - 1):
        wire.move((dist.isend, chunks[(me + 1 - step) % n], me + 1), (dist.irecv, chunks[(me - step) % n], me - 1))


def pull(x, wire, child, parent):
    """Add the child's x to the parent's."""
    if wire.rank == child:
        wire.move((dist.isend, x, parent))
    elif wire.rank == parent:
        arrived = torch.empty_like(x)
        wire.move((dist.irecv, arrived, child))
        x += arrived


def push(x, wire, child, parent):
    """Copy the parent's x to the child's."""
    if wire.rank == parent:
        wire.move((dist.isend, x, child))
    elif wire.rank == child:
        wire.move((dist.irecv, x, parent))


def naive(x, wire):
    """Sum x on rank 0, one rank after the other, and send the sum to each."""
    for act in (pull, push):
        for child in range(1, wire.n):
            act(x, wire, child, parent=0)


def tree(x, wire):
    """Sum x up a binary tree, whose edges are a power of two apart, and send the sum down it."""
    edges = [(child, child - (child & -child)) for child in range(1, wire.n)]
    edges.sort(key=lambda edge: edge[0] - edge[1])  # the shortest first: a subtree is summed before it is passed on
    for act, way in ((pull, edges), (push, edges[::-1])):
        for child, parent in way:
            act(x, wire, child, parent)


def library(x, wire):
    """Sum x as torch does."""
    dist.all_reduce(x, group=wire.group)


def check(algorithm, wire, size, device):
    """Compare with dist.all_reduce; return the error, and the bytes sent by each rank over those of the tensor."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(wire.rank)).to(device)
    expected, wire.sent, sent = x.clone(), 0, [None] * wire.n
    dist.all_reduce(expected, group=wire.group)
    algorithm(x, wire)
    error = (x - expected).abs().max().item()
    assert error < 1e-5, f"{algorithm.__name__} of {size} floats on {wire.n} ranks is off by {error}"
    dist.all_gather_object(sent, wire.sent, group=wire.group)
    assert sum(sent) == 2 * (wire.n - 1) * x.nbytes  # bytes are integers: no tolerance
    if algorithm is ring:
        assert max(sent) <= 2 * x.nbytes and (size % wire.n or len(set(sent)) == 1)
    return error, [count / x.nbytes for count in sent]


def measure(algorithm, wire, size, device):
    """Return the bytes of a tensor over the time to sum it, in MB/s: the best of three."""
    x, seconds = torch.zeros(size, device=device), []
    for _ in range(3):
        dist.barrier(wire.group)
        start = time.perf_counter()
        algorithm(x, wire)
        x[-1].item()  # on a GPU this waits for the result
        seconds.append(time.perf_counter() - start)
    return x.nbytes / min(seconds) / 1e6


def main():
    """Check and time the algorithms in groups of 2, 3 and 4 ranks."""
    torch.set_num_threads(1)
    rank, cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    say, worst = print if rank == 0 else lambda *_: None, 0.0
    say(" N  algorithm  all send  busiest  MB/s at" + "".join(f"{f'{size // 256} KB':>8}" for size in TIMED))
    for n in (2, 3, 4):
        wire = Wire(n, rank, dist.new_group(list(range(n))))
        for algorithm in (naive, tree, library, ring) if rank < n else ():
            sent = ""
            if algorithm is not library:
                checks = [check(algorithm, wire, size, device) for size in CHECKED]
                worst = max(worst, *(error for error, _ in checks))
                sent = f"{sum(checks[-1][1]):.2f} x {max(checks[-1][1]):7.2f} x"
            speeds = [measure(algorithm, wire, size, device) for size in TIMED]
            bars = "".join("▁▂▃▄▅▆▇█"[min(7, int(2 * max(0, math.log10(speed))))] for speed in speeds)
            say(f" {n}  {algorithm.__name__:12}{sent:17}  {bars:7}" + "".join(f"{speed:8.1f}" for speed in speeds))
        dist.barrier()  # the ranks that are not in this group wait here
    uneven = " ".join(f"{count:.4f}" for count in (checks[2][1] if rank < n else ()))
    say(f"\n1003 floats in 4 chunks: the ranks of the ring send {uneven} x, the mean is 1.5 x")
    say(f"ok: equals all_reduce to {worst:.1e} for N = 2, 3, 4; the ring's ranks send exactly 2(N-1)/N x on average")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
