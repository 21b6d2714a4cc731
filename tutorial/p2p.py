"""Point-to-point communication: rendezvous, blocking and non-blocking messages, and deadlocks.

A distributed program is one program started several times. Each process has a rank (its index) and a world size (the
number of processes). Processes share no memory; they exchange data by messages only. This lesson shows three ways to
initialize a process group (the rendezvous), blocking and non-blocking messages, and the most common bug: both ranks
send first, or both receive first. A time-out ends the deadlock, and the stack of each rank is printed.
Sources: the torch.distributed documentation; the MPI standard, "Semantics of Point-to-Point Communication".

Run:
    python tutorial/p2p.py
Look at:
    The value 3 = 0 + 1 + 2: both ranks have changed it. Then the lines at which each rank hangs. If your own program
    hangs, `py-spy dump --pid PID` prints this stack from outside: find the rank whose stack differs.
"""

import contextlib
import faulthandler
import linecache
import os
import re
import socket
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2


def init_by_env(rank, port, **kwargs):
    """Initialize from four environment variables; from lesson 2 on, torchrun sets them."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group(init_method="env://", **kwargs)


def init_by_store(rank, port, **kwargs):
    """Initialize from a key-value store on rank 0 (see lesson 2)."""
    store = dist.TCPStore("127.0.0.1", port, WORLD, is_master=rank == 0)
    dist.init_process_group(store=store, rank=rank, world_size=WORLD, **kwargs)


def init_by_file(rank, path, **kwargs):
    """Initialize from a file that every rank can open; it must not exist from an earlier run."""
    dist.init_process_group(init_method=f"file://{path}", rank=rank, world_size=WORLD, **kwargs)


def ping_pong(rank, device):
    """Send 1 to rank 1 and 1 + 2 back, with calls that return when the buffer can be reused; return the value."""
    tensor = torch.zeros(1, device=device)
    if rank == 0:
        tensor += 1
        dist.send(tensor, dst=1)
        dist.recv(tensor, src=1)
    else:
        dist.recv(tensor, src=0)
        tensor += 2
        dist.send(tensor, dst=0)
    return tensor.item()


def ping_pong_async(rank, device):
    """Do the same exchange with non-blocking calls; print the times on rank 0."""
    received = torch.zeros(1, device=device)
    if rank == 1:
        dist.irecv(received, src=0).wait()
        time.sleep(0.3)
        dist.isend(received.add_(2), dst=0).wait()
        return received.item()
    sent, start = torch.ones(1, device=device), time.perf_counter()
    works = [dist.isend(sent, dst=1), dist.irecv(received, src=1)]
    call_ms = 1000 * (time.perf_counter() - start)
    time.sleep(0.2)  # other work; neither tensor may be used before wait()
    for work in works:
        work.wait()
    value, total_ms = received.item(), 1000 * (time.perf_counter() - start)
    print(f"isend, irecv    returned after {call_ms:.1f} ms, 200 ms of other work, reply after {total_ms:.0f} ms")
    return value


def both_send_first(mine, theirs, other, group):
    """Deadlock: a send may block until the other rank receives, but the other rank is sending too."""
    dist.send(mine, other, group=group)
    dist.recv(theirs, other, group=group)


def both_recv_first(mine, theirs, other, group):
    """Deadlock: both ranks receive before either one sends."""
    dist.recv(theirs, other, group=group)
    dist.send(mine, other, group=group)


def batched(mine, theirs, other, group):
    """Exchange without a deadlock: submit both directions as one batch, then wait."""
    both = [dist.P2POp(dist.isend, mine, other, group), dist.P2POp(dist.irecv, theirs, other, group)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def run_with_timeout(exchange, rank):
    """Run an exchange; return (received value, innermost line of this file if the rank hung, else None)."""
    # Always gloo: its time-out raises an exception. NCCL's watchdog would abort the process.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    mine, theirs = torch.tensor([10.0 + rank]), torch.zeros(1)
    with tempfile.TemporaryFile("w+") as stack:
        faulthandler.dump_traceback_later(0.5, file=stack)  # written by another thread
        with contextlib.suppress(RuntimeError):  # a time-out on one rank closes the connection of both
            exchange(mine, theirs, 1 - rank, group)
        faulthandler.cancel_dump_traceback_later()
        stack.seek(0)
        frame = re.search(r'p2p\.py", line (\d+) in', stack.read())
    return theirs.item(), frame and f"line {frame[1]}: {linecache.getline(__file__, int(frame[1])).strip()}"


def main(rank, *addresses):
    """Run all exchanges on one of the two ranks."""
    cuda = torch.cuda.device_count() >= WORLD
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    kwargs = {"backend": "nccl", "device_id": device} if cuda else {"backend": "gloo"}
    log = print if rank == 0 else lambda *_: None
    for init, address in zip((init_by_env, init_by_store, init_by_file), addresses, strict=True):
        if dist.is_initialized():
            dist.destroy_process_group()
        init(rank, address, **kwargs)
        assert (value := ping_pong(rank, device)) == 3
        where = f"rank {dist.get_rank()} of {dist.get_world_size()}, {dist.get_backend()}"
        log(f"{init.__name__:15} {where}: value after the round trip {value:.0f}")
    assert ping_pong_async(rank, device) == 3
    for exchange in (both_send_first, both_recv_first, batched):
        outcomes = [None] * WORLD
        dist.all_gather_object(outcomes, run_with_timeout(exchange, rank), group=dist.new_group(backend="gloo"))
        for other, (value, line) in enumerate(outcomes):
            log(f"{exchange.__name__:15} rank {other} " + (f"hangs in {line}" if line else f"received {value:.0f}"))
            assert bool(line) == (exchange is not batched) and (line or value == 10 + (1 - other))
    log("ok: 3 init methods, 2 round trips, 1 batched exchange are correct; 2 deadlocks detected on both ranks")
    dist.barrier()  # exit together: gloo may still be sending
    dist.destroy_process_group()


def find_free_port():
    """Return a free TCP port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (find_free_port(), find_free_port(), f"{folder}/init"), nprocs=WORLD)
