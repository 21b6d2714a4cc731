#!/usr/bin/env python3
"""Kill a run at an s3:// URL and its server at random, and compare its weights with those of an undisturbed run.

    python benchmarks/mirror_kills.py --kills 20

In turn, the run is killed, the run is killed and its local folder deleted, and the server is down for some seconds.
Then the same command is started again. The server is moto's, in this process; its objects survive.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.object_store import object_store  # noqa: E402

from distribuuuu.checkpoint.io import read_checkpoint  # noqa: E402
from distribuuuu.config.run_files import local_folder  # noqa: E402

URL = "s3://bucket/run"
WORDS = "--cfg shapes/resnet14 MODEL.ARCH resnet8 MODEL.KWARGS.width 4 OPTIM.MAX_EPOCH 6 TRAIN.WORKERS 0 RNG_SEED 1"
COMMAND = [sys.executable, "-m", "distribuuuu", "train", *WORDS.split(), "CHECKPOINT.EVERY_STEPS", "10", "OUT_DIR"]


def start(out: str, log: Path) -> subprocess.Popen:
    """Start the run in a folder or at a URL."""
    with open(log, "ab") as file:
        return subprocess.Popen([*COMMAND, out], stdout=file, stderr=file, cwd=ROOT)


def disturb(store, num_kills: int, rng: random.Random, log: Path) -> list[str]:
    """Run with kills to the end; return what was done."""
    done, folder, process = list[str](), local_folder(URL), start(URL, log)
    while len(done) < num_kills:
        time.sleep(rng.uniform(2, 14))
        kind = ("run", "run and folder", "server")[len(done) % 3]
        if kind == "server":
            store.stop()
            time.sleep(rng.uniform(1, 6))
            store.start()
        else:
            process.kill()
        if process.poll() is not None or kind != "server":
            process.wait()
            if kind == "run and folder":
                shutil.rmtree(folder, ignore_errors=True)
            process = start(URL, log)
        done.append(kind)
    while process.wait() != 0:
        process = start(URL, log)
    return done


def main() -> int:
    """Compare the runs; return 0 if the weights are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    with object_store() as store:
        os.environ |= {**store.environment, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        os.environ["PYTHONPATH"] = str(ROOT)
        store.reset()
        assert start(str(folder / "plain"), folder / "plain.log").wait() == 0, (folder / "plain.log").read_text()
        done = disturb(store, flags.kills, random.Random(flags.seed), folder / "log")
        shutil.rmtree(local_folder(URL))
        assert start(URL, folder / "log").wait() == 0  # restored from the mirror alone
        paths = [max(Path(out).glob("checkpoints/*.pth.tar")) for out in (folder / "plain", local_folder(URL))]
    one, other = (read_checkpoint(path)["state_dict"] for path in paths)
    is_equal = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    kinds = ", ".join(f"{done.count(kind)} {kind}" for kind in dict.fromkeys(done))
    print(f"{len(done)} kills ({kinds}): the weights are {'equal' if is_equal else 'DIFFERENT'}; logs: {folder}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
