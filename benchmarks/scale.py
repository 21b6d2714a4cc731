#!/usr/bin/env python3
"""Measure what grows with the number of processes: collectives, start-up traffic, and the watchdog.

python benchmarks/scale.py collectives --processes 2 4 8 16
python benchmarks/scale.py start --processes 8 32 128
python benchmarks/scale.py watchdog --processes 4096 --seconds 60

`collectives` trains with real gloo processes on this machine and counts the collectives of rank 0 by torch's profiler.
`start` forks processes that only join the process group, with gloo's full mesh (eager) and with connections at their
first use (lazy), and compares the results of collectives of both bit by bit. The bytes are those of the kernel (Linux).
`watchdog` lets one process exchange the states of all with the watchdog of another, then closes a connection.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import math
import multiprocessing
import os
import resource
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as torch_dist
from bench_support.machine import describe_run

from distribuuuu.distributed.stall_timer import PERIOD_S
from distribuuuu.distributed.watchdog.connection import Channel
from distribuuuu.distributed.watchdog.monitor import Monitor
from distribuuuu.launch.ports import find_free_port

PHASES = ("start", "step", "evaluation", "checkpoint", "between")
# Bytes of an element by the profiler's name of its type.
ITEM_SIZES = {"float": 4, "double": 8, "long int": 8, "int": 4, "c10::BFloat16": 2, "c10::Half": 2, "unsigned char": 1}
# Offset of tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info of linux/tcp.h.
TCP_INFO_BYTES = 120
# Options of the trained model: small, with batch norm, so that its buffers are broadcast.
OVERRIDES = [
    "MODEL.ARCH", "resnet14", "MODEL.NUM_CLASSES", "10", "MODEL.DUMMY_INPUT", "True", "TRAIN.WORKERS", "0",
    "TRAIN.BATCH_SIZE", "8", "TRAIN.IM_SIZE", "32", "TEST.IM_SIZE", "32", "OPTIM.MAX_EPOCH", "1",
    "OPTIM.WARMUP_EPOCHS", "0", "TEST.BATCH_SIZE", "50", "LOG.TENSORBOARD", "False",
]  # fmt: skip


# ------------------------------------------------------------------------------------------ collectives


def measure_collectives(num: int) -> None:
    """Train with `num` processes and print the collectives of each phase, and what the start cost."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "WORLD_SIZE": str(num), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
               "MASTER_PORT": str(find_free_port())}  # fmt: skip
        command = [sys.executable, __file__, "rank", folder]
        processes = [
            subprocess.Popen(
                command, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num)},
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for rank in range(num)
        ]  # fmt: skip
        errors = [process.communicate()[1] for process in processes]
        if any(process.returncode for process in processes):
            sys.exit(errors[0][-2000:])
        ranks = [json.loads(Path(folder, f"rank_{rank}.json").read_text()) for rank in range(num)]
    for phase, found in ranks[0]["collectives"].items():
        calls = found["calls"] or 1
        parts = [f"{count / calls:g} {name} ({size / calls:,.0f} B)" for name, (count, size) in found["sent"].items()]
        print(f"{num:4d}  {phase:10s}  {', '.join(parts) or 'none'}")
    print(f"{num:4d}  {'store':10s}  {ranks[-1]['store_bytes']:,d} B of the last process; {ranks[0]['sockets']} sockets"
          f" on rank 0, {ranks[-1]['sockets']} on the last", flush=True)  # fmt: skip


def run_rank(folder: str) -> None:
    """Train as one rank, with the profiler on rank 0; write rank_0.json."""
    from torch.profiler import ProfilerActivity, profile, record_function

    from distribuuuu import trainer
    from distribuuuu.checkpoint.manager import CheckpointManager
    from distribuuuu.config import load_cfg

    def replace(owner: Any, name: str, wrap: Callable) -> None:
        setattr(owner, name, functools.partialmethod(wrap, getattr(owner, name)) if isinstance(owner, type)
                else functools.partial(wrap, None, getattr(owner, name)))  # fmt: skip

    def in_phase(phase: str) -> Callable:
        def run(self, function: Callable, *args, **kwargs):
            with record_function(f"phase {phase}"):
                return function(*([self] if self else []), *args, **kwargs)

        return run

    def evaluate_and_count(_, function: Callable, *args):
        counted.update(count_sockets(int(os.environ["MASTER_PORT"])))
        return function(*args)

    counted: dict[str, int] = {}
    replace(trainer, "take_step", in_phase("step"))
    replace(trainer, "evaluate_epoch", evaluate_and_count)
    replace(trainer, "evaluate_epoch", in_phase("evaluation"))
    replace(CheckpointManager, "save", in_phase("checkpoint"))
    recording = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    is_main, cfg = os.environ["RANK"] == "0", load_cfg(None, [*OVERRIDES, "OUT_DIR", f"{folder}/run"])
    with recording if is_main else contextlib.nullcontext():
        trainer.train_model(cfg)
    Path(folder, f"rank_{os.environ['RANK']}.json").write_text(json.dumps({
        "collectives": summarize(recording.events()) if is_main else {}, **counted,
    }))  # fmt: skip


def summarize(events: Iterable[Any]) -> dict[str, dict]:
    """Return the number of calls of each phase, and of each collective in it the number and the bytes sent."""
    events = list(events)
    phases = [(event.time_range.start, event.time_range.end, event.name.removeprefix("phase "))
              for event in events if event.name.startswith("phase ")]  # fmt: skip
    found: dict[str, dict] = {phase: {"calls": 0, "sent": {}} for phase in PHASES}
    for _, _, phase in phases:
        found[phase]["calls"] += 1
    first_step = min(start for start, _, phase in phases if phase == "step")
    for event in (event for event in events if event.name.startswith("gloo:")):
        start = event.time_range.start
        outside = "start" if start < first_step else "between"
        phase = next((name for begin, end, name in phases if begin <= start <= end), outside)
        count_and_size = found[phase]["sent"].setdefault(event.name.removeprefix("gloo:"), [0, 0])
        count_and_size[0] += 1
        for shape, kind in zip(event.input_shapes, event.input_dtypes, strict=False):
            count_and_size[1] += math.prod(shape) * ITEM_SIZES.get(kind, 1) if shape else 0
    return found


# ------------------------------------------------------------------------------------------ start


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
        store_s, groups_s = (max(result[key] for result in found) for key in ("store_s", "groups_s"))
        print(f"{num:4d} {mode:5s}  store {store_s:5.2f} s, groups {groups_s:5.2f} s; first barrier: "
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

    from distribuuuu.distributed import comm, process_group, rendezvous
    from distribuuuu.launch.detect import Launch

    def create_store(*args: Any) -> Any:
        store = original(*args)
        joined.append(time.perf_counter())
        return store

    original, rendezvous.create_store = rendezvous.create_store, create_store
    joined = [time.perf_counter()]
    launch = Launch("benchmark", rank, rank, num, "127.0.0.1", port, "start", num)
    with process_group.process_group(launch, torch.device("cpu"), timeout_s=600):
        comm.barrier()
        joined.append(time.perf_counter())
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
            "store_s": joined[1] - joined[0], "groups_s": joined[2] - joined[1], "joined": counted,
            "used": count_sockets(port), "digest": hashlib.sha256(values.numpy().tobytes()).hexdigest(),
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


# ------------------------------------------------------------------------------------------ watchdog


def measure_watchdog(num: int, seconds: float) -> None:
    """Let `num` processes send their states for some seconds, then end one and wait for the end of all.

    The monitor is in a process of its own, as on rank 0. The other processes are simulated by one.
    """
    parent, child = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(num, child))
    server.start()
    port, memory_before = parent.recv()
    _raise_file_limit()
    began = time.perf_counter()
    channels = [Channel(socket.create_connection(("127.0.0.1", port))) for _ in range(num)]
    for rank, channel in enumerate(channels):
        channel.send(token="", rank=rank, host=f"node{rank // 8}", pid=0)
    connected_s = time.perf_counter() - began
    parent.send("usage")
    cpu_s, _ = parent.recv()
    began, num_sent, num_ended = time.perf_counter(), 0, 0
    while (elapsed_s := time.perf_counter() - began) < seconds:
        for channel in channels:
            channel.send(position="epoch 1, step 2", marks=num_sent, slow=False)
        num_sent += num
        num_ended += _count_ends(channels, max(0.0, PERIOD_S * num_sent / num - (time.perf_counter() - began)))
    parent.send("usage")
    cpu_after_s, memory = parent.recv()
    print(f"{num:5d} processes connected in {connected_s:.2f} s; {elapsed_s:.0f} s: {num_ended} false alarms, "
          f"{num_sent / elapsed_s:,.0f} states a second, rank 0 {(cpu_after_s - cpu_s) / elapsed_s:.2%} of a core, "
          f"{memory - memory_before:.1f} MiB more")  # fmt: skip
    began = time.perf_counter()
    channels.pop().close()
    num_after = _count_ends(channels[1:], 30.0, most=num - 2)  # rank 0 ends last
    print(
        f"{num:5d} one process died: {num_after} of {num - 2} others ended within {time.perf_counter() - began:.2f} s"
    )
    server.terminate()
    if num_ended or num_after < num - 2:
        sys.exit(1)


def _count_ends(channels: list[Channel], timeout_s: float, most: int | None = None) -> int:
    """Return the number of processes that the watchdog ends within some seconds."""
    ended, deadline = 0, time.perf_counter() + timeout_s
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            selector.register(channel, selectors.EVENT_READ, channel)
        while ended != most and (left_s := deadline - time.perf_counter()) > 0:
            for key, _ in selector.select(left_s):
                if any(message.get("end") is not None for message in key.data.receive()):
                    ended += 1
                    selector.unregister(key.data)
                    key.data.close()
    return ended


def _serve(num: int, pipe: Any) -> None:
    memory = _memory_mib()
    monitor = Monitor("", num, (600.0, 600.0), "127.0.0.1", lambda status: None, lambda: "epoch 1, step 2")
    monitor.start()
    pipe.send((monitor.port, memory))
    while True:
        pipe.recv()
        pipe.send((time.process_time(), _memory_mib()))


def _memory_mib() -> float:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    """Run the chosen measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["collectives", "start", "watchdog", "rank"])
    parser.add_argument("folder", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4], help="numbers of processes")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the watchdog's test")
    flags = parser.parse_args()
    if flags.kind == "start" and min(flags.processes) < 2:
        parser.error("start: a group needs 2 processes or more")
    if flags.kind == "rank":
        run_rank(flags.folder)
        return
    print(describe_run(), flush=True)
    for num in flags.processes:
        if flags.kind == "collectives":
            measure_collectives(num)
        elif flags.kind == "start":
            measure_start(num)
        else:
            measure_watchdog(num, flags.seconds)


if __name__ == "__main__":
    main()
