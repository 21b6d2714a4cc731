"""Key-value store: counters, barriers and time-outs without a process group.

Before processes can communicate, they need each other's addresses. They exchange them through a key-value store at one
known address. init_process_group opens the store used here; each rank writes its own address and reads those of the
others. torchrun keeps its list of live nodes in such a store. This lesson has no process group: a message, a counter,
a barrier and a check for missing ranks are built from set, get, add, wait and check.
Sources: the torch.distributed documentation, "Distributed Key-Value Store"; Mellor-Crummey and Scott, 1991,
"Algorithms for Scalable Synchronization on Shared-Memory Multiprocessors" (a barrier from a counter and a flag).

Run:
    torchrun --standalone --nproc_per_node=3 tutorial/store.py
Look at:
    The counts that get() followed by set() loses and add() does not; the barrier (# before it, . waiting at it), which
    no rank leaves before the last one arrives; the time-out, which names the missing rank.
"""

import os
import time
from datetime import timedelta

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # the time-out below is expected: no warning

import torch.distributed as dist

COUNT = 200


def receive_from_first(store, rank):
    """Set a key on rank 0 after 200 ms; return its value and the milliseconds that get() waited for it."""
    start = time.perf_counter()
    if rank == 0:
        time.sleep(0.2)
        store.set("hello", "hello from rank 0")
    text = store.get("hello").decode()
    return text, 1000 * (time.perf_counter() - start)


def count_with_add(store):
    """Increment a counter with add(), which is atomic; return its key."""
    for _ in range(COUNT):
        store.add("added", 1)
    return "added"


def count_with_set(store):
    """Increment a counter with get() and set(), a race condition; return its key."""
    for _ in range(COUNT):
        store.set("set", str(int(store.get("set")) + 1))
    return "set"


def barrier(store, name, rank, world, timeout_s=30.0):
    """Return when all ranks have called this; each name can be used once, since the flag is never reset."""
    store.set(f"{name}/{rank}", "here")
    if store.add(f"{name}/count", 1) == world:
        store.set(f"{name}/done", "yes")  # the last rank to arrive releases all
    store.wait([f"{name}/done"], timedelta(seconds=timeout_s))


def missing_ranks(store, name, world):
    """Return the ranks that have not reached a barrier; check() tests for a key without waiting."""
    return [rank for rank in range(world) if not store.check([f"{name}/{rank}"])]


def gather(store, name, rank, world, line):
    """Return the lines of all ranks in rank order, with set() and get()."""
    store.set(f"{name}/line/{rank}", line)
    return [store.get(f"{name}/line/{other}").decode() for other in range(world)]


def main():
    """Use one store from all ranks."""
    store, rank, world = next(dist.rendezvous("env://"))  # as init_process_group does: MASTER_ADDR:MASTER_PORT
    log = print if rank == 0 else lambda *_: None

    barrier(store, "start", rank, world)
    text, wait_ms = receive_from_first(store, rank)
    assert text == "hello from rank 0"
    line = f"get      rank {rank} read {text!r} after {wait_ms:.0f} ms"
    log("\n".join(gather(store, "get", rank, world, line)))

    order = store.add("order", 1)
    orders = " ".join(gather(store, "add", rank, world, str(order)))
    log(f"\nadd      values returned to ranks {', '.join(map(str, range(world)))}: {orders}")
    if order == 1:  # exactly one rank gets 1: the first one initializes the key
        store.set("set", "0")
    for count in (count_with_add, count_with_set):
        barrier(store, f"before {count.__name__}", rank, world)
        key = count(store)
        barrier(store, f"after {count.__name__}", rank, world)
        log(f"         {count.__name__}: expected {world} x {COUNT} = {world * COUNT}, counted {int(store.get(key))}")
    assert int(store.get("added")) == world * COUNT

    barrier(store, "ready", rank, world)
    start = time.perf_counter()
    time.sleep(0.1 + 0.2 * rank)
    arrived_ms = 1000 * (time.perf_counter() - start)
    barrier(store, "timed", rank, world)
    left_ms = 1000 * (time.perf_counter() - start)
    count = store.add("timed/count", 0)  # adding 0 reads the counter
    assert count == world, f"rank {rank} left when {count} of {world} ranks had arrived"
    path = "#" * round(arrived_ms / 20) + "." * round((left_ms - arrived_ms) / 20)
    line = f"barrier  rank {rank} |{path:30}| arrived at {arrived_ms:3.0f} ms, left at {left_ms:3.0f} ms"
    log("\n" + "\n".join(gather(store, "timed", rank, world, line)))

    missing = []
    if rank < world - 1:
        try:
            barrier(store, "incomplete", rank, world, timeout_s=0.5)
        except dist.DistStoreError:
            missing = missing_ranks(store, "incomplete", world)
    assert missing == ([world - 1] if rank < world - 1 else [])
    log(f"\ntimeout  rank 0 waited 0.5 s at a barrier; missing ranks: {missing}")
    log(f"ok: add() counted all {world * COUNT}, the barrier waited for {world} ranks, the missing rank was found")
    gather(store, "end", rank, world, "done")


if __name__ == "__main__":
    main()
