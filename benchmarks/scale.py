#!/usr/bin/env python3
"""Measure what grows with the number of processes: the traffic of the start.

    python benchmarks/scale.py start --processes 8 32 128

It forks processes that only join the process group, with gloo's full mesh (eager) and with connections at their first
use (lazy), and compares the results of collectives of both bit by bit. The bytes are those of the kernel (Linux).
"""

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import socket
import struct
import sys
import time
from typing import Any

import torch.distributed as torch_dist
from bench_support.machine import describe_run

from distribuuuu.launch.nproc import find_free_port

# Offset of tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info of linux/tcp.h.
TCP_INFO_BYTES = 120


def measure_start(num: int) -> None:
    """Let `num` forked processes join the group, eager and lazy, and print what it cost; exit if the results differ."""
    digests = set()
    for mode, value in (("eager", "0"), ("lazy", "1")):
        os.environ["TORCH_GLOO_LAZY_INIT"] = value
        context, port, running = multiprocessing.get_context("fork"), find_free_port(), []
        for rank in range(num):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_join_and_count, args=(rank, num, port, sender), daemon=True)
            process.start()
            sender.close()
            running.append((process, receiver))
        found = [pipe.recv() for _, pipe in running]
        for process, _ in running:
            process.join()
        digests |= {result["digest"] for result in found}
        joined_s = max(result["joined_s"] for result in found)
        print(f"{num:4d} {mode:5s}  joined in {joined_s:5.2f} s; first barrier: "
              f"{_show_means(found, 'joined')}; collectives: {_show_means(found, 'used')}", flush=True)  # fmt: skip
    if len(digests) > 1:
        sys.exit(f"{num} processes: the results of eager and lazy connections differ")


def _show_means(found: list[dict], when: str) -> str:
    """Return the mean bytes and sockets of the processes, in parentheses those of process 0."""
    counts = [result[when] for result in found]
    num_bytes, sockets = (sum(count[key] for count in counts) / len(counts) for key in ("store_bytes", "sockets"))
    return f"{num_bytes:,.0f} ({counts[0]['store_bytes']:,d}) B, {sockets:.1f} ({counts[0]['sockets']}) sockets"


def _join_and_count(rank: int, num: int, port: int, pipe: Any) -> None:
    """Join as one process of `num`, call collectives, and send the counts and a digest of the results."""
    import torch

    from distribuuuu.distributed import comm, process_group
    from distribuuuu.launch.detect import Launch

    started = time.perf_counter()
    launch = Launch("benchmark", rank, rank, num, "127.0.0.1", port, "start", num)
    with process_group.process_group(launch, torch.device("cpu"), timeout_s=600):
        comm.barrier()
        joined_s = time.perf_counter() - started
        counted = count_sockets(port)
        torch.manual_seed(rank)
        summed, sent, parts = torch.randn(100_003), torch.randn(1001), [torch.empty(77) for _ in range(num)]
        torch_dist.all_reduce(summed)
        torch_dist.broadcast(sent, src=0)
        torch_dist.all_gather(parts, torch.randn(77))
        greatest = comm.all_reduce_max([rank / 7])
        comm.barrier()
        values = torch.cat([summed, sent, *parts, torch.tensor(greatest)])
        pipe.send({
            "joined_s": joined_s,
            "joined": counted,
            "used": count_sockets(port),
            "digest": hashlib.sha256(values.numpy().tobytes()).hexdigest(),
        })  # fmt: skip
        comm.barrier()


def count_sockets(store_port: int) -> dict[str, int]:
    """Return the open sockets of this process, and the bytes on its connection to the store in both directions."""
    num_bytes = sockets = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself, or a socket without a peer
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            sockets += 1
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family != socket.AF_UNIX and connection.getpeername()[1] == store_port:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    num_bytes += sum(struct.unpack_from("QQ", info, TCP_INFO_BYTES))
    return {"sockets": sockets, "store_bytes": num_bytes}


def main() -> None:
    """Measure the start for each number of processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["start"])
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4], help="numbers of processes, each above 1")
    flags = parser.parse_args()
    print(describe_run(), flush=True)
    for num in flags.processes:
        measure_start(num)


if __name__ == "__main__":
    main()
