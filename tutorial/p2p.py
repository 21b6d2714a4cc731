"""Point to point: processes meet, pass a number to each other, and can wait for each other for ever.

A distributed program is one program started several times. Each copy has a rank (who am I?) and knows the world size
(how many are we?); they share nothing, so what one knows another learns only from a message. Here are three ways to
meet (the rendezvous), messages that wait and messages that do not, and the bug that everybody writes first: two ranks
that both send, or both listen, under a time-out so that you can read where they stand.
Sources: the torch.distributed documentation; the MPI standard, "Semantics of Point-to-Point Communication".

Run:
    python tutorial/p2p.py
Look at:
    3 = 0 + 1 + 2: the ball has been on both ranks. Then the lines where each rank stood still. When a program of yours
    hangs, `py-spy dump --pid PID` prints such a stack from outside: compare the ranks, the odd one out is the culprit.
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


def meet_by_env(rank, port, **how):
    """Meet where four environment variables say; from lesson 2 on torchrun sets them."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group(init_method="env://", **how)


def meet_by_store(rank, port, **how):
    """Meet in a key-value store that rank 0 serves (lesson 2 looks inside)."""
    store = dist.TCPStore("127.0.0.1", port, WORLD, is_master=rank == 0)
    dist.init_process_group(store=store, rank=rank, world_size=WORLD, **how)


def meet_by_file(rank, path, **how):
    """Meet in a file that every rank can open; it must not be left over from an earlier run."""
    dist.init_process_group(init_method=f"file://{path}", rank=rank, world_size=WORLD, **how)


def ping_pong(rank, device):
    """Play 0 -> +1 -> 1 -> +2 -> 0 with calls that return when the buffer may be used again."""
    ball = torch.zeros(1, device=device)
    if rank == 0:
        ball += 1
        dist.send(ball, dst=1)
        dist.recv(ball, src=1)
    else:
        dist.recv(ball, src=0)
        ball += 2
        dist.send(ball, dst=0)
    return ball.item()


def ping_pong_at_once(rank, device):
    """Play the same game with calls that return at once; print what rank 0's clock saw."""
    caught = torch.zeros(1, device=device)
    if rank == 1:
        dist.irecv(caught, src=0).wait()
        time.sleep(0.3)
        dist.isend(caught.add_(2), dst=0).wait()
        return caught.item()
    ball, start = torch.zeros(1, device=device) + 1, time.perf_counter()
    works = [dist.isend(ball, dst=1), dist.irecv(caught, src=1)]
    call_ms = 1000 * (time.perf_counter() - start)
    time.sleep(0.2)  # any work that touches neither tensor: until wait() both belong to the messages
    for work in works:
        work.wait()
    value, total_ms = caught.item(), 1000 * (time.perf_counter() - start)
    print(f"isend, irecv   returned after {call_ms:.1f} ms, 200 ms of other work, ball back after {total_ms:.0f} ms")
    return value


def both_send(mine, theirs, other, group):
    """Deadlock: a send may wait until the other side receives, and that is sending too."""
    dist.send(mine, other, group=group)
    dist.recv(theirs, other, group=group)


def both_receive(mine, theirs, other, group):
    """Deadlock: both listen before either has spoken."""
    dist.recv(theirs, other, group=group)
    dist.send(mine, other, group=group)


def both_at_once(mine, theirs, other, group):
    """Exchange without a deadlock: hand over both directions as one batch, then wait."""
    both = [dist.P2POp(dist.isend, mine, other, group), dist.P2POp(dist.irecv, theirs, other, group)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def watch(exchange, rank):
    """Run an exchange; return what rank `rank` received, and its innermost line here if it stood still."""
    # Always gloo: its time-out raises, and only this group is lost. NCCL's watchdog would end the whole process.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    mine, theirs = torch.tensor([10.0 + rank]), torch.zeros(1)
    with tempfile.TemporaryFile("w+") as stack:
        faulthandler.dump_traceback_later(0.5, file=stack)  # a second thread writes it, as the first one stands still
        with contextlib.suppress(RuntimeError):  # one rank's time-out closes the connection of both
            exchange(mine, theirs, 1 - rank, group)
        faulthandler.cancel_dump_traceback_later()
        stack.seek(0)
        frame = re.search(r'p2p\.py", line (\d+) in', stack.read())
    return theirs.item(), frame and f"line {frame[1]}: {linecache.getline(__file__, int(frame[1])).strip()}"


def play(rank, *places):
    """Be one of the two processes."""
    cuda = torch.cuda.device_count() >= WORLD
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    how = {"backend": "nccl", "device_id": device} if cuda else {"backend": "gloo"}
    say = print if rank == 0 else lambda *_: None
    for meet, place in zip((meet_by_env, meet_by_store, meet_by_file), places, strict=True):
        if dist.is_initialized():
            dist.destroy_process_group()
        meet(rank, place, **how)
        assert (ball := ping_pong(rank, device)) == 3
        where = f"rank {dist.get_rank()} of {dist.get_world_size()}, {dist.get_backend()}"
        say(f"{meet.__name__:14} {where}: 0 -> +1 -> 1 -> +2 -> 0 = {ball:.0f}")
    assert ping_pong_at_once(rank, device) == 3
    for exchange in (both_send, both_receive, both_at_once):
        seen = [None] * WORLD
        dist.all_gather_object(seen, watch(exchange, rank), group=dist.new_group(backend="gloo"))  # rank 0 prints
        for other, (theirs, line) in enumerate(seen):
            say(f"{exchange.__name__:14} rank {other} " + (f"hangs in {line}" if line else f"received {theirs:.0f}"))
            assert bool(line) == (exchange is not both_at_once) and (line or theirs == 10 + (1 - other))
    say("ok: 3 ways to meet, the ball came back as 3 blocking or not, 2 deadlocks caught on both ranks, 1 way out")
    dist.barrier()  # gloo still holds the last tensor for a moment: leave together, when all is done
    dist.destroy_process_group()


def free_port():
    """Return a port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(play, (free_port(), free_port(), f"{folder}/meet"), nprocs=WORLD)
