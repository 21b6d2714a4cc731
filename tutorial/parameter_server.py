"""Parameter server: asynchronous workers do not wait, but their stale gradients can make training diverge.

Rank 0 stores the weights. The other ranks are workers: they pull the weights, compute a gradient and push it. In
synchronous mode the server averages the gradients of all workers. In asynchronous mode it applies each gradient on
arrival and replies at once, so no worker waits for the slow one. Meanwhile the weights have changed: the number of
updates since the pull is the staleness s. With curvature 1, gradients of staleness s converge only for a learning rate
below 2 sin(pi / (4s + 2)): 2 for s = 0, 0.62 for s = 2. A rate of 1.5 / (s + 1) stays below this bound. A push may be
partial: one slice of the gradient per push. The problem is least squares, one shard per worker; the curvatures of each
shard range from 0.1 to 1.

The traffic per step is 2 x workers x size on the server's link and 4(N-1)/N x size on each link of a ring (lesson 4).
N server shards have the same load as a ring; this is reduce-scatter plus all-gather. The backend is always gloo: nccl
cannot receive from any rank.
Sources: Li et al., 2014, "Scaling Distributed Machine Learning with the Parameter Server"; Zhang et al., 2016,
"Staleness-Aware Async-SGD for Distributed Deep Learning"; Levin and May, 1976 (the bound, for delayed maps).

Run:
    torchrun --standalone --nproc_per_node=4 tutorial/parameter_server.py
Look at:
    Learning rate 1.5 converges synchronously and diverges asynchronously. A rate of 0.3, or 1.5 divided by
    staleness + 1, converges with stale gradients. The last table shows the load of a link.
"""

import time

import torch
import torch.distributed as dist

DIM, GRADIENTS = 64, 180  # parameters, gradients per run
WORK_MS = [0, 3, 3, 12]  # simulated time per gradient of each rank; rank 3 is slow
STOP = -1


def build_shard(rank):
    """Return inputs and targets of a least-squares problem; its Hessian X'X / n is equal on every rank."""
    curvature = torch.linspace(0.1, 1, DIM)
    rng = torch.Generator().manual_seed(rank)
    x = torch.linalg.qr(torch.randn(4 * DIM, DIM, generator=rng))[0] * (4 * DIM * curvature).sqrt()
    return x, x @ torch.ones(DIM)


def run_worker(rank, slices):
    """Pull (version, weights) and push (version, slice index, gradient slice) until the version is STOP."""
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


def run_server(workers, wait_for, lr, slices, scale_lr, gradients):
    """Update after each `wait_for` gradients; return (loss, staleness of each gradient, seconds, bytes)."""
    weights, version, staleness, num_bytes = torch.zeros(slices, DIM // slices), 0, [], 0
    x, y = build_shard(0)
    for worker in workers:
        dist.send(torch.cat([torch.zeros(1), weights.flatten()]), dst=worker)
    start, running = time.perf_counter(), len(workers)
    while running:
        pushes = [torch.empty(2 + DIM // slices) for _ in range(min(wait_for, running))]
        senders = [dist.recv(push) for push in pushes]  # from any worker, in order of arrival
        done = len(staleness) >= gradients
        if not done:
            for push in pushes:
                age = version - int(push[0])
                step = lr / (age + 1) if scale_lr else lr
                weights[int(push[1])] -= step / len(pushes) * push[2:]
                staleness.append(age)
            version += 1
            num_bytes += sum(4 * (len(push) - 2) + 4 * DIM for push in pushes)  # slice received, weights sent
        for worker in senders:
            dist.send(torch.cat([torch.tensor([float(STOP if done else version)]), weights.flatten()]), dst=worker)
        running -= done * len(senders)
    loss = (x @ weights.flatten() - y).double().square().mean().item() / 2
    return loss, staleness, time.perf_counter() - start, num_bytes


def run(rank, workers, wait_for, lr=1.5, slices=1, scale_lr=False, gradients=GRADIENTS):
    """Run the server or a worker, depending on the rank; return the result on the server, else None."""
    if rank == 0:
        return run_server(workers, wait_for, lr, slices, scale_lr, gradients)
    if rank in workers:
        run_worker(rank, slices)
    return None


def main():
    """Compare the update rules, then count the traffic of the server."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert 3 <= world <= len(WORK_MS), f"needs 3 or 4 processes (2 or 3 workers), got {world}"
    workers = range(1, world)
    rules = {
        "synchronous, lr 1.5": {"wait_for": len(workers)},
        "asynchronous, lr 1.5": {"wait_for": 1},
        "asynchronous, lr 0.3": {"wait_for": 1, "lr": 0.3},
        "lr 1.5 / (staleness + 1)": {"wait_for": 1, "scale_lr": True},
        "  a quarter per push": {"wait_for": 1, "scale_lr": True, "slices": 4},
    }
    results = {name: run(rank, workers, **kwargs) for name, kwargs in rules.items()}
    counts = range(1, world)
    rounds = 5
    steps = [run(rank, range(1, count + 1), count, gradients=rounds * count) for count in counts]
    if rank == 0:
        report(results, {count: size / rounds / (4 * DIM) for count, (*_, size) in zip(counts, steps, strict=True)})
    dist.destroy_process_group()


def report(results, loads):
    """Print and check both tables."""
    x, y = build_shard(0)
    start = y.square().mean().item() / 2
    print(f"{f'{GRADIENTS} gradients each':26}gradients/s  staleness mean  max  KB/gradient  loss / first loss")
    losses = []
    for name, (loss, staleness, seconds, num_bytes) in results.items():
        losses.append(loss / start)
        speed, age, size = len(staleness) / seconds, sum(staleness) / len(staleness), num_bytes / len(staleness) / 1000
        print(f"{name:26}{speed:11.0f}{age:16.1f}{max(staleness):5}{size:13.2f}{losses[-1]:19.0e}")
    print("\ntensors over one link per step, both directions")
    print("workers          " + "".join(f"{count:>9}" for count in (*loads, 8, 64, 1024)))
    print("server, measured " + "".join(f"{load:9.2f}" for load in loads.values()))
    print("server, 2W       " + "".join(f"{2 * count:9.2f}" for count in (*loads, 8, 64, 1024)))
    print("ring, 4(N-1)/N   " + "".join(f"{4 * (count - 1) / count:9.2f}" for count in (*loads, 8, 64, 1024)))
    fresh, stale, small, scaled, partial = losses
    assert fresh < 1e-6 and not stale < 1 and small < 1e-3 and scaled < 1e-3 and partial < 0.1, losses
    assert all(load == 2 * count for count, load in loads.items())
    left = f"synchronous {fresh:.0e}, asynchronous {stale:.0e}, with scaled lr {scaled:.0e}"
    print(f"ok: loss / first loss: {left}; the server transfers 2W tensors per step")


if __name__ == "__main__":
    main()
