"""Collective communication: each operation is one line of indexing on a table with one row per rank.

Rank r holds row r: (1, 2, 3, 4) x 10^r, printed as a1 a2 a3 a4 for rank 0, b1 b2 b3 b4 for rank 1 and so on. ab1 is
a1 + b1, and Σ1 is the sum over all ranks. Each entry of OPERATIONS gives the expected result as indexing on the table.
All ranks must make the same calls in the same order, or they hang. Object collectives use pickle: trusted data only.

Run:
    torchrun --standalone --nproc_per_node=4 tutorial/collectives.py
Also:
    torchrun --standalone --nproc_per_node=4 tutorial/collectives.py --matrix
Look at:
    reduce_scatter followed by all_gather equals all_reduce (see lesson 4). A dot is a value neither read nor written.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT, TABLE, ROW, COLUMN = timedelta(seconds=10), (lambda x: x), (lambda x: x[:1]), (lambda x: x[:, :1])
OPERATIONS = {  # name: (description, the part of the table that it reads, the result)
    "broadcast": ("each row = row 0", ROW, lambda x, n: x.expand(n, n)),
    "scatter": ("row 0 to column 0", ROW, lambda x, n: x.T),
    "gather": ("column 0 to row 0", COLUMN, lambda x, n: x.T),
    "reduce": ("row 0 = sum of rows", TABLE, lambda x, n: x.sum(0, keepdim=True)),
    "reduce_scatter": ("column 0 = sum of rows", TABLE, lambda x, n: x.sum(0, keepdim=True).T),
    "all_gather": ("each row = column 0", COLUMN, lambda x, n: x.T.expand(n, n)),
    "all_reduce": ("each row = sum of rows", TABLE, lambda x, n: x.sum(0).expand(n, n)),
    "all_to_all": ("transpose", TABLE, lambda x, n: x.T),
    "send_recv": ("shift the rows by one", TABLE, lambda x, n: x.roll(1, 0)),
    "barrier": ("no change", TABLE, lambda x, n: x),
    "groups": ("sums in {0, 1} and {2, 3}", TABLE, lambda x, n: x.view(2, 2, n).sum(1).repeat_interleave(2, 0)),
}


def perform(name, row, n, rank, group):
    """Call one collective with this rank's row; return this rank's row after it."""
    out = row.clone() if name in ("broadcast", "reduce", "all_reduce", "groups", "barrier") else torch.zeros_like(row)
    match name:
        case "broadcast":
            dist.broadcast(out, src=0, group=group)
        case "scatter":
            dist.scatter(out[:1], list(row.split(1)) if rank == 0 else None, src=0, group=group)
        case "gather":
            dist.gather(row[:1], list(out.split(1)) if rank == 0 else None, dst=0, group=group)
        case "reduce":
            dist.reduce(out, dst=0, group=group)
            out *= rank == 0  # undefined on the other ranks
        case "reduce_scatter":
            getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(out[:1], row, group=group)
        case "all_gather":
            getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(out, row[:1], group=group)
        case "all_reduce":
            dist.all_reduce(out, group=group)
        case "all_to_all":
            dist.all_to_all_single(out, row, group=group)
        case "send_recv":
            peers = ((dist.isend, row, (rank + 1) % n), (dist.irecv, out, (rank - 1) % n))
            for work in dist.batch_isend_irecv([dist.P2POp(*peer, group) for peer in peers]):
                work.wait()
        case "barrier":
            dist.barrier(group)
        case "groups":
            groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]  # new_group is a collective: all ranks call it
            dist.all_reduce(out, group=groups[rank // 2])
    return out


def check(name, n, rank, device, group=None):
    """Perform an operation and check this rank's row; return the expected tables before and after."""
    _, select, compute = OPERATIONS[name]
    part = select(torch.arange(1, n + 1) * 10 ** torch.arange(n)[:, None])
    before, after = (torch.nn.functional.pad(x, (0, n - x.shape[1], 0, n - len(x))) for x in (part, compute(part, n)))
    row = perform(name, before[rank].to(device), n, rank, group).cpu()
    assert torch.equal(row, after[rank]), f"{name}: rank {rank} got {row.tolist()}; expected {after[rank].tolist()}"
    return before, after


def format_tables(name, before, after):
    """Return the two tables side by side, five lines of 39 characters."""

    def cell(value):
        digits = f"{value:04d}"[::-1]  # digit r comes from rank r
        ranks = "".join(letter for letter, digit in zip("abcd", digits, strict=True) if digit != "0")
        return f"{ranks.replace('abcd', 'Σ') + max(digits) if ranks else '·':4}"

    rows = ["→ ".join("".join(map(cell, row)) for row in pair) for pair in torch.stack([before, after], 1).tolist()]
    return [f"{line:39}" for line in (f"{name}: {OPERATIONS[name][0]}", *rows)]


def show_tables(n, rank, device, log):
    """Perform every operation once and print its tables."""
    assert n == 4, f"needs 4 ranks, got {n} (--matrix accepts other numbers)"
    names = [name for name in OPERATIONS if name not in ("send_recv", "barrier")]
    tables = [format_tables(name, *check(name, n, rank, device)) for name in names]
    for start in range(0, len(names), 3):
        log("\n".join("".join(line).rstrip() for line in zip(*tables[start : start + 3], strict=True)) + "\n")
    config, own, times = [{"delay_s": 0.1} if rank == 0 else None], [None], [None] * n
    dist.broadcast_object_list(config, src=0)
    dist.scatter_object_list(own, [{"rank": r} for r in range(n)] if rank == 0 else None, src=0)
    time.sleep(config[0]["delay_s"] * own[0]["rank"])
    arrived = time.monotonic()  # the same clock in all processes
    dist.barrier()
    dist.all_gather_object(times, (arrived, time.monotonic()))
    all_arrived, all_left = zip(*times, strict=True)
    assert min(all_left) >= max(all_arrived)
    log(f"objects: all got {config[0]}; barrier: the last rank was {max(all_arrived) - min(all_arrived):.1f} s late")
    log(f"ok: {len(names)} operations gave each of {n} ranks the row predicted by indexing")


def probe(name, backend, kind, n, rank, device):
    """Try one operation on all ranks; return its cell of the matrix."""
    if not dist.is_backend_available(backend):
        return "not built"
    if torch.cuda.device_count() < n and (backend, kind) != ("gloo", "cpu"):
        return "no GPUs"
    results, works = [None] * n, True
    try:
        check(name, n, rank, device if kind == "cuda" else "cpu", dist.new_group(backend=backend, timeout=TIMEOUT))
    except (RuntimeError, ValueError, AssertionError):
        works = False
    dist.all_gather_object(results, works)
    return "yes" if all(results) else "no"


def show_matrix(n, rank, device, log):
    """Print which operations work with each backend and device on this machine."""
    columns = [(backend, kind) for backend in ("gloo", "nccl", "mpi") for kind in ("cpu", "cuda")]
    log(f"{f'{n} ranks':15}" + "".join(f"{f'{backend} {kind}':12}" for backend, kind in columns).rstrip())
    for name in list(OPERATIONS)[:-1]:
        cells = [probe(name, *column, n, rank, device) for column in columns]
        assert cells[0] == "yes", f"{name} failed with gloo on the CPU"
        log(f"{name:15}" + "".join(f"{cell:12}" for cell in cells).rstrip())
    log("ok: with gloo on the CPU every operation gave the correct result on every rank")


if __name__ == "__main__":
    rank, n = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cuda, show = torch.cuda.device_count() >= n, show_matrix if "--matrix" in sys.argv else show_tables
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    nccl = cuda and show is show_tables  # the matrix gathers its results with gloo
    dist.init_process_group("nccl" if nccl else "gloo", device_id=device if nccl else None)
    show(n, rank, device, print if rank == 0 else lambda *_: None)
    dist.barrier()  # exit together: gloo may still be sending
    dist.destroy_process_group()
