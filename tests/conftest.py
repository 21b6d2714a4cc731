"""What the tests share: small real images, a small config, and functions run on several processes."""

import fcntl
import multiprocessing
import os
import pickle
import random
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from distribuuuu.config import load_cfg

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # training_process: a run to be signalled and killed

# Forked processes must not inherit a pool of threads, and small tensors are faster without one.
torch.set_num_threads(1)


# Files are handed to two processes in this order: long ones early, and those that share a cluster far from each other.
FIRST, LAST = ("test_elastic", "test_lessons", "test_sbatch"), "test_srun"


def pytest_collection_modifyitems(items):
    """Put the tests in order, and skip those on real data where there is none."""
    place = {name: number for number, name in enumerate(FIRST)} | {LAST: len(FIRST) + 1}
    items.sort(key=lambda item: place.get(item.path.stem, len(FIRST)))
    for item in items:
        if item.get_closest_marker("real_data") and not os.environ.get("DATA_ROOT"):
            item.add_marker(pytest.mark.skip(reason="DATA_ROOT is not set to a folder with FashionMNIST/"))


@pytest.fixture(autouse=True)
def one_at_a_time_on_the_cluster(request):
    """Let tests on a Slurm cluster wait for each other: those of other processes may switch its nodes off."""
    if "slurm" not in request.node.nodeid.lower():
        yield
        return
    with open(Path(tempfile.gettempdir()) / f"distribuuuu-tests-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def draw_folder(root: Path, split: str, counts: dict[str, int], size: tuple[int, int] = (40, 36)) -> None:
    """Write JPEGs of noise around a colour of each class."""
    for number, (name, count) in enumerate(counts.items()):
        folder = root / split / name
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(count):
            noise = random.Random(f"{split}/{name}/{index}")
            base = [60 + 60 * ((number + channel) % 3) for channel in range(3)]
            tiny = Image.new("RGB", (5, 5))
            tiny.putdata([tuple(value + noise.randrange(-50, 50) for value in base) for _ in range(25)])
            tiny.resize(size).save(folder / f"{index:03d}.jpg", quality=90)


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory) -> Path:
    """A folder of 48 training and 37 evaluation images in three classes: 37 divides by nothing."""
    root = tmp_path_factory.mktemp("images")
    draw_folder(root, "train", {"ant": 16, "bee": 16, "cat": 16})
    draw_folder(root, "val", {"ant": 12, "bee": 12, "cat": 13})
    return root


def small_words(root: Path, out_dir: Path, *words: Any) -> list[str]:
    """Return the KEY VALUE words of a run that takes a second: resnet8 on 16 px."""
    settings = {
        "MODEL.ARCH": "resnet8", "MODEL.NUM_CLASSES": 3, "TRAIN.DATASET": root,
        "TRAIN.IM_SIZE": 16, "TEST.IM_SIZE": 18, "TRAIN.BATCH_SIZE": 12, "TEST.BATCH_SIZE": 16, "TRAIN.WORKERS": 0,
        "TRAIN.PRINT_FREQ": 1, "OPTIM.MAX_EPOCH": 2, "OPTIM.WARMUP_EPOCHS": 1, "OPTIM.BASE_LR": 0.1, "RNG_SEED": 3,
        "LOG.TENSORBOARD": False, "OUT_DIR": out_dir,
    }  # fmt: skip
    return [str(word) for pair in settings.items() for word in pair] + [str(word) for word in words]


@pytest.fixture
def small_cfg(image_folder, tmp_path) -> Callable:
    """Return small_cfg(KEY, VALUE, ...): the config of a run that takes a second, in this test's folder."""

    def make(*words: Any):
        return load_cfg(None, small_words(image_folder, tmp_path / "out", *words))

    return make


def run_tool(tool: str, *words: Any, **env: str) -> subprocess.CompletedProcess:
    """Run tools/TOOL with words in a process of its own; returns its status and what it printed."""
    command = [sys.executable, str(ROOT / "tools" / tool), *(str(word) for word in words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def _enter(rank: int, num: int, port: int, function: Callable, arguments: tuple, pipe) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        answer = (True, function(*arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))


def on_processes(num: int, function: Callable, *arguments: Any) -> list[Any]:
    """Return function(*arguments) of `num` processes that see each other's launcher variables, by rank."""
    context, port, running = multiprocessing.get_context("fork"), free_port(), []
    for rank in range(num):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_enter, args=(rank, num, port, function, arguments, theirs))
        process.start()
        theirs.close()
        running.append((process, mine))
    answers = []
    for process, pipe in running:
        assert pipe.poll(120), "a process did not answer within 120 s"
        answers.append(pickle.loads(pipe.recv_bytes()))
        process.join()
    for ok, answer in answers:
        assert ok, answer
    return [answer for _, answer in answers]
