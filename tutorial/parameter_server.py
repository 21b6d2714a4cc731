"""Parameter server: who does not wait makes more updates, from older weights, and old gradients can diverge.

Rank 0 keeps the weights; the other ranks are workers that pull them, compute a gradient and push it. Synchronous: the
server averages the gradients of all workers. Asynchronous: it applies each one as it comes and replies at once, so that
nobody waits for the slow worker. But while a gradient was computed the weights have moved on: the number of updates it
missed is its staleness s. For a curvature of 1, gradients that are s updates late converge only if the learning rate is
below 2 sin(pi / (4s + 2)): 2 when fresh, 0.62 two updates late. A rate of 1.5 / (s + 1) stays below that. A push may
also be partial: a slice of the gradient, the others in the next pushes. The problem is least squares on a shard per
worker, with curvatures from 0.1 to 1 in every shard, as in the theory.

The ring won by bytes: a step moves 2 x workers x size over the server's one link, but 4(N-1)/N x size over a ring's.
Cutting the server into N shards helps as much, and then it is reduce-scatter and all-gather: the ring (lesson 4).
Always gloo: "receive from whoever comes first" does not exist in nccl.
Sources: Li et al., 2014, "Scaling Distributed Machine Learning with the Parameter Server"; Zhang et al., 2016,
"Staleness-Aware Async-SGD for Distributed Deep Learning"; Levin and May, 1976 (the bound, for delayed maps).

Run:
    torchrun --standalone --nproc_per_node=4 tutorial/parameter_server.py
Look at:
    the rate of 1.5 converges when fresh and explodes when stale; at 0.3, or divided by staleness + 1, stale gradients
    do no harm. Then the last table: what a link must carry.
"""

import time

import torch
import torch.distributed as dist

DIM, GRADIENTS = 64, 180  # numbers to learn, gradients in a run
WORK_MS = [0, 3, 3, 12]  # what a gradient costs each rank: rank 3 is slow
STOP = -1


def build_shard(rank):
    """Return inputs and targets of a linear problem whose Hessian, X'X / n, is the same on every rank."""
    curvature = torch.linspace(0.1, 1, DIM)
    draw = torch.Generator().manual_seed(rank)
    x = torch.linalg.qr(torch.randn(4 * DIM, DIM, generator=draw))[0] * (4 * DIM * curvature).sqrt()
    return x, x @ torch.ones(DIM)


def work(rank, slices):
    """Pull (version, weights) and push (version, slice's number, slice of the gradient) until told to stop."""
    x, y = build_shard(rank)
    pulled, pushes = torch.empty(1 + DIM), 0
    dist.recv(pulled, src=0)
    while pulled[0] != STOP:
        time.sleep(WORK_MS[rank] / 1000)
        gradient = x.T @ (x @ pulled[1:] - y) / len(y)
        part = pushes % slices
        dist.send(torch.cat([pulled[:1], torch.tensor([part]), gradient.view(slices, -1)[part]]), dst=0)
        dist.recv(pulled, src=0)
        pushes += 1


def serve(workers, wait_for, rate, slices, damp, gradients):
    """Update when `wait_for` gradients are in; return the loss, the staleness of each gradient, seconds and bytes."""
    weights, version, ages, moved = torch.zeros(slices, DIM // slices), 0, [], 0
    x, y = build_shard(0)
    for worker in workers:
        dist.send(torch.cat([torch.zeros(1), weights.flatten()]), dst=worker)
    start, running = time.perf_counter(), len(workers)
    while running:
        pushes = [torch.empty(2 + DIM // slices) for _ in range(min(wait_for, running))]
        senders = [dist.recv(push) for push in pushes]  # from whoever comes first
        done = len(ages) >= gradients
        if not done:
            for push in pushes:
                age = version - int(push[0])
                step = rate / (age + 1) if damp else rate
                weights[int(push[1])] -= step / len(pushes) * push[2:]
                ages.append(age)
            version += 1
            moved += sum(4 * (len(push) - 2) + 4 * DIM for push in pushes)  # the slice came in, the weights go out
        for worker in senders:
            dist.send(torch.cat([torch.tensor([float(STOP if done else version)]), weights.flatten()]), dst=worker)
        running -= done * len(senders)
    loss = (x @ weights.flatten() - y).double().square().mean().item() / 2
    return loss, ages, time.perf_counter() - start, moved


def run(rank, workers, wait_for, rate=1.5, slices=1, damp=False, gradients=GRADIENTS):
    """Play this rank's part in one run; return what the server has seen, on the server."""
    if rank == 0:
        return serve(workers, wait_for, rate, slices, damp, gradients)
    if rank in workers:
        work(rank, slices)
    return None


def main():
    """Compare the ways to update, then count what passes the server."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert 3 <= world <= len(WORK_MS), f"needs 2 or 3 workers, so 3 or 4 processes, not {world}"
    everyone = range(1, world)
    ways = {
        "synchronous, rate 1.5": {"wait_for": len(everyone)},
        "asynchronous, rate 1.5": {"wait_for": 1},
        "asynchronous, rate 0.3": {"wait_for": 1, "rate": 0.3},
        "1.5 / (staleness + 1)": {"wait_for": 1, "damp": True},
        "  a quarter at a time": {"wait_for": 1, "damp": True, "slices": 4},
    }
    results = {name: run(rank, everyone, **how) for name, how in ways.items()}
    counts = range(1, world)
    rounds = 5
    steps = [run(rank, range(1, count + 1), count, gradients=rounds * count) for count in counts]
    if rank == 0:
        report(results, {count: moved / rounds / (4 * DIM) for count, (*_, moved) in zip(counts, steps, strict=True)})
    dist.destroy_process_group()


def report(results, loads):
    """Print both tables, and check them."""
    x, y = build_shard(0)
    start = y.square().mean().item() / 2
    print(f"{f'{GRADIENTS} gradients each':24}gradients/s  staleness mean  max  KB/gradient  loss / first loss")
    losses = []
    for name, (loss, ages, seconds, moved) in results.items():
        losses.append(loss / start)
        speed, age, size = len(ages) / seconds, sum(ages) / len(ages), moved / len(ages) / 1000
        print(f"{name:24}{speed:11.0f}{age:16.1f}{max(ages):5}{size:13.2f}{losses[-1]:19.0e}")
    print("\ntensors over one link in a step, in and out")
    print("workers          " + "".join(f"{count:>9}" for count in (*loads, 8, 64, 1024)))
    print("server, counted  " + "".join(f"{load:9.2f}" for load in loads.values()))
    print("server, 2W       " + "".join(f"{2 * count:9.2f}" for count in (*loads, 8, 64, 1024)))
    print("ring, 4(N-1)/N   " + "".join(f"{4 * (count - 1) / count:9.2f}" for count in (*loads, 8, 64, 1024)))
    fresh, stale, small, damped, partial = losses
    assert fresh < 1e-6 and not stale < 1 and small < 1e-3 and damped < 1e-3 and partial < 0.1, losses
    assert all(load == 2 * count for count, load in loads.items())
    left = f"{fresh:.0e}, stale {stale:.0e}, damped {damped:.0e}"
    print(f"ok: loss left by fresh gradients {left}; the server moves 2W tensors")


if __name__ == "__main__":
    main()
