#!/usr/bin/env python3
"""Rate of a pack at a URL, relative to the same pack on the local disk, with latency and failing requests.

The server adds the latency to each request, and fails a share of them: an error status, a connection that is closed or
cut, a truncated or a corrupt answer. Passes alternate: local, from the server with an empty cache, and from the cache.
The first batches of each pass, with which its workers and downloads begin, are not timed: the rate is that of
the other ones. All batches are compared bit by bit with those of the local pack.
"""

import argparse
import hashlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_support.loader_images import make_jpegs
from bench_support.machine import describe_run

from distribuuuu.config import load_cfg
from distribuuuu.data.loader import build_loaders
from distribuuuu.launch.detect import Launch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
SERVER = """
import sys, time
from pathlib import Path
from support.range_server import RangeServer
with RangeServer(Path(sys.argv[1])) as server:
    server.latency_s, server.failures = float(sys.argv[2]), float(sys.argv[3])
    print(server.url, flush=True)
    sys.stdin.read()
print(len(server.requests), server.num_faults, flush=True)
"""


def run_pass(source: str, cache: Path, args: argparse.Namespace, num_classes: int) -> tuple[float, float, str]:
    """Return images/s, the seconds until the timed part, and a digest of the batches of an epoch."""
    words = ["DATA.NAME", "packed", "TRAIN.DATASET", source, "MODEL.NUM_CLASSES", num_classes, "RNG_SEED", 1,
             "TRAIN.BATCH_SIZE", args.batch, "TRAIN.WORKERS", args.workers, "DATA.WORKER_KIND", args.kind,
             "DATA.CACHE_DIR", cache, "DATA.SHUFFLE", args.shuffle]  # fmt: skip
    cfg = load_cfg(None, [str(word) for word in words])
    started = time.perf_counter()
    loader, _ = build_loaders(cfg, Launch("benchmark"), torch.device("cpu"))
    loader.sampler.set_position(1, 0, 0)
    digest, ends = hashlib.sha256(), []
    for pixels in (batch.images for batch in loader.host_batches()):
        digest.update(pixels.numpy().tobytes())
        ends.append(time.perf_counter())
    warm = min(2 * args.workers, len(ends) - 2)
    return args.batch * (len(ends) - 1 - warm) / (ends[-1] - ends[warm]), ends[warm] - started, digest.hexdigest()


def main() -> None:
    """Make a pack, serve it, and compare the passes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=1000, help="number of images")
    parser.add_argument("--workers", type=int, default=4, help="loader workers")
    parser.add_argument("--kind", default="process", choices=["process", "thread"], help="DATA.WORKER_KIND")
    parser.add_argument("--batch", type=int, default=32, help="images per batch")
    parser.add_argument("--shuffle", default="global", choices=["global", "blocks"], help="DATA.SHUFFLE")
    parser.add_argument("--latency", type=float, default=0.05, help="of each request, in seconds")
    parser.add_argument("--failures", type=float, default=0.05, help="share of the requests that fail")
    parser.add_argument("--repeats", type=int, default=5, help="passes of each kind")
    args = parser.parse_args()
    print(describe_run())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        make_jpegs(folder / "images", args.num)
        tool = [sys.executable, str(ROOT / "tools" / "pack_dataset.py"), str(folder / "pack")]
        subprocess.run([*tool, "TRAIN.DATASET", str(folder / "images")], check=True, capture_output=True)
        command = [sys.executable, "-c", SERVER, str(folder / "pack"), str(args.latency), str(args.failures)]
        environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        url = server.stdout.readline().strip()
        rates: dict[str, list[float]] = {"local": [], "empty cache": [], "full cache": []}
        starts: dict[str, list[float]] = {kind: [] for kind in rates}
        digests = set()
        for number in range(args.repeats):
            for kind in rates:
                source = str(folder / "pack") if kind == "local" else url
                rate, start, digest = run_pass(source, folder / f"cache_{number}", args, 10)
                rates[kind].append(rate)
                starts[kind].append(start)
                digests.add(digest)
        requests, faults = server.communicate("")[0].split()
        assert len(digests) == 1, "the batches differ"
        print(f"{args.num} JPEGs; {requests} answered requests, {faults} of them with a fault; all batches are equal")
        print("                images/s  x local   seconds until the timed part")
        for kind, values in rates.items():
            ratios = [value / local for value, local in zip(values, rates["local"], strict=True)]
            row = f"{statistics.median(values):>9.0f}{statistics.median(ratios):>9.2f}"
            print(f"{kind:<15}{row}{statistics.median(starts[kind]):>12.2f}")


if __name__ == "__main__":
    main()
