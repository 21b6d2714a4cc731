"""Ring all-reduce: each rank sends at most two tensor sizes, for any number of ranks.

The tensor is split into N chunks. In N - 1 steps each rank sends a chunk to its right neighbor and adds the chunk from
its left neighbor; then it holds one chunk of the sum (reduce-scatter). In N - 1 more steps the complete chunks are
passed around (all-gather). Summing on rank 0, or along a binomial tree, moves the same total of 2(N-1) tensors but
loads the busiest link more. The cost of the ring is the latency of 2(N-1) steps, so trees suit small messages.
If N does not divide the size, some chunks have one more element; the mean over ranks is exactly 2(N-1)/N.
Sources: Patarasuk and Yuan, 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations"; Gibiansky,
2017, "Bringing HPC Techniques to Deep Learning"; Thakur et al., 2005, "Optimization of Collective Communication".

Run:
    torchrun --standalone --nproc_per_node=4 tutorial/ring_all_reduce.py
Look at:
    The tensor sizes sent by the busiest rank: N-1, about log2 N, or less than 2. A step of the bars is a factor 3.2.
"""

import math
import os
import time

import torch
import torch.distributed as dist

CHECKED = (1, 3, 1003, 12000)  # floats in a tensor; only the last is divisible by 2, 3 and 4
TIMED = (2**10, 2**14, 2**18, 2**20)


class Channel:
    """A process group of ranks 0 ... n - 1 that counts the bytes sent by this rank."""

    def __init__(self, n, rank, group):
        self.n, self.rank, self.group, self.sent = n, rank, group, 0

    def transfer(self, *messages):
        """Execute messages (dist.isend or dist.irecv, tensor, peer) concurrently."""
        self.sent += sum(x.nbytes for call, x, _ in messages if call is dist.isend)
        works = [dist.P2POp(call, x, peer % self.n, self.group) for call, x, peer in messages]
        for work in dist.batch_isend_irecv(works):
            work.wait()


def ring(x, channel):
    """Sum x over the ranks in place: N - 1 steps of reduce-scatter, N - 1 steps of all-gather."""
    n, rank, chunks = channel.n, channel.rank, x.tensor_split(channel.n)
    for step in range(n - 1):
        outgoing, target = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        received = torch.empty_like(target)
        channel.transfer((dist.isend, outgoing, rank + 1), (dist.irecv, received, rank - 1))
        target += received
    for step in range(n - 1):
        outgoing, target = chunks[(rank + 1 - step) % n], chunks[(rank - step) % n]
        channel.transfer((dist.isend, outgoing, rank + 1), (dist.irecv, target, rank - 1))


def reduce_edge(x, channel, child, parent):
    """Add x of the child to x of the parent."""
    if channel.rank == child:
        channel.transfer((dist.isend, x, parent))
    elif channel.rank == parent:
        received = torch.empty_like(x)
        channel.transfer((dist.irecv, received, child))
        x += received


def broadcast_edge(x, channel, child, parent):
    """Copy x of the parent to the child."""
    if channel.rank == parent:
        channel.transfer((dist.isend, x, child))
    elif channel.rank == child:
        channel.transfer((dist.irecv, x, parent))


def naive(x, channel):
    """Sum x on rank 0, one rank after the other, and send the result to each rank."""
    for operation in (reduce_edge, broadcast_edge):
        for child in range(1, channel.n):
            operation(x, channel, child, parent=0)


def tree(x, channel):
    """Sum x up a binomial tree and send the result down; ranks of an edge differ by a power of two."""
    edges = [(child, child - (child & -child)) for child in range(1, channel.n)]
    edges.sort(key=lambda edge: edge[0] - edge[1])  # short edges first: complete each subtree before sending it
    for operation, ordered in ((reduce_edge, edges), (broadcast_edge, edges[::-1])):
        for child, parent in ordered:
            operation(x, channel, child, parent)


def library(x, channel):
    """Sum x with dist.all_reduce."""
    dist.all_reduce(x, group=channel.group)


def check(algorithm, channel, size, device):
    """Compare with dist.all_reduce; return the error and the bytes sent per rank, in tensor sizes."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(channel.rank)).to(device)
    expected, channel.sent, sent = x.clone(), 0, [None] * channel.n
    dist.all_reduce(expected, group=channel.group)
    algorithm(x, channel)
    error = (x - expected).abs().max().item()
    assert error < 1e-5, f"{algorithm.__name__}, {size} floats, {channel.n} ranks: error {error}"
    dist.all_gather_object(sent, channel.sent, group=channel.group)
    assert sum(sent) == 2 * (channel.n - 1) * x.nbytes  # exact: bytes are integers
    if algorithm is ring:
        assert max(sent) <= 2 * x.nbytes and (size % channel.n or len(set(sent)) == 1)
    return error, [count / x.nbytes for count in sent]


def measure(algorithm, channel, size, device):
    """Return the bandwidth (tensor bytes / time) in MB/s, best of three."""
    x, seconds = torch.zeros(size, device=device), []
    for _ in range(3):
        dist.barrier(channel.group)
        start = time.perf_counter()
        algorithm(x, channel)
        x[-1].item()  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    return x.nbytes / min(seconds) / 1e6


def main():
    """Check and time the algorithms on 2, 3 and 4 ranks."""
    torch.set_num_threads(1)
    rank, cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    log, worst = print if rank == 0 else lambda *_: None, 0.0
    log(" N  algorithm     total  busiest  MB/s at" + "".join(f"{f'{size // 256} KB':>8}" for size in TIMED))
    for n in (2, 3, 4):
        channel = Channel(n, rank, dist.new_group(list(range(n))))
        for algorithm in (naive, tree, library, ring) if rank < n else ():
            sent = ""
            if algorithm is not library:
                checks = [check(algorithm, channel, size, device) for size in CHECKED]
                worst = max(worst, *(error for error, _ in checks))
                sent = f"{sum(checks[-1][1]):.2f} x {max(checks[-1][1]):7.2f} x"
            speeds = [measure(algorithm, channel, size, device) for size in TIMED]
            bars = "".join("▁▂▃▄▅▆▇█"[min(7, int(2 * max(0, math.log10(speed))))] for speed in speeds)
            log(f" {n}  {algorithm.__name__:12}{sent:17}  {bars:7}" + "".join(f"{speed:8.1f}" for speed in speeds))
        dist.barrier()  # ranks outside this group wait here
    uneven = " ".join(f"{count:.4f}" for count in (checks[2][1] if rank < n else ()))
    log(f"\nring, 1003 floats in 4 chunks: the ranks send {uneven} x the tensor, mean 1.5 x")
    log(f"ok: equal to all_reduce within {worst:.1e} for N = 2, 3, 4; a ring rank sends 2(N-1)/N x on average")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
