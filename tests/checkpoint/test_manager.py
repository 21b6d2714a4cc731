"""Checkpoint manager: atomic writes, verification, retention, checkpoints of distribuuuu 2021."""

import builtins
import errno
import gc
import io
import os
import pickle
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import make_cfg
from support.states import make_state, original_checkpoint
from torch import nn

from distribuuuu.checkpoint import background_writer
from distribuuuu.checkpoint import manager as checkpoint
from distribuuuu.checkpoint.io import CheckpointError, find_class_mismatch, read_checkpoint, write_atomically
from distribuuuu.checkpoint.manager import CheckpointManager, checkpoint_name
from distribuuuu.checkpoint.restore import load_state_dict
from distribuuuu.checkpoint.snapshot import hash_tensors, with_own_storage
from distribuuuu.checkpoint.weights_files import Best
from distribuuuu.config import load_cfg
from distribuuuu.engine.state import TrainState, list_changes
from distribuuuu.files.atomic_file import replacing
from distribuuuu.launch.host import copy_into_buffer
from distribuuuu.optim.optimizer import build_optimizer


def test_a_state_comes_back_as_it_was(tmp_path):
    state = make_state(epoch=3, step=7, best=(12.5, 2))
    path = CheckpointManager(tmp_path).save(state)
    assert path.name == "ckpt_ep_003_step_000007.pth.tar"
    other = make_state()
    nn.init.zeros_(other.model[0].weight)
    other.optimizer = build_optimizer(load_cfg(None, ["OPTIM.WEIGHT_DECAY", "0.5"]), other.model)
    other.load_dict(read_checkpoint(path), path)
    assert (other.epoch, other.step, other.bests["raw"], other.seed) == (3, 7, Best(12.5, 2), 1)
    assert all(torch.equal(a, b) for a, b in zip(state.model.parameters(), other.model.parameters(), strict=True))
    mine, theirs = (list(s.optimizer.state_dict()["state"].values()) for s in (state, other))
    assert all(torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in zip(mine, theirs, strict=True))
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.5, "the config says the settings, not the file"


def test_the_newest_is_found_by_number_not_by_name(tmp_path):
    folder = CheckpointManager(tmp_path, keep_last=9)
    for position in ((999, 0), (1000, 0), (998, 12), (1000, 3)):
        folder.save(make_state(epoch=position[0], step=position[1]))
    names = [path.name for path in folder.list()]
    assert names == [checkpoint_name(*p) for p in ((998, 12), (999, 0), (1000, 0), (1000, 3))]
    assert folder.find_latest().name == "ckpt_ep_1000_step_000003.pth.tar"


@pytest.mark.parametrize(
    ("keep", "saved", "kept"), [((2, 3), (1, 2, 3, 4, 5, 6, 7), (3, 6, 7)), ((1, 0), (9, 2), (2, 9))]
)
def test_the_newest_and_every_kth_checkpoint_are_kept(tmp_path, keep, saved, kept):
    """The one just written too, beside newer numbers."""
    folder = CheckpointManager(tmp_path, *keep)
    for epoch in saved:
        folder.save(make_state(epoch=epoch), new_bests=["raw"] * (epoch == 2))
    assert [path.name for path in folder.list()] == [checkpoint_name(epoch, 0) for epoch in kept]
    assert read_checkpoint(folder.bests["raw"])["epoch"] == 1


@pytest.mark.parametrize("is_slow", [False, True])
def test_the_checkpoint_of_an_epochs_steps_gives_way_to_that_of_its_evaluation(tmp_path, monkeypatch, is_slow):
    """It is removed, or abandoned where the evaluation takes less time than the write, which nobody waits for."""
    write, folder, state = checkpoint.write_atomically, CheckpointManager(tmp_path, keep_last=2), make_state(step=4)

    def slow_write(path, content, is_abandoned=lambda: False):
        while is_slow and "_step_" in path.name and not is_abandoned():
            time.sleep(0.01)
        return write(path, content, is_abandoned)

    folder.save(make_state(step=2))
    monkeypatch.setattr(checkpoint, "write_atomically", slow_write)
    folder.save_in_background(state)
    if not is_slow:
        folder.wait()
        assert [path.name for path in folder.list()] == [checkpoint_name(0, 2), checkpoint_name(0, 4)]
    new_bests = state.finish_epoch({"raw": 10.0})
    folder.save(state, new_bests)
    assert [path.name for path in folder.list()] == [checkpoint_name(0, 2), checkpoint_name(1, 0)]
    assert read_checkpoint(folder.bests["raw"])["best_epoch"] == 0


def test_a_hash_of_tensors_depends_on_names_and_values_only():
    weights = {
        "b": torch.arange(24.0).view(1, 2, 3, 4),
        "a": torch.tensor(1.0),
        "c": torch.ones(2, dtype=torch.bfloat16),
    }
    same = {name: weights[name] for name in "abc"}
    same["b"] = same["b"].to(memory_format=torch.channels_last)
    others = [
        {**weights, "a": torch.tensor(-1.0)},
        {**weights, "a": torch.ones(1)},
        {**weights, "c": weights["c"].half()},
        {"b": weights["b"], "a": weights["a"], "d": weights["c"]},
    ]
    assert hash_tensors(same) == hash_tensors(weights)
    assert len({hash_tensors(value) for value in (weights, *others)}) == 5


def test_what_is_written_first_precedes_the_checkpoint_in_the_background(tmp_path):
    folder, seen = CheckpointManager(tmp_path), []

    def write_first(content) -> None:
        assert content["epoch"] == 0 and all(tensor.device.type == "cpu" for tensor in content["state_dict"].values())
        is_main = threading.current_thread() is threading.main_thread()
        seen.append((is_main, folder.list(), folder.bests["raw"].exists()))

    folder.save_in_background(make_state(epoch=1), ["raw"], write_first)
    folder.finish()
    assert seen == [(False, [], False)] and len(folder.list()) == 1 and folder.bests["raw"].exists()


def test_temporary_names_are_unique_and_those_of_an_evaluation_stay(tmp_path):
    with replacing(tmp_path / "results.json", "w") as one, replacing(tmp_path / "results.json", "w") as other:
        assert one.name != other.name and Path(one.name).name.startswith(".results.json.")
        one.write("one")
    assert (tmp_path / "results.json").read_text() == "one"
    kept = tmp_path / ".test_results.json.0123456789abcdef.tmp"
    for path in (kept, tmp_path / ".best_ema.pth.tar.0123.tmp", tmp_path / ".metrics.jsonl.0123.tmp"):
        path.write_text("half")
    CheckpointManager(tmp_path).remove_temporary_files()
    assert sorted(os.listdir(tmp_path)) == [kept.name, "results.json"]


def test_what_was_timed_and_counted_comes_back(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("distribuuuu.records.step_timing.time.perf_counter", lambda: now[0])
    state, other = make_state(), make_state(epoch=0, step=3)
    state.timing.begin(now[0])
    now[0] += 2
    assert state.timing.end_row(now[0], 8, is_last=False) == 2
    now[0] += 3  # within a row
    state._peak_before = 10**6
    path = CheckpointManager(tmp_path).save(state)
    now[0] += 1000
    other.load_dict(read_checkpoint(path), path)
    other.timing.begin(now[0])
    now[0] += 1
    assert other.timing.end_row(now[0], 16, is_last=True) == 4, "the seconds of the row before the resume count"
    now[0] += 1000  # the evaluation
    assert other.timing.images_per_s == 24 / 6 and other.timing.state_dict()["row_seconds"] == 0
    assert other.peak_memory_mib() == 10**6, "the peak is that of all starts"
    other.load_dict(read_checkpoint(path), path)
    assert other.timing.images == 24, "a rollback does not take back what was timed"


def test_changed_options_are_listed_by_section():
    before = {"MODEL.ARCH": "a", "MODEL.KWARGS.width": 8, "OPTIM.STEPS": (1, 2), "TRAIN.TOPK": 5, "OLD.KEY": 1}
    now = {"MODEL.ARCH": "b", "MODEL.KWARGS.norm": "group", "OPTIM.STEPS": (1, 2), "TRAIN.TOPK": 1, "NEW.KEY": 1}
    model = ["MODEL.ARCH a -> b", "MODEL.KWARGS.width 8 -> unset", "MODEL.KWARGS.norm unset -> group"]
    assert list_changes(before, now, ("MODEL.", "OPTIM.")) == model
    assert list_changes(before, now) == [*model[:2], "TRAIN.TOPK 5 -> 1", model[2]]
    assert list_changes({}, now) == ["MODEL.KWARGS.norm unset -> group"]


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


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"model": s}, lambda s: {"model_state": s, "epoch": 3}])
def test_bare_weights_under_any_usual_name(tmp_path, wrap):
    state = make_state()
    prefixed = {f"module.{key}": value for key, value in state.model.state_dict().items()}
    torch.save(wrap(prefixed), tmp_path / "w.pth")
    content = read_checkpoint(tmp_path / "w.pth")
    load_state_dict(make_state().model, content["state_dict"], "w.pth")
    with pytest.raises(CheckpointError, match="weights only"):
        make_state().load_dict(content, "w.pth")


def test_safetensors(tmp_path):
    from safetensors.torch import save_file

    save_file(make_state().model.state_dict(), tmp_path / "w.safetensors")
    load_state_dict(make_state().model, read_checkpoint(tmp_path / "w.safetensors")["state_dict"], "w")
    (tmp_path / "bad.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(CheckpointError, match="bad.safetensors"):
        read_checkpoint(tmp_path / "bad.safetensors")


def test_weights_and_states_that_do_not_fit_are_described(tmp_path):
    model, path = make_state(num_classes=3).model, CheckpointManager(tmp_path).save(make_state())
    with pytest.raises(CheckpointError, match="w: has 5 classes .* MODEL.NUM_CLASSES is 3"):
        load_state_dict(model, make_state(num_classes=5).model.state_dict(), "w")
    with pytest.raises(CheckpointError, match="lacks 9 tensors, e.g. 0.weight; has 1 that the model lacks, e.g. z"):
        load_state_dict(model, {"z": torch.ones(1)}, "w")
    other = make_state()
    other.classes = ("a", "x", "c")
    with pytest.raises(CheckpointError, match="'b' where the data has 'x'"):
        other.load_dict(read_checkpoint(path), path)
    content = read_checkpoint(path)
    content["optimizer"]["state"][0]["momentum_buffer"] = torch.ones(7, 7)
    with pytest.raises(CheckpointError, match=r"does not fit: momentum_buffer has the shape \(7, 7\), its parameter"):
        make_state().load_dict(content, path)
    content["optimizer"]["param_groups"][0]["params"].pop()
    with pytest.raises(CheckpointError, match="its optimizer does not fit"):
        make_state().load_dict(content, path)


def test_class_names_are_compared_if_the_file_has_as_many():
    assert find_class_mismatch({"classes": ["a", "x"]}, ("a", "b")) == "'x' where the data has 'b'"
    for content in ({"classes": ["a", "b"]}, {"classes": ["a"]}, {"classes": 2}, {"classes": None}, {}):
        assert find_class_mismatch(content, ("a", "b")) is None


def test_an_optimizer_with_other_groups_is_refused_with_the_first_parameter_that_differs(tmp_path):
    """torch knows parameters by their number: groups of the same sizes would take each other's momentum."""

    def state_with(*words) -> TrainState:
        state = make_state()
        state.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        state.optimizer = build_optimizer(make_cfg(*words), state.model)
        return state

    path = CheckpointManager(tmp_path).save(state_with("FINETUNE.LR_MULT.1", 2.0))
    state_with("FINETUNE.LR_MULT.1", 3.0).load_dict(read_checkpoint(path), path)
    said = "groups of its optimizer differ, e.g. 2.weight instead of 1.weight: .*LR_MULT"
    with pytest.raises(CheckpointError, match=said):
        state_with("FINETUNE.LR_MULT.2", 2.0).load_dict(read_checkpoint(path), path)
    old = read_checkpoint(path)
    del old["optimizer_names"]  # as they were written before
    state_with("FINETUNE.LR_MULT.1", 2.0).load_dict(old, path)


def test_another_global_batch_keeps_the_images_seen(tmp_path):
    path = CheckpointManager(tmp_path).save(make_state(epoch=1, step=6))
    other = make_state()
    other.global_batch = 16
    other.load_dict(read_checkpoint(path), path)
    assert (other.epoch, other.step) == (1, 3)


def test_an_older_run_is_set_aside_whole(tmp_path):
    folder = CheckpointManager(tmp_path)
    assert folder.archive() is None
    for number in (1, 2):
        folder.save(make_state(epoch=1), new_bests=["raw"])
        assert folder.archive() == tmp_path / f"checkpoints.{number}"
        assert (tmp_path / f"checkpoints.{number}" / "best.pth.tar").exists()
        assert folder.list() == [] and not folder.bests["raw"].exists()


def test_the_best_is_the_best_of_all_epochs_those_before_a_resume_included():
    state = make_state()
    assert [state.finish_epoch({"raw": top1}) for top1 in (0.0, 20.0, 10.0, 30.0)] == [["raw"], ["raw"], [], ["raw"]]
    assert (state.bests["raw"], state.epoch, state.step) == (Best(30.0, 3), 4, 0)
    assert state.finish_epoch({"raw": 30.0, "ema": 29.0}) == ["ema"], "each kind of weights has a best of its own"
    assert state.finish_epoch({"ema": float("nan")}) == [], "no number beats none"
    state = make_state()
    assert [state.finish_epoch({"raw": map_}) for map_ in (float("nan"), 5.0, float("nan"))] == [["raw"], ["raw"], []]
    resumed = make_state(epoch=5, best=(33.5, -1))  # from a file that does not tell the best's epoch
    assert not resumed.finish_epoch({"raw": 33.0}) and resumed.bests["raw"].value == 33.5


class _Watched(dict):
    """A content whose life a weak reference observes."""


def make_content(living: list[weakref.ref]) -> _Watched:
    content = _Watched(state_dict={str(number): torch.zeros(1000) for number in range(40)})
    living.append(weakref.ref(content))
    return content


def count_living(references: list[weakref.ref]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


class _FullFile(io.FileIO):
    """A file on a disk that becomes full while it is written."""

    def write(self, data):
        """Write some data, then none."""
        if self.tell() > 20_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.mark.parametrize("failure", ["none", "abandoned", "full disk", "no folder", "a bug"])
def test_a_save_that_ends_early_frees_its_content(tmp_path, monkeypatch, failure):
    """An exception that is kept with torch's frames keeps the zip writer, which holds the sink: nothing frees it."""
    if failure == "full disk":
        monkeypatch.setattr("builtins.open", lambda path, *args, **options: _FullFile(path, "w"))
    folder = tmp_path / "missing" if failure == "no folder" else tmp_path
    living, raised = [], {"full disk": OSError, "no folder": FileNotFoundError, "a bug": AttributeError}
    for _ in range(5):
        calls, content = iter(range(10**6)), make_content(living)
        if failure == "a bug":
            content["state_dict"]["bug"] = lambda: 0
        is_abandoned = lambda calls=calls: failure == "abandoned" and next(calls) > 20  # noqa: E731
        if failure in raised:
            with pytest.raises((raised[failure], pickle.PicklingError)) as caught:
                write_atomically(folder / "a.pth.tar", content, is_abandoned)
            if failure == "full disk":
                assert caught.value.errno == errno.ENOSPC and caught.value.__context__ is None
            del caught
        else:
            assert write_atomically(folder / "a.pth.tar", content, is_abandoned) == (failure == "none")
        del content
    assert count_living(living) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.pth.tar"] * (failure == "none")


def test_a_failed_save_that_is_retried_keeps_one_content(tmp_path, monkeypatch):
    """Each retry fails in the middle; the thread and the error that it has kept hold no earlier attempt."""
    monkeypatch.setattr(background_writer, "RETRY_S", 0.001)
    open_file, num_tries, living = builtins.open, [], []

    def open_on_full_disk(path, *args, **options):
        num_tries.append(1)
        return _FullFile(path, "w") if str(path).endswith(".tmp") else open_file(path, *args, **options)

    monkeypatch.setattr("builtins.open", open_on_full_disk)
    writer = background_writer.BackgroundWriter()
    for number in range(4):
        content = make_content(living)
        writer.start(lambda content=content: write_atomically(tmp_path / "a.pth.tar", content), f"save {number}")
        del content
        while len(num_tries) < 5 * (number + 1):
            time.sleep(0.001)
        assert count_living(living) == 1, "the one that is being written"
    assert "No space left on device" in writer.join()
    assert count_living(living) == 0 and os.listdir(tmp_path) == []


def test_a_run_whose_evaluations_abandon_each_save_has_constant_memory(tmp_path, monkeypatch):
    """The save after the steps of an epoch is abandoned in its middle by the one after the evaluation."""
    living, write = [], checkpoint.write_atomically
    num_abandoned = []

    def write_until_abandoned(path, content, is_abandoned=lambda: False):
        living.append(weakref.ref(content["state_dict"]["0.weight"]))
        if "_step_" not in path.name:
            return write(path, content, is_abandoned)
        num_calls = iter(range(10**6))

        def is_abandoned_in_the_middle():
            while next(num_calls) > 5 and not is_abandoned():
                time.sleep(0.001)
            return is_abandoned()

        is_written = write(path, content, is_abandoned_in_the_middle)
        num_abandoned.append(not is_written)
        return is_written

    monkeypatch.setattr(checkpoint, "write_atomically", write_until_abandoned)
    folder, state = CheckpointManager(tmp_path), make_state()
    for epoch in range(8):
        state.step = 4
        folder.save_in_background(state)
        state.finish_epoch({"raw": 10.0 + epoch})
        folder.save_in_background(state, ["raw"])
    folder.finish()
    assert num_abandoned == [True] * 8
    assert count_living(living) <= 1


def test_copies_in_one_buffer_are_saved_with_the_same_bytes(tmp_path):
    tensors = {"format": torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last), "scalar": torch.tensor(3),
               "empty": torch.empty(0, 3, dtype=torch.float64), "bf16": torch.randn(7).bfloat16(),
               "bool": torch.rand(2, 3) > 0.5, "transposed": torch.randn(4, 6).t(),
               "expanded": torch.ones(3).expand(2, 3), "strided": torch.randn(10)[::2]}  # fmt: skip
    copies = dict(zip(tensors, map(with_own_storage, copy_into_buffer([*tensors.values()], False)), strict=True))
    expected = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    gc.collect()  # the storages keep the buffer
    for name, content in (("one", copies), ("each", expected)):
        write_atomically(tmp_path / name, content)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "each").read_bytes()
    write_atomically(tmp_path / "part", {"scalar": copies["scalar"]})
    assert torch.load(tmp_path / "part") == {"scalar": 3}
    assert (tmp_path / "part").stat().st_size < (tmp_path / "one").stat().st_size / 2, "without the other tensors"


def test_memory_that_cannot_be_pinned_is_replaced(monkeypatch):
    empty = torch.empty

    def allocate(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", allocate)
    assert copy_into_buffer([torch.arange(3)], pin_memory=True)[0].tolist() == [0, 1, 2]
