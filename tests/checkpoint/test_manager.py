"""Checkpoint manager: atomic writes, verification, retention, checkpoints of distribuuuu 2021."""

import builtins
import errno
import functools
import io
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.processes import wait_for
from support.runs import make_cfg
from support.states import load, make_state, original_checkpoint, save
from torch import nn

from distribuuuu.checkpoint import manager as checkpoint
from distribuuuu.checkpoint.archive import archive_run
from distribuuuu.checkpoint.io import CheckpointError, load_state_dict, read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager, checkpoint_name, find_nonfinite
from distribuuuu.checkpoint.unsaved import describe_unsaved
from distribuuuu.checkpoint.weights_files import Best, best_path
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.errors import NonFiniteError
from distribuuuu.engine.state import TrainState
from distribuuuu.launch.signals import WRITER_NAME
from distribuuuu.optim.optimizer import build_optimizer


def test_a_state_comes_back_as_it_was(tmp_path):
    state = make_state(epoch=3, step=7, best=(12.5, 2))
    path = save(CheckpointManager(tmp_path), state)
    assert path.name == "ckpt_ep_003_step_000007.pth.tar"
    other = make_state()
    nn.init.zeros_(other.model[0].weight)
    other.optimizer = build_optimizer(load_cfg(None, ["OPTIM.WEIGHT_DECAY", "0.5"]), other.model)
    load(other, path)
    assert (other.epoch, other.step, other.bests["raw"], other.seed) == (3, 7, Best(12.5, 2, {"top1": 12.5}), 1)
    assert all(torch.equal(a, b) for a, b in zip(state.model.parameters(), other.model.parameters(), strict=True))
    mine, theirs = (list(s.optimizer.state_dict()["state"].values()) for s in (state, other))
    assert all(torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in zip(mine, theirs, strict=True))
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.5, "the config says the settings, not the file"


def test_the_newest_is_found_by_number_not_by_name(tmp_path):
    folder = CheckpointManager(tmp_path, keep_last=9)
    for position in ((998, 12), (999, 0), (1000, 0), (1000, 3)):
        save(folder, make_state(epoch=position[0], step=position[1]))
    names = [path.name for path in folder.list()]
    assert names == [checkpoint_name(*p) for p in ((998, 12), (999, 0), (1000, 0), (1000, 3))]
    assert folder.find_latest().name == "ckpt_ep_1000_step_000003.pth.tar"


@pytest.mark.parametrize(("keep", "saved", "kept"), [((2, 3), range(1, 8), (3, 6, 7)), ((1, 0), (9, 2), (2,))])
def test_the_newest_and_every_kth_checkpoint_are_kept(tmp_path, keep, saved, kept):
    """Later positions are those of smaller steps, which a larger global batch has left: they are not resumed again."""
    folder = CheckpointManager(tmp_path, *keep)
    for epoch in saved:
        save(folder, make_state(epoch=epoch), is_best=epoch == 2)
    assert [path.name for path in folder.list()] == [checkpoint_name(epoch, 0) for epoch in kept]
    assert read_checkpoint(best_path(folder.folder.parent))["epoch"] == 1


def test_the_checkpoint_of_an_epochs_steps_gives_way_to_that_of_its_evaluation(tmp_path):
    """The results and the best weights are written before it, and an epoch that is no better writes no best weights."""
    seen: list[tuple[bool, list[str], bool]] = []

    def write_results(content: dict[str, Any]) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        seen.append((is_main, [path.name for path in folder.list()], best_path(folder.folder.parent).exists()))

    folder, state = CheckpointManager(tmp_path, 2), make_state(step=2)
    write = functools.partial(save, folder, state, write_results=write_results)
    write()
    state.step = 4
    write()
    state.finish_epoch(results := {"raw": {"top1": 10.0, "count": 3}})
    write(entries={"evaluations": results, "evaluated_at": (0, 4)})
    assert seen == [(False, [checkpoint_name(0, 2), checkpoint_name(0, 4)], False)]
    assert [path.name for path in folder.list()] == [checkpoint_name(0, 2), checkpoint_name(1, 0)]
    assert read_checkpoint(best_path(folder.folder.parent))["best_epoch"] == 0
    state.finish_epoch(results := {"raw": {"top1": 9.0, "count": 3}})
    write(entries={"evaluations": results})
    assert read_checkpoint(best_path(folder.folder.parent))["epoch"] == 0 and len(seen) == 2


def test_the_originals_checkpoints_resume(tmp_path):
    path = tmp_path / "ckpt_ep_005.pth.tar"
    state = make_state()
    original_checkpoint(path, state)
    content = read_checkpoint(path)
    assert type(content["optimizer"]["param_groups"][0]["lr"]) is float
    other = make_state()
    other.load_dict(content, path)
    assert (other.epoch, other.step, other.bests["raw"].value) == (5, 0, 33.5)
    mine, theirs = (list(s.optimizer.state_dict()["state"].values()) for s in (state, other))
    assert all(torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in zip(mine, theirs, strict=True))
    other.optimizer.step()


def test_weights_and_states_that_do_not_fit_are_described(tmp_path):
    model, path = make_state(num_classes=3).model, save(CheckpointManager(tmp_path), make_state())
    with pytest.raises(CheckpointError, match="w: has 6 classes .* MODEL.NUM_CLASSES is 3"):
        load_state_dict(model, make_state(num_classes=6).model.state_dict(), "w")
    with pytest.raises(CheckpointError, match="lacks 9 tensors, e.g. 0.weight; has 1 that the model lacks, e.g. z"):
        load_state_dict(model, {"z": torch.ones(1)}, "w")
    other = make_state()
    other.classes = ("a", "x", "c")
    with pytest.raises(CheckpointError, match="'b' where the data has 'x'"):
        load(other, path)
    content = read_checkpoint(path)
    content["optimizer"]["param_groups"][0]["params"].pop()
    with pytest.raises(CheckpointError, match="its optimizer does not fit"):
        make_state().load_dict(content, path)


def test_an_optimizer_with_other_groups_is_refused_with_the_first_parameter_that_differs(tmp_path):
    """torch knows parameters by their number: groups of the same sizes would take each other's momentum."""

    def state_with(*words) -> TrainState:
        state = make_state()
        state.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        state.optimizer = build_optimizer(make_cfg(*words), state.model)
        return state

    path = save(CheckpointManager(tmp_path), state_with("FINETUNE.LR_MULT.1", 2.0))
    load(state_with("FINETUNE.LR_MULT.1", 3.0), path)
    said = "groups of its optimizer differ: .*LR_MULT"
    with pytest.raises(CheckpointError, match=said):
        load(state_with("FINETUNE.LR_MULT.2", 2.0), path)
    old = read_checkpoint(path)
    del old["optimizer_names"]  # as they were written before
    state_with("FINETUNE.LR_MULT.1", 2.0).load_dict(old, path)


def test_an_older_run_is_set_aside_whole(tmp_path, monkeypatch):
    """Also if the first attempt was killed between two of its moves: the older best weights are never overwritten."""
    folder, replace, moves = CheckpointManager(tmp_path), os.replace, []

    def move(*paths):
        moves.append(1)
        if len(moves) % 2 == 0:
            raise KeyboardInterrupt
        replace(*paths)

    assert archive_run(folder) is None
    for number in (1, 2):
        save(folder, make_state(epoch=1), is_best=True)
        (tmp_path / "config.yaml").write_text("x")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "replace", move)
            archive_run(folder, ["config.yaml"])
        archive_run(folder, ["config.yaml"])
        names = {path.name for path in (tmp_path / f"checkpoints.{number}").iterdir()}
        assert names == {checkpoint_name(1, 0), "best.pth.tar", "config.yaml"}
        assert folder.list() == [] and not best_path(folder.folder.parent).exists()


def test_the_best_is_the_best_of_all_epochs_those_before_a_resume_included():
    def finish(state: TrainState, **values: float) -> list[str]:
        state.finish_epoch({kind: {"top1": value} for kind, value in values.items()})
        return [kind for kind in values if state.bests[kind].epoch == state.epoch - 1]

    state = make_state()
    assert [finish(state, raw=top1) for top1 in (0.0, 20.0, 10.0, 30.0)] == [["raw"], ["raw"], [], ["raw"]]
    assert (state.bests["raw"], state.epoch, state.step) == (Best(30.0, 3, {"top1": 30.0}), 4, 0)
    assert finish(state, raw=30.0, ema=29.0) == ["ema"], "each kind of weights has a best of its own"
    assert finish(state, ema=float("nan")) == [], "no number beats none"
    state = make_state()
    assert [finish(state, raw=map_) for map_ in (float("nan"), 5.0, float("nan"))] == [["raw"], ["raw"], []]
    state = make_state()
    assert [finish(state, raw=0.0) for _ in range(3)] == [["raw"], [], []], "a metric that stays at 0 is not better"
    resumed = make_state(epoch=5, best=(33.5, -1))  # from a file that does not tell the best's epoch
    assert finish(resumed, raw=33.0) == [] and resumed.bests["raw"].value == 33.5


class _FullFile(io.FileIO):
    """A file on a disk that becomes full while it is written."""

    def write(self, data):
        """Write some data, then none."""
        if self.tell() > 20_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def test_a_save_that_fails_in_the_middle_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "RETRY_S", 0.001)
    write, open_file, is_full, num_tries = checkpoint.write_atomically, builtins.open, [True], []

    def note_try(*args) -> None:
        num_tries.append(1)
        write(*args)

    def open_on_full_disk(path, *args, **options):
        is_cut = str(path).endswith(".tmp") and is_full[0]
        return _FullFile(path, "w") if is_cut else open_file(path, *args, **options)

    monkeypatch.setattr("builtins.open", open_on_full_disk)
    monkeypatch.setattr(checkpoint, "write_atomically", note_try)
    folder, state = CheckpointManager(tmp_path), make_state(epoch=1)
    state.model.register_buffer("large", torch.zeros(20_000))
    folder.save(state.to_dict())
    wait_for(lambda: len(num_tries) >= 5)
    is_full[0] = False
    folder.finish()
    assert len(folder.list()) == 1 and read_checkpoint(folder.list()[0])["epoch"] == 0
    is_full[0] = True
    monkeypatch.setattr(checkpoint, "LAST_RETRIES_S", 0.05)
    folder.save(make_state(epoch=2).to_dict() | {"large": torch.zeros(20_000)})
    with pytest.raises(CheckpointError, match="No space left.*the newest one is .*ckpt_ep_001"):
        folder.finish()


def test_a_write_that_fails_for_too_long_ends_the_run_and_a_bug_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "RETRY_S", 0.001)
    monkeypatch.setattr(checkpoint, "RETRIES_S", 0.05)
    monkeypatch.setattr(checkpoint, "write_atomically", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    folder = CheckpointManager(tmp_path)
    folder.save(make_state(epoch=1).to_dict())
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match="could not be written: .*No space left"):
        folder.save(make_state(epoch=2).to_dict())
    assert time.monotonic() - begin < 10
    monkeypatch.setattr(checkpoint, "RETRIES_S", 600.0)  # the process ends soon if another error ends the run
    monkeypatch.setattr(checkpoint, "LAST_RETRIES_S", 0.05)
    folder.save(make_state(epoch=2).to_dict())
    begin, writers = time.monotonic(), [thread for thread in threading.enumerate() if thread.name == WRITER_NAME]
    folder.close()
    assert time.monotonic() - begin < 10 and len(writers) == 1 and writers[0].daemon
    monkeypatch.setattr(checkpoint, "write_atomically", mock.Mock(side_effect=ZeroDivisionError))
    folder.save(make_state(epoch=1).to_dict())
    with pytest.raises(ZeroDivisionError):
        folder.finish()


@pytest.mark.parametrize("ends_run", [False, True])
def test_after_a_write_that_failed_the_new_state_is_tried(tmp_path, monkeypatch, caplog, ends_run):
    """The best weights of an evaluation whose checkpoint could not be written are written with the next one."""
    folder, states = CheckpointManager(tmp_path), [make_state(epoch=epoch) for epoch in (1, 2)]
    for name, value in (("RETRY_S", 0.001), ("RETRIES_S", 0.05), ("LAST_RETRIES_S", 0.05)):
        monkeypatch.setattr(checkpoint, name, value)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_atomically", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
        folder.save({**states[0].to_dict(), "evaluations": {"raw": {"top1": 1.0}}, "best_epoch": 0})
        wait_for(lambda: not folder._thread.is_alive())
    folder.save(states[1].to_dict(), ends_run=ends_run)
    folder.finish()
    assert "could not be written: [Errno 28] No space left; the newest one is none; trying to write" in caplog.text
    assert [path.name for path in folder.list()] == [checkpoint_name(1, 0), checkpoint_name(2, 0)]
    assert read_checkpoint(best_path(folder.folder.parent))["epoch"] == 0
    assert read_checkpoint(folder.list()[1])["checkpoints"] == [checkpoint_name(1, 0), checkpoint_name(2, 0)]


def test_a_state_of_a_task_that_becomes_unreadable_ends_the_run(tmp_path):
    folder = CheckpointManager(tmp_path)
    for held in (torch.eye(3), torch.eye(3).to_sparse()):
        folder.finish()
        folder.save({**make_state(epoch=1).to_dict(), "task": {"shared": {"held": held}, "by_rank": []}})
    with pytest.raises(CheckpointError, match="cannot hold the state of the task: a tensor is not a dense one"):
        folder.finish()
    assert folder.find_latest() == folder.list()[0]


def test_tensors_that_a_task_leaves_out_come_from_the_start_and_must_not_change(tmp_path):
    folder, state, other = CheckpointManager(tmp_path), make_state(epoch=1), make_state()
    for one in (state, other):
        one.unsaved = describe_unsaved(["0.weight"], one.model.state_dict(), "")
    path = save(folder, state, is_best=True)
    content = read_checkpoint(path, to_resume=True)
    assert "0.weight" not in content["state_dict"] and "0.weight" in read_checkpoint(best_path(tmp_path))["state_dict"]
    other.load_dict(content, path)
    assert torch.equal(other.model[0].weight, state.model[0].weight) and other.epoch == 1
    other.unsaved = {}
    with pytest.raises(CheckpointError, match="leaves out tensors, e.g. 0.weight, that are others in this start"):
        other.load_dict(content, path)
    with pytest.raises(ConfigError, match="TASK.NAME: unsaved_tensors names x, which the model lacks"):
        describe_unsaved(["x"], state.model.state_dict(), "")
    nn.init.zeros_(state.model[0].weight)
    with pytest.raises(CheckpointError, match="the training changes tensors of unsaved_tensors, e.g. 0.weight"):
        save(folder, state)


def test_weights_that_are_not_finite_are_refused_at_once_and_a_task_may_hold_a_nan(tmp_path, monkeypatch):
    folder, state = CheckpointManager(tmp_path), make_state(epoch=1)
    save_content = {**state.to_dict(), "task": {"shared": {"seen": torch.tensor(float("nan"))}, "by_rank": []}}
    folder.save(save_content)
    folder.finish()
    reads, read = [], torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: reads.append(1) or read(tensor))
    assert find_nonfinite(state.model.state_dict()) is None and len(reads) == 1, "the host waits for the device once"
    state.model[0].weight.data[0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match="first state_dict/0.weight"):
        folder.save(state.to_dict())
    assert len(folder.list()) == 1


def fail_to_read(path: Path, error: Exception):
    """Return a function that opens files, and fails for one."""
    open_file = builtins.open

    def fail(name, *args, **options):
        if str(name) == str(path):
            raise error
        return open_file(name, *args, **options)

    return fail


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), OSError(errno.ESTALE, "Stale"),
                                   PermissionError(errno.EACCES, "Permission denied"), MemoryError()])  # fmt: skip
def test_a_read_error_is_not_taken_for_damage(tmp_path, monkeypatch, error):
    folder = CheckpointManager(tmp_path)
    for epoch in (1, 2):
        newest = save(folder, make_state(epoch=epoch))
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", fail_to_read(newest, error))
        with pytest.raises(CheckpointError, match="cannot be read"):
            folder.find_latest()
    assert folder.find_latest() == newest and not list(tmp_path.rglob("*.broken"))


def test_a_restarted_job_resumes_only_its_own_checkpoints(tmp_path):
    folder = CheckpointManager(tmp_path)
    assert folder.find_latest(["Slurm job 7"]) is None
    folder.save({**make_state(epoch=1).to_dict(), "jobs": ["Slurm job 6"]})
    folder.finish()
    for jobs, is_own in ((["Slurm job 7"], False), ([], False), (["torchrun a", "Slurm job 6"], True), (None, True)):
        assert folder.find_latest(jobs) == (folder.list()[0] if is_own else None) and folder.has_any(jobs) == is_own
    (tmp_path / "checkpoints" / checkpoint_name(2, 0)).write_bytes(b"damaged")
    assert folder.has_any(["Slurm job 6"]) and not folder.has_any(["Slurm job 7"])


def test_another_global_batch_keeps_the_images_seen(tmp_path):
    path = save(CheckpointManager(tmp_path), make_state(epoch=1, step=6))
    other = make_state()
    other.global_batch = 16
    load(other, path)
    assert (other.epoch, other.step) == (1, 3)
