"""Files that a run reads back: damaged ones are refused, repaired or passed over, never a traceback."""

import collections
import errno
import io
import itertools
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.hostile import Payload
from support.runs import newest, records
from support.states import load, make_state, original_checkpoint, save
from support.tables import slow

from distribuuuu.checkpoint.io import CheckpointError, load_optimizer, read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager, checkpoint_name
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.engine.build import write_config
from distribuuuu.models import build_model
from distribuuuu.optim.optimizer import build_optimizer
from distribuuuu.records.metric_writers import drop_records_after
from distribuuuu.records.read_results import read_results
from distribuuuu.trainer import train_model

Damage = Callable[[Path], object]


def change_bytes(change: Callable[[bytearray], bytes]) -> Damage:
    return lambda path: path.write_bytes(change(bytearray(path.read_bytes())))


def flip_a_bit(content: bytearray) -> bytes:
    """Change a bit of the largest tensor."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        place = max(archive.infolist(), key=lambda entry: entry.file_size).header_offset + 200
    content[place] ^= 1
    return content


def replace_by(write: Damage) -> Damage:
    return lambda path: (path.unlink(), write(path))


DAMAGES: dict[str, Damage] = {
    "cut in half": change_bytes(lambda content: content[: len(content) // 2]),
    "bit of a tensor": change_bytes(flip_a_bit),
    "pipe": replace_by(os.mkfifo),
    "weights only": replace_by(lambda path: torch.save(make_state().model.state_dict(), path)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_newest_checkpoint_is_skipped_for_the_one_before(tmp_path, damage, caplog):
    folder = CheckpointManager(tmp_path)
    good, bad = save(folder, make_state(epoch=1)), save(folder, make_state(epoch=2))
    damage(bad)
    with pytest.raises(CheckpointError, match=re.escape(f"{bad}: ")):
        load(make_state(), bad)
    with caplog.at_level("WARNING"):
        assert folder.find_latest() == good
    assert f"{bad}: " in caplog.text and Path(f"{bad}.broken").exists() and not bad.exists()
    good.write_bytes(b"x")
    for _ in range(2):  # a run does not start anew, not even the next time
        with pytest.raises(CheckpointError, match="none of the 1 checkpoints .* is valid"):
            folder.find_latest()


@pytest.mark.parametrize(("key", "value"), [
    ("epoch", "7"), ("optimizer", {"state": {0: 3}, "param_groups": []}), ("meter", 4), ("task", {"shared": 3}),
])  # fmt: skip
def test_a_checkpoint_with_values_of_wrong_types_is_refused_with_its_name(tmp_path, key, value):
    path = save(CheckpointManager(tmp_path), make_state(epoch=1))
    torch.save({**read_checkpoint(path), key: value}, path)
    with pytest.raises(CheckpointError, match=re.escape(f"{path}: ")):
        load(make_state(), path)


class Rebuilt:
    """Is pickled as a call of torch's function that makes a tensor of a storage."""

    def __init__(self, size: tuple[int, ...], stride: tuple[int, ...]):
        self.size, self.stride = size, stride

    def __reduce__(self):
        words = {"wrap_storage": torch.ones(4).untyped_storage(), "dtype": torch.float, "_internal": True}
        storage = torch.storage.TypedStorage(**words)
        return torch._utils._rebuild_tensor_v2, (storage, 0, self.size, self.stride, False, collections.OrderedDict())


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize(("size", "stride"), [((1 << 34,), (1,)), ((1 << 40,), (0,)), ((-4,), (1,))])
def test_a_tensor_that_claims_more_than_its_file_has_is_refused(tmp_path, size, stride, is_zip):
    path = tmp_path / "huge.pth"
    torch.save({"state_dict": {"w": Rebuilt(size, stride)}}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match="huge.pth: (not a valid checkpoint|cannot be read)"):
        read_checkpoint(path)


def write_compressed(path: Path) -> None:
    torch.save({"state_dict": {"w": torch.zeros(1000)}}, path)
    with zipfile.ZipFile(path) as source:
        entries = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name, data in entries.items():
            target.writestr(name, data)


CIRCLE: list = []
CIRCLE.append(CIRCLE)


def write_with(value: Any) -> Damage:
    return lambda path: torch.save({"state_dict": {"w": torch.ones(1)}, "x": value}, path)


@pytest.mark.parametrize(("write", "words"), [
    (write_compressed, ".*data.pkl is compressed"),
    (write_with(CIRCLE), ".*more than 1000000 values"),
    (write_with(np.datetime64("2021-01-01")), ".*objects other than plain data; fix: .*torch.save"),
    (write_with(Payload(Path("executed"))), ""),  # in the current folder
    *((lambda path, content=content: torch.save(content, path), "holds no state dict")
      for content in ({"hello": 3}, torch.ones(3))),
])  # fmt: skip
def test_content_that_is_no_checkpoint_is_refused(tmp_path, monkeypatch, write, words):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "bad.pth")
    with pytest.raises(CheckpointError, match=f"bad.pth: {words}"):
        read_checkpoint(tmp_path / "bad.pth")
    assert not (tmp_path / "executed").exists()


def test_checkpoints_of_other_runs_stay_and_a_restart_knows_its_own(tmp_path):
    old = [tmp_path / "checkpoints" / checkpoint_name(epoch, 0) for epoch in range(1, 6)]
    old[0].parent.mkdir()
    for path in old:
        original_checkpoint(path, make_state())
    for start in (6, 8):  # two starts of one run
        folder = CheckpointManager(tmp_path, keep_last=2)
        assert folder.find_latest() == folder.list()[-1]
        for epoch in (start, start + 1):
            save(folder, make_state(epoch=epoch))
    assert folder.list() == [*old, *(folder.folder / checkpoint_name(epoch, 0) for epoch in (8, 9))]
    assert read_checkpoint(folder.list()[-1])["checkpoints"] == [checkpoint_name(epoch, 0) for epoch in (7, 8, 9)]


def test_a_run_of_2021_goes_on_and_its_best_stays_until_it_is_beaten(small_cfg):
    cfg = small_cfg("OPTIM.MAX_EPOCH", 1)
    train_model(cfg)
    out_dir, content = Path(cfg.OUT_DIR), newest(cfg.OUT_DIR)
    for path in [*out_dir.rglob("*.pth.tar"), out_dir / "results.json"]:
        path.unlink()
    old = {key: content[key] for key in ("epoch", "state_dict", "optimizer")}
    torch.save({**old, "best_acc1": 100.0}, out_dir / "checkpoints" / checkpoint_name(1, 0))
    torch.save(content["state_dict"], out_dir / "best.pth.tar")
    best = (out_dir / "best.pth.tar").read_bytes()
    assert train_model(small_cfg("OPTIM.MAX_EPOCH", 3)) == 100.0
    accuracy = read_results(out_dir / "results.json")["accuracy"]["raw"]
    assert accuracy["best"] == {"epoch": None, "top1": 100.0, "topk": None, "loss": None}
    assert accuracy["last"]["epoch"] == 3 and (out_dir / "best.pth.tar").read_bytes() == best
    assert "best top1: 100.00 (epoch unknown); weights: " in (out_dir / "train.log").read_text()
    assert records(out_dir)[-1]["best_top1"] == 100.0
    assert (newest(out_dir)["best_acc1"], newest(out_dir)["best_epoch"]) == (100.0, -1)
    assert (out_dir / "checkpoints" / checkpoint_name(1, 0)).exists()


def test_loaded_momentum_has_the_strides_of_its_parameter(small_cfg):
    """Of a checkpoint with the other memory format; fused kernels require it."""
    contents, optimizers = [], []
    for memory_format in (torch.channels_last, torch.contiguous_format):
        torch.manual_seed(0)
        model = build_model(small_cfg()).to(memory_format=memory_format)
        optimizers.append(optimizer := build_optimizer(small_cfg(), model))
        model(torch.randn(4, 3, 16, 16).to(memory_format=memory_format)).sum().backward()
        optimizer.step()
        contents.append(optimizer.state_dict())
    load_optimizer(optimizers[1], contents[0], "a file")
    for index, (parameter, entry) in enumerate(optimizers[1].state.items()):
        assert entry["momentum_buffer"].stride() == parameter.stride()
        assert torch.equal(entry["momentum_buffer"], contents[0]["state"][index]["momentum_buffer"])


@pytest.mark.parametrize("module, name, number", [
    ("checkpoints", "fuzz", 60), slow("readback", "fuzz", 60), slow("readback", "fuzz_archives", 40),
    slow("readback", "fuzz_exports", 30),
])  # fmt: skip
def test_random_damage_is_refused_or_repaired_or_changes_nothing(tmp_path, module, name, number):
    fuzzer = pytest.importorskip(f"fuzz_{module}")  # one reads the files of all commands, which may be deleted
    counts, violations = getattr(fuzzer, name)(tmp_path, number=number, seed=5)
    assert not violations, "\n".join(violations)
    assert sum(sum(verdicts.values()) for verdicts in counts.values()) == number
    assert name == "fuzz" or all(verdicts["refused"] for verdicts in counts.values())


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_full_disk_leaves_the_old_records_and_the_old_config(call, tmp_path, monkeypatch, small_cfg):
    path = tmp_path / "metrics.jsonl"
    path.write_text("broken\n")
    config = tmp_path / "config.yaml"
    config.write_text("old")
    cfg = small_cfg("OUT_DIR", tmp_path)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, refuse)
    drop_records_after(path, 1, 0)
    with pytest.raises(OSError, match="No space left"):
        write_config(cfg)
    assert path.read_text() == "broken\n" and config.read_text() == "old" and len(os.listdir(tmp_path)) == 2


PAIRS = list(itertools.pairwise("abcdefghijklmnopqrstu"))
LAUGHS = "a: &a [x, x]\n" + "".join(f"{new}: &{new} [*{old}, *{old}]\n" for old, new in PAIRS)
MERGES = "a: &a {x: 1}\n" + "".join(f"{new}: &{new}\n  <<: [*{old}, *{old}]\n" for old, new in PAIRS)
DEEP = "nested deeper than 50 levels"


@pytest.mark.parametrize("text, said", [
    (LAUGHS, "more than 5000 values"), (MERGES, "more than 5000 values"), ("MODEL:\n  ARCH: " + "[" * 900, DEEP),
    ("- " * 5000, DEEP), ("MODEL: &m\n  KWARGS:\n    x: *m\n", f"{DEEP}, or an alias refers to its own parent"),
    ("#" * (1 << 18), "more than 131072 characters"), ("[" + "1," * 6000 + "]", "more than 5000 values"),
], ids=["aliases", "merges", "deep", "deep blocks", "circle", "huge", "many"])  # fmt: skip
def test_yaml_without_bounds_is_refused_in_a_file(tmp_path, text, said):
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"--cfg {path}: not a valid YAML config: .*{said}"):
        load_cfg(str(path))
