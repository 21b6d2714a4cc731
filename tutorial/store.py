"""The store: a dictionary that every process can reach is enough to count, to meet and to give up waiting.

Before processes can talk they must find each other, and for that they need one place that all of them know: a key-value
store behind one address. init_process_group opens the store used here, each rank writes "I listen there" into it and
reads where the others do; torchrun keeps the list of its living workers in one. There is no process group in this file:
a message, a counter, a barrier and a roll-call of who is missing are made from set, get, add, wait and check.
Sources: the torch.distributed documentation, "Distributed Key-Value Store"; Mellor-Crummey and Scott, 1991,
"Algorithms for Scalable Synchronization on Shared-Memory Multiprocessors" (a counter and a flag make a barrier).

Run:
    torchrun --standalone --nproc_per_node=3 tutorial/store.py
Look at:
    the counts that get() followed by set() loses and add() does not; at the barrier (# on the way, . waiting at it)
    nobody leaves before the last has come; and the time-out, which says who is missing instead of hanging.
"""

import os
import time
from datetime import timedelta

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # the time-out below is meant to happen: no warning from inside torch

import torch.distributed as dist

COUNT = 200


def hear_from_first(store, rank):
    """Let rank 0 set a key late; return the value, and the milliseconds for which get() waited for the key."""
    start = time.perf_counter()
    if rank == 0:
        time.sleep(0.2)
        store.set("hello", "hello from rank 0")
    text = store.get("hello").decode()
    return text, 1000 * (time.perf_counter() - start)


def count_with_add(store):
    """Count: the server adds, one request after the other, and nothing is lost."""
    for _ in range(COUNT):
        store.add("added", 1)
    return "added"


def count_with_set(store):
    """Count by reading, adding and writing: two ranks that read the same number write the same number."""
    for _ in range(COUNT):
        store.set("set", str(int(store.get("set")) + 1))
    return "set"


def barrier(store, name, rank, world, timeout_s=30.0):
    """Return when all ranks have called this; a name serves once, as nobody closes the door again."""
    store.set(f"{name}/{rank}", "here")
    if store.add(f"{name}/count", 1) == world:
        store.set(f"{name}/open", "yes")  # the last to come opens the door for all
    store.wait([f"{name}/open"], timedelta(seconds=timeout_s))


def missing_at(store, name, world):
    """Return the ranks that have not come to a barrier: check() looks for a key without waiting for it."""
    return [rank for rank in range(world) if not store.check([f"{name}/{rank}"])]


def in_rank_order(store, name, rank, world, line):
    """Return every rank's line: a gather made from set and get."""
    store.set(f"{name}/line/{rank}", line)
    return [store.get(f"{name}/line/{other}").decode() for other in range(world)]


def main():
    """Use one store from all processes."""
    store, rank, world = next(dist.rendezvous("env://"))  # what init_process_group does first: MASTER_ADDR:MASTER_PORT
    say = print if rank == 0 else lambda *_: None

    barrier(store, "start", rank, world)
    text, wait_ms = hear_from_first(store, rank)
    assert text == "hello from rank 0"
    line = f"get      rank {rank} read {text!r} after {wait_ms:.0f} ms"
    say("\n".join(in_rank_order(store, "get", rank, world, line)))

    ticket = store.add("ticket", 1)
    tickets = " ".join(in_rank_order(store, "add", rank, world, str(ticket)))
    say(f"\nadd      tickets drawn by ranks {', '.join(map(str, range(world)))}: {tickets}")
    if ticket == 1:  # exactly one process sees 1, so this happens once: whoever comes first sets up for the others
        store.set("set", "0")
    for count in (count_with_add, count_with_set):
        barrier(store, f"before {count.__name__}", rank, world)
        key = count(store)
        barrier(store, f"after {count.__name__}", rank, world)
        say(f"         {world} x {COUNT} = {world * COUNT}, {count.__name__} found {int(store.get(key))}")
    assert int(store.get("added")) == world * COUNT

    barrier(store, "ready", rank, world)
    start = time.perf_counter()
    time.sleep(0.1 + 0.2 * rank)
    arrived_ms = 1000 * (time.perf_counter() - start)
    barrier(store, "door", rank, world)
    left_ms = 1000 * (time.perf_counter() - start)
    came = store.add("door/count", 0)  # adding nothing reads a counter
    assert came == world, f"rank {rank} left when {came} of {world} had come"
    path = "#" * round(arrived_ms / 20) + "." * round((left_ms - arrived_ms) / 20)
    line = f"barrier  rank {rank} |{path:30}| came at {arrived_ms:3.0f} ms, left at {left_ms:3.0f} ms"
    say("\n" + "\n".join(in_rank_order(store, "door", rank, world, line)))

    missing = []
    if rank < world - 1:
        try:
            barrier(store, "lunch", rank, world, timeout_s=0.5)
        except dist.DistStoreError:
            missing = missing_at(store, "lunch", world)
    assert missing == ([world - 1] if rank < world - 1 else [])
    say(f"\ntimeout  rank 0 waited 0.5 s at a barrier, then asked who is missing: {missing}")
    say(f"ok: add() lost none of {world * COUNT}, the barrier held until all {world} had come, the absent was named")
    in_rank_order(store, "end", rank, world, "done")


if __name__ == "__main__":
    main()
