#!/usr/bin/env python3
"""Measure what grows with the number of processes: collectives, start-up traffic, and the connections of the watchdog.

python benchmarks/scale.py collectives --processes 2 4 8 16
python benchmarks/scale.py start --processes 8 32 128
python benchmarks/scale.py watchdog --processes 4096 --seconds 60

`collectives` trains with real gloo processes on this machine and counts the collectives of rank 0 by torch's profiler.
`start` forks processes that only join the process group, with gloo's full mesh (eager) and with connections at their
first use (lazy), and compares the results of collectives of both bit by bit. The bytes are those of the kernel (Linux).
`watchdog` holds one connection for each process to a real server, then closes one of them.
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

from machine import describe_run

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
    "TEST.BATCH_SIZE", "50", "LOG.TENSORBOARD", "False",
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
    replace(trainer, "train_step", in_phase("step"))
    replace(trainer, "evaluate_epoch", evaluate_and_count)
    replace(trainer, "evaluate_epoch", in_phase("evaluation"))
    replace(CheckpointManager, "save_in_background", in_phase("checkpoint"))
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
    import torch.distributed as torch_dist

    from distribuuuu.distributed import comm, process_group
    from distribuuuu.launch.detect import Launch

    def create_store(*args: Any) -> Any:
        store = process_group_store(*args)
        joined.append(time.perf_counter())
        return store

    process_group_store, process_group.create_store = process_group.create_store, create_store
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
    """Hold `num` connections to a watchdog server for some seconds, then close one and wait for the end of all."""
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    server = context.Process(target=_serve, args=(num, child))
    server.start()
    port, token, memory_before = parent.recv()
    _raise_file_limit()
    selector, connections = selectors.DefaultSelector(), []
    began = time.perf_counter()
    for rank in range(num):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(
            token.encode() + b"\n" + json.dumps({"rank": rank, "host": f"node{rank // 8}"}).encode() + b"\n"
        )
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, rank)
        connections.append(connection)
    connected_s = time.perf_counter() - began
    parent.send("usage")
    cpu_s, _ = parent.recv()
    alarms = _beat(selector, connections, seconds)
    parent.send("usage")
    cpu_after_s, memory = parent.recv()
    share = (cpu_after_s - cpu_s) / seconds
    print(f"{num:5d} connections in {connected_s:.2f} s; {seconds:.0f} s: {alarms} false alarms, server "
          f"{share:.2%} of a core, {memory - memory_before:.1f} MiB more")  # fmt: skip
    selector.unregister(connections[-1])
    began = time.perf_counter()
    connections[-1].close()
    ended = _count_ended(selector, num - 1)
    print(f"{num:5d} one process died: {ended} of {num - 1} others ended within {time.perf_counter() - began:.2f} s")
    server.terminate()
    if alarms or ended < num - 1:
        sys.exit(1)


def _serve(num: int, pipe: Any) -> None:
    from distribuuuu.distributed.watchdog_server import WatchdogServer

    memory, token = _memory_mib(), "0" * 32
    server = WatchdogServer(num, token, timeout_s=600)
    server.start()
    pipe.send((server.ports[0], token, memory))
    while True:
        pipe.recv()
        pipe.send((time.process_time(), _memory_mib()))


def _beat(selector: selectors.BaseSelector, connections: list[socket.socket], seconds: float) -> int:
    """Send heartbeats at the interval that the server demands; return the number of orders to end."""
    num, interval_s, alarms = len(connections), 1.0, 0
    began = time.monotonic()
    next_beats = [began + interval_s * rank / num for rank in range(num)]
    step = 0
    while (now := time.monotonic()) < began + seconds:
        for key, _ in selector.select(timeout=0.01):
            for line in key.fileobj.recv(1 << 16).splitlines():
                message = json.loads(line)
                interval_s = message.get("beat_s", interval_s)
                alarms += "end" in message
        step += 1
        for rank, due in enumerate(next_beats):
            if now >= due:
                beat = {"at": f"epoch 1, step {step}", "marks": step, "starting": False}
                connections[rank].send(json.dumps(beat).encode() + b"\n")
                next_beats[rank] = now + interval_s
    return alarms


def _count_ended(selector: selectors.BaseSelector, num: int) -> int:
    """Return the number of processes that receive the order to end within 30 s; each then closes its connection."""
    ended, deadline = 0, time.monotonic() + 30
    while ended < num and time.monotonic() < deadline:
        for key, _ in selector.select(timeout=0.1):
            if b'"end"' in key.fileobj.recv(1 << 16):
                ended += 1
                selector.unregister(key.fileobj)
                key.fileobj.close()
    return ended


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
    if flags.kind == "start":
        import torch.distributed  # noqa: F401  # once, before the forks
    for num in flags.processes:
        if flags.kind == "collectives":
            measure_collectives(num)
        elif flags.kind == "start":
            measure_start(num)
        else:
            measure_watchdog(num, flags.seconds)


if __name__ == "__main__":
    main()
