"""Collectives: write what the ranks hold as a table, and every operation is one line of indexing.

Rank r holds row r: (1, 2, 3, 4) x 10^r, printed as a1 a2 a3 a4 for rank 0, b1 b2 b3 b4 for rank 1 and so on; ab1 is
a1 + b1, Σ1 the sum of all. Each line of OPERATIONS says what becomes of the table, and results are held against it.
All make the same calls in the same order, or hang. Object versions pickle: no strangers' data. From the MPI standard.

Run:
    torchrun --standalone --nproc_per_node=4 tutorial/collectives.py
Also:
    torchrun --standalone --nproc_per_node=4 tutorial/collectives.py --matrix
Look at:
    reduce_scatter then all_gather is all_reduce, which lesson 4 is built on. A dot is neither read nor filled.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

LIMIT, WHOLE, ROW, COLUMN = timedelta(seconds=10), (lambda x: x), (lambda x: x[:1]), (lambda x: x[:, :1])
OPERATIONS = {  # name: what it does, the part of the table that it reads, and what it makes of that part
    "broadcast": ("copy row 0 to all", ROW, lambda x, n: x.expand(n, n)),
    "scatter": ("stand row 0 up", ROW, lambda x, n: x.T),
    "gather": ("lay column 0 down", COLUMN, lambda x, n: x.T),
    "reduce": ("sum the rows for rank 0", WHOLE, lambda x, n: x.sum(0, keepdim=True)),
    "reduce_scatter": ("stand the sum up", WHOLE, lambda x, n: x.sum(0, keepdim=True).T),
    "all_gather": ("copy column 0 to all", COLUMN, lambda x, n: x.T.expand(n, n)),
    "all_reduce": ("sum the rows for all", WHOLE, lambda x, n: x.sum(0).expand(n, n)),
    "all_to_all": ("transpose", WHOLE, lambda x, n: x.T),
    "send_recv": ("move the rows by one", WHOLE, lambda x, n: x.roll(1, 0)),
    "barrier": ("move nothing", WHOLE, lambda x, n: x),
    "groups": ("sum in {0, 1} and in {2, 3}", WHOLE, lambda x, n: x.view(2, 2, n).sum(1).repeat_interleave(2, 0)),
}


def perform(name, row, n, rank, group):
    """Make one call with this rank's row; return the row that this rank has afterwards."""
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
            out *= rank == 0  # elsewhere the buffer was scratch space: never read it
        case "reduce_scatter":
            dist.reduce_scatter_tensor(out[:1], row, group=group)
        case "all_gather":
            dist.all_gather_into_tensor(out, row[:1], group=group)
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
            groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]  # everybody makes both: new_group is a collective
            dist.all_reduce(out, group=groups[rank // 2])
    return out


def check(name, n, rank, device, group=None):
    """Perform an operation on the table; return the tables before and after, once our row is found to be right."""
    _, reads, meaning = OPERATIONS[name]
    part = reads(torch.arange(1, n + 1) * 10 ** torch.arange(n)[:, None])
    before, after = (torch.nn.functional.pad(x, (0, n - x.shape[1], 0, n - len(x))) for x in (part, meaning(part, n)))
    row = perform(name, before[rank].to(device), n, rank, group).cpu()
    assert torch.equal(row, after[rank]), f"{name} gave rank {rank} {row.tolist()}, not {after[rank].tolist()}"
    return before, after


def draw(name, before, after):
    """Return the two tables side by side, five lines of 39 characters."""

    def write(value):
        digits = f"{value:04d}"[::-1]  # digit r comes from rank r
        who = "".join(letter for letter, digit in zip("abcd", digits, strict=True) if digit != "0")
        return f"{who.replace('abcd', 'Σ') + max(digits) if who else '·':4}"

    rows = ["→ ".join("".join(map(write, row)) for row in pair) for pair in torch.stack([before, after], 1).tolist()]
    return [f"{line:39}" for line in (f"{name}: {OPERATIONS[name][0]}", *rows)]


def show_pictures(n, rank, device, say):
    """Perform every operation once, and draw it."""
    assert n == 4, f"the two groups and the letters are those of 4 ranks, not of {n} (--matrix takes others)"
    names = [name for name in OPERATIONS if name not in ("send_recv", "barrier")]
    pictures = [draw(name, *check(name, n, rank, device)) for name in names]
    for start in range(0, len(names), 3):
        say("\n".join("".join(line).rstrip() for line in zip(*pictures[start : start + 3], strict=True)) + "\n")
    unit, own, stamps = [{"nap_s": 0.1} if rank == 0 else None], [None], [None] * n
    dist.broadcast_object_list(unit, src=0)
    dist.scatter_object_list(own, [{"naps": r} for r in range(n)] if rank == 0 else None, src=0)
    time.sleep(unit[0]["nap_s"] * own[0]["naps"])
    came = time.monotonic()  # one clock for all processes of a machine
    dist.barrier()
    dist.all_gather_object(stamps, (came, time.monotonic()))
    all_came, all_left = zip(*stamps, strict=True)
    assert min(all_left) >= max(all_came)
    say(f"objects, barrier: all got {unit[0]}, the last came {max(all_came) - min(all_came):.1f} s late, all waited")
    say(f"ok: {len(names)} operations gave each of {n} ranks the row that indexing the table predicts")


def probe(name, backend, kind, n, rank, device):
    """Return what the matrix says of one operation, backend and device: found by trying, on all ranks."""
    if not dist.is_backend_available(backend):
        return "not built"
    if torch.cuda.device_count() < n and (backend, kind) != ("gloo", "cpu"):
        return "no cards"
    votes, works = [None] * n, True
    try:
        check(name, n, rank, device if kind == "cuda" else "cpu", dist.new_group(backend=backend, timeout=LIMIT))
    except (RuntimeError, ValueError, AssertionError):
        works = False
    dist.all_gather_object(votes, works)
    return "yes" if all(votes) else "no"


def show_matrix(n, rank, device, say):
    """Draw the table of what works on this machine."""
    columns = [(backend, kind) for backend in ("gloo", "nccl", "mpi") for kind in ("cpu", "cuda")]
    say(f"{f'{n} ranks':15}" + "".join(f"{f'{backend} {kind}':12}" for backend, kind in columns).rstrip())
    for name in list(OPERATIONS)[:-1]:
        cells = [probe(name, *column, n, rank, device) for column in columns]
        assert cells[0] == "yes", f"gloo on the CPU did not {name}"
        say(f"{name:15}" + "".join(f"{cell:12}" for cell in cells).rstrip())
    say("ok: gloo on the CPU gave the right numbers on every rank in every operation")


if __name__ == "__main__":
    rank, n = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cuda, show = torch.cuda.device_count() >= n, show_matrix if "--matrix" in sys.argv else show_pictures
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    nccl = cuda and show is show_pictures  # the matrix collects its votes with gloo
    dist.init_process_group("nccl" if nccl else "gloo", device_id=device if nccl else None)
    show(n, rank, device, print if rank == 0 else lambda *_: None)
    dist.barrier()  # gloo still holds the last tensor for a moment: leave together, when all is done
    dist.destroy_process_group()
