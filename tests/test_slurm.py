"""The same command under srun, on whatever cluster it reaches."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, small_words

from distribuuuu.config import load_cfg
from distribuuuu.trainer import train_model


def _cluster_answers() -> bool:
    if not shutil.which("srun") or not shutil.which("sinfo"):
        return False
    try:
        nodes = subprocess.run(["sinfo", "-h", "-o", "%D"], capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return False
    return nodes.returncode == 0 and sum(map(int, nodes.stdout.split())) >= 2


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Skip the file where srun reaches no cluster of two nodes."""
    if not _cluster_answers():
        pytest.skip("srun reaches no Slurm cluster of two nodes")


def srun(*words: str, **env: str) -> subprocess.CompletedProcess:
    command = ["srun", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300, stdin=subprocess.DEVNULL
    )


def test_two_nodes_train_the_model_that_one_process_trains(image_folder, tmp_path):
    import torch

    from distribuuuu.checkpoint_file import read_checkpoint

    shared = ("TRAIN.GLOBAL_BATCH_SIZE", 12, "MODEL.KWARGS.norm", "group")
    train_model(load_cfg(None, small_words(image_folder, tmp_path / "alone", *shared)))
    words = small_words(image_folder, tmp_path / "slurm", *shared)
    done = srun("-N2", "--ntasks-per-node=2", sys.executable, "-u", str(ROOT / "tools" / "train_net.py"), *words)
    assert done.returncode == 0, done.stderr
    assert "launcher: srun, process 0 of 4; backend gloo" in done.stderr
    one, other = (read_checkpoint(tmp_path / name / "best.pth.tar")["state_dict"] for name in ("alone", "slurm"))
    for key, tensor in one.items():
        torch.testing.assert_close(tensor, other[key], rtol=1e-5, atol=1e-5)


def test_one_task_is_one_process(image_folder, tmp_path):
    words = small_words(image_folder, tmp_path / "out", "OPTIM.MAX_EPOCH", 1)
    done = srun("-N1", "-n1", sys.executable, str(ROOT / "tools" / "train_net.py"), *words)
    assert done.returncode == 0 and "launcher: plain python, one process" in done.stderr, done.stderr


def test_a_mistake_is_told_once(tmp_path):
    done = srun("-N2", "--ntasks-per-node=2", sys.executable, str(ROOT / "tools" / "train_net.py"), "NO.KEY", "1")
    assert done.stderr.count("NO.KEY") == 1 and "Traceback" not in done.stderr
