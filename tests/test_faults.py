"""Faults during training: non-finite losses, full disks and deleted folders lose no valid checkpoint."""

import json
import resource
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from support.runs import TRAIN_NET, small_options

from distribuuuu import trainer
from distribuuuu.checkpoint import manager
from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager, find_nonfinite, snapshot
from distribuuuu.records.metric_writers import RecordFile

if sys.platform != "linux":
    pytest.skip("limits the files of another process", allow_module_level=True)

from bench_support.training_process import TrainingProcess


def is_finite(path: Path) -> bool:
    return find_nonfinite(read_checkpoint(path)) is None


def limit_files(run: TrainingProcess, max_bytes: int = 200_000) -> None:
    """Limit them, by default to what is enough for the log and the records, not for a checkpoint."""
    for pid in run.list_pids():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (max_bytes, resource.RLIM_INFINITY))


@pytest.mark.slow
def test_a_run_survives_a_full_disk_loses_nothing_and_names_the_newest_checkpoint(image_folder, tmp_path):
    words = ("OPTIM.MAX_EPOCH", 10000, "TRAIN.PRINT_FREQ", 4, "CHECKPOINT.EVERY_STEPS", 2, "LOG.TENSORBOARD", True)
    command = [sys.executable, str(TRAIN_NET), *small_options(image_folder, tmp_path / "out", *words)]
    run = TrainingProcess(command, tmp_path / "out", 4)
    try:
        run.wait_for(lambda: len(run.records()) > 2)
        limit_files(run)
        run.wait_for(lambda: "Cannot write checkpoint" in run.last_lines())
        before = CheckpointManager(run.out_dir).list()
        time.sleep(1)
        assert CheckpointManager(run.out_dir).list() == before and all(is_finite(path) for path in before)
        limit_files(run, resource.RLIM_INFINITY)
        num = len(run.records())
        run.wait_for(lambda: len(run.records()) > num + 10)
        steps = [(record["epoch"], record["step"], record["kind"]) for record in run.records()]
        expected = [(epoch, 4, kind) for epoch in range(1, steps[-1][0] + 1) for kind in ("train", "eval")]
        assert steps == expected[: len(steps)], "no record is lost"
        limit_files(run)
        run.signal_launcher(15)
        assert run.wait(60) == 2
    finally:
        run.kill()
    newest = CheckpointManager(run.out_dir).list()[-1]
    assert is_finite(newest)
    text = Path(f"{run.out_dir}.console").read_text()
    assert f"could not be written: [Errno 27] File too large; the newest one is {newest}" in text
    assert "Traceback" not in text


def test_a_snapshot_shares_no_memory_and_its_nonfinite_values_are_found():
    content = {"a": [torch.ones(2)], "b": (1, torch.zeros(1)), "c": "text"}
    copy = snapshot(content)
    content["a"][0].zero_()
    assert copy["a"][0].tolist() == [1, 1] and copy["b"][0] == 1 and copy["c"] == "text"
    for bad in [float("nan"), float("inf"), -float("inf")]:
        assert find_nonfinite({"state_dict": {"w": torch.tensor([1.0, 1e38])}, "n": torch.tensor(3)}) is None
        assert find_nonfinite({"optimizer": [{"m": torch.tensor([1.0, bad])}]}) == "optimizer/0/m"


def test_training_continues_while_a_checkpoint_is_written(small_cfg, monkeypatch):
    """The write waits for later training steps, so it would never end if these waited for the write."""
    write, save, set_lr = manager.write_atomically, CheckpointManager.save, trainer.set_lr
    is_saved, has_stepped = threading.Event(), threading.Event()

    def write_slowly(path, *content):
        assert has_stepped.wait(60)
        return write(path, *content)

    def save_and_note(self, content, **options):
        path = save(self, content, **options)
        is_saved.set()
        return path

    def step_and_note(*arguments):
        if is_saved.is_set():
            has_stepped.set()
        set_lr(*arguments)

    monkeypatch.setattr(manager, "write_atomically", write_slowly)
    monkeypatch.setattr(CheckpointManager, "save", save_and_note)
    monkeypatch.setattr(trainer, "set_lr", step_and_note)
    trainer.train_model(small_cfg("CHECKPOINT.EVERY_STEPS", 1, "OPTIM.MAX_EPOCH", 1))
    assert has_stepped.is_set()


def test_records_that_could_not_be_written_are_written_with_the_next(tmp_path, caplog):
    path = tmp_path / "folder" / "metrics.jsonl"
    (tmp_path / "folder").write_text("a file in place of the folder")
    records = RecordFile(path)
    records.append({"n": 1})
    records.append({"n": 2})
    assert caplog.text.lower().count("cannot write") == 1
    (tmp_path / "folder").unlink()
    (tmp_path / "folder").mkdir()
    records.append({"n": 3})
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [1, 2, 3]
