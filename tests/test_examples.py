"""The examples in docs/examples: each resumes bitwise, runs on two processes, is evaluated, and records its values."""

import ast
import functools
import json
import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest
import torch
from support.processes import on_processes
from support.runs import ROOT, assert_close, newest, records
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from distribuuuu import trainer
from distribuuuu.commands.main import dispatch
from distribuuuu.config import load_cfg
from distribuuuu.data.datasets import shapes
from distribuuuu.data.datasets.shapes import draw_shapes

EXAMPLES = ROOT / "docs" / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.yaml") if path.stem != "soup")  # a script of its own
MAX_LINES = 90
NUM_IMAGES, NUM_STEPS = 320, 16
# The quantities that an example records: in training, and in the evaluation.
QUANTITIES = {
    "dino": ({"entropy"}, set()), "distillation_token": ({"token_loss"}, set()),
    "fixmatch": ({"used", "unlabelled_loss"}, set()), "layer_norms": ({"stem_norm", "fc_norm"}, {"stem_norm"}),
    "test_time_adaptation": (set(), {"entropy"}), "two_heads": ({"group_right"}, {"group_right"}),
}  # fmt: skip
# Options that make the runs small and, with group norm, independent of the division into processes.
SMALL = {
    "OPTIM.MAX_EPOCH": 2, "OPTIM.WARMUP_EPOCHS": 0, "OPTIM.BASE_LR": 0.001, "TRAIN.WORKERS": 0, "TRAIN.PRINT_FREQ": 5,
    "TRAIN.BATCH_SIZE": 40, "TRAIN.GLOBAL_BATCH_SIZE": 40, "CHECKPOINT.EVERY_STEPS": 3,
}  # fmt: skip


def write_parquet(folder: Path) -> None:
    """Write the shapes into train.parquet and val.parquet."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    root = draw_shapes(folder / "shapes", NUM_IMAGES, 100)
    for split in ("train", "val"):
        images = sorted((root / split).rglob("*.jpg"))
        columns = {"image": [image.read_bytes() for image in images], "label": [image.parent.name for image in images]}
        parquet.write_table(pyarrow.table(columns), folder / f"{split}.parquet", row_group_size=20)


def words_of(name: str, root: Path, out_dir: Path) -> list[str]:
    """Return the overrides of a small run of an example."""
    small = [str(word) for pair in SMALL.items() for word in pair]
    words = [*small, "DATA.CACHE_DIR", str(root / "cache"), "OUT_DIR", str(out_dir)]
    cfg = load_cfg(str(EXAMPLES / f"{name}.yaml"))
    if cfg.DATA.NAME == "parquet_rows":
        write_parquet(root)
        words += ["TRAIN.DATASET", str(root), "TEST.DATASET", str(root)]
    words += ["MODEL.KWARGS.norm", "group"] if cfg.MODEL.ARCH.startswith("resnet") else []
    return words + (["DISTILL.WEIGHTS", str(root / "teacher.pth.tar")] if cfg.DISTILL.TEACHER else [])


def run(name: str, words: list[str], kill_after: int | None = None) -> None:
    """Train an example; kill this process in a step."""
    train_step, steps = trainer.train_step, iter(range(10**6))

    def count_and_train(*args):
        if next(steps) == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(*args)

    shapes.draw_shapes = functools.partial(draw_shapes, num_train=NUM_IMAGES, num_val=100)
    trainer.train_step = count_and_train
    trainer.train_model(load_cfg(str(EXAMPLES / f"{name}.yaml"), words))


def run_test(out_dir: Path, name: str) -> None:
    """Evaluate a run by the command."""
    shapes.draw_shapes = functools.partial(draw_shapes, num_train=NUM_IMAGES, num_val=100)
    words = ["PLUGINS", str([str(EXAMPLES / f"{name}.py")])]
    assert dispatch("distribuuuu", ["test", str(out_dir), *words]) == 0


def run_killed(name: str, words: list[str], kill_after: int) -> None:
    """Train an example in a process that is killed in a step."""
    process = multiprocessing.get_context("fork").Process(target=run, args=(name, words, kill_after))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder with the data and a teacher."""
    root = tmp_path_factory.mktemp("examples")
    from distribuuuu.models import build_model

    torch.save(build_model(load_cfg(None, ["MODEL.ARCH", "resnet14", "MODEL.NUM_CLASSES", "10"])).state_dict(),
               root / "teacher.pth.tar")  # fmt: skip
    return root


def assert_equal(one: dict, other: dict) -> None:
    """Compare the tensors of two checkpoints bit by bit: weights, averages, optimizer and state of the task."""
    for key in ("state_dict", "ema_state_dict", "optimizer", "task"):
        found = [torch.utils._pytree.tree_leaves(content.get(key)) for content in (one, other)]
        assert len(found[0]) == len(found[1])
        for mine, theirs in zip(*found, strict=True):
            assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs, key


def check_quantities(name: str, out_dir: Path) -> None:
    """Find the quantities of an example in metrics.jsonl, in the table on the terminal and in TensorBoard."""
    rows, written = records(out_dir), EventAccumulator(str(out_dir / "tensorboard"))
    written.Reload()
    log, tags = (out_dir / "train.log").read_text(), " ".join(written.Tags()["scalars"])
    for kind, names in zip(("train", "eval"), QUANTITIES.get(name, ((), ())), strict=True):
        for row in rows:
            assert row["kind"] != kind or row.keys() >= {*names, "loss"}
        assert all(f" {quantity} " in log and f"{kind}/{quantity}" in tags for quantity in (*names, "loss"))


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_has_a_config(name):
    source = (EXAMPLES / f"{name}.py").read_text()
    assert len(source.splitlines()) <= MAX_LINES
    assert "arXiv" in ast.get_docstring(ast.parse(source)) or name in ("layer_norms", "parquet_set")
    assert f"./{name}.py" in (EXAMPLES / f"{name}.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_resumes_bitwise_and_runs_on_two_processes(name, root, tmp_path):
    whole, killed, two = (words_of(name, root, tmp_path / part) for part in ("whole", "killed", "two"))
    on_processes(1, run, name, whole)
    expected = newest(tmp_path / "whole")
    check_quantities(name, tmp_path / "whole")
    for seed in range(3):  # a start takes at most a third of the steps
        run_killed(name, killed, random.Random(f"{name} {seed}").randrange(1, NUM_STEPS // 3))
    on_processes(1, run, name, killed)
    assert_equal(newest(tmp_path / "killed"), expected)
    on_processes(2, run, name, [*two, "TRAIN.BATCH_SIZE", "20"])
    assert_close(newest(tmp_path / "two"), expected, 1e-3)
    on_processes(1, run_test, tmp_path / "whole", name)
    result = json.loads((tmp_path / "whole" / "test_results.json").read_text())
    assert result["evaluation"]["count"] == 100
