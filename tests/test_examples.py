"""The examples in docs/examples: each resumes bitwise, runs on two processes, is evaluated, and records its values."""

import ast
import functools
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from support.processes import on_processes
from support.runs import ROOT, records
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from distribuuuu.commands.main import dispatch
from distribuuuu.config import ConfigError, load_cfg, registry
from distribuuuu.data.datasets import shapes
from distribuuuu.data.datasets.shapes import draw_shapes
from distribuuuu.testing import assert_resumes, assert_same_on_processes
from distribuuuu.trainer import train_model

EXAMPLES = ROOT / "docs" / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.yaml") if path.stem != "soup")  # a script, not a plug-in
MAX_LINES = 90
NUM_IMAGES, NUM_STEPS = 320, 16
SMALL_SHAPES = functools.partial(draw_shapes, num_train=NUM_IMAGES, num_val=100)
# The quantities that an example records: in training, and in the evaluation.
QUANTITIES = {
    "crop_position": ({"position_error"}, set()),
    "dino": ({"entropy"}, set()), "distillation_token": ({"token_loss"}, set()),
    "fixmatch": ({"used", "unlabeled_loss"}, set()), "layer_norms": ({"stem_norm", "fc_norm"}, {"stem_norm"}),
    "test_time_adaptation": (set(), {"entropy"}), "update_norms": ({"update_norm", "largest_update"}, set()),
    "two_heads": ({"group_right"}, {"group_right"}),
}  # fmt: skip
# Options that let a small run do what an example is about: switch the loss, use pseudo-labels.
OPTIONS = {"ldam_drw": ["LOSS.KWARGS.from_epoch", "1"], "fixmatch": ["TASK.KWARGS.threshold", "0.2"]}
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
    words += OPTIONS.get(name, [])
    return words + (["DISTILL.WEIGHTS", str(root / "teacher.pth.tar")] if cfg.DISTILL.TEACHER else [])


def run(name: str, words: list[str]) -> None:
    """Train an example."""
    shapes.draw_shapes = SMALL_SHAPES
    train_model(load_cfg(str(EXAMPLES / f"{name}.yaml"), words))


def run_test(out_dir: Path, name: str) -> None:
    """Evaluate a run by the command."""
    shapes.draw_shapes = SMALL_SHAPES
    plugins = load_cfg(str(EXAMPLES / f"{name}.yaml")).PLUGINS
    words = ["PLUGINS", str([os.path.abspath(plugin) for plugin in plugins])]
    assert dispatch("distribuuuu", ["test", str(out_dir), *words]) == 0


@pytest.fixture(scope="module", autouse=True)
def forget_plugins():
    """Remove the examples from this process after the tests: others list the entries of the package."""
    yield
    for table in (one for one in vars(registry).values() if isinstance(one, registry.Registry)):
        for name, entry in [*table._table.items()]:
            if entry.__module__.startswith("distribuuuu_plugin_"):
                del table._table[name]
    for name in [name for name in sys.modules if name.startswith("distribuuuu_plugin_")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder with the data and a teacher."""
    root = tmp_path_factory.mktemp("examples")
    from distribuuuu.models import build_model

    torch.save(build_model(load_cfg(None, ["MODEL.ARCH", "resnet14", "MODEL.NUM_CLASSES", "10"])).state_dict(),
               root / "teacher.pth.tar")  # fmt: skip
    return root


def check_quantities(name: str, out_dir: Path) -> None:
    """Find the quantities of an example in metrics.jsonl, in the table on the terminal and in TensorBoard."""
    rows, written = records(out_dir), EventAccumulator(str(out_dir / "tensorboard"))
    written.Reload()
    log, tags = (out_dir / "train.log").read_text(), " ".join(written.Tags()["scalars"])
    for kind, names in zip(("train", "eval"), QUANTITIES.get(name, ((), ())), strict=True):
        for row in rows:
            assert row["kind"] != kind or row.keys() >= {*names, "loss"}
        assert all(f" {quantity} " in log and f"{kind}/{quantity}" in tags for quantity in (*names, "loss"))


@pytest.mark.house
@pytest.mark.parametrize("name", [*NAMES, "soup"])
def test_an_example_is_short_and_has_a_config(name):
    source = (EXAMPLES / f"{name}.py").read_text()
    assert len(source.splitlines()) <= MAX_LINES
    assert ast.get_docstring(ast.parse(source))
    assert f"({name}.py)" in (EXAMPLES / "README.md").read_text()
    assert f"./{name}.py" in (EXAMPLES / f"{name}.yaml").read_text() or name == "soup"


def problem_of(name: str, root: Path, out_dir: Path, *words: str) -> str:
    """Return the message of the ConfigError that ends a small run of an example."""
    with pytest.raises(ConfigError) as caught:
        run(name, [*words_of(name, root, out_dir), *words])
    (problem,) = caught.value.problems
    return str(problem)


@pytest.mark.parametrize(("name", "words", "message"), [
    ("dino", "EMA.HALF_LIFE 0", "EMA.HALF_LIFE: got 0; dino expects an average, its teacher; fix: "),
    ("parquet_set", "DATA.KWARGS.image picture", "train.parquet has no column picture; expected one of image, label; "),
])  # fmt: skip
def test_a_wrong_option_of_an_example_is_one_message(name, words, message, root, tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "draw_shapes", draw_shapes)
    assert message in problem_of(name, root, tmp_path / "out", *words.split())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_resumes_bitwise_and_runs_on_two_processes(name, root, tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "draw_shapes", SMALL_SHAPES)
    cfg = load_cfg(str(EXAMPLES / f"{name}.yaml"), words_of(name, root, tmp_path))
    assert_resumes(cfg, [4, 3], by=signal.SIGTERM if name == "sam" else signal.SIGKILL)
    check_quantities(name, tmp_path / "whole")
    rows = [row for row in records(tmp_path / "whole") if row["kind"] == "train"]
    if name == "ldam_drw":
        assert [row["stage"] for row in rows[:: len(rows) - 1]] == ["no class weights", "class weights"]
    if name == "fixmatch":
        assert any(0 < row["used"] < 1 and row["unlabeled_loss"] > 0 for row in rows)
    if name == "data_pruning":
        assert [row["step"] for row in rows if row["epoch"] == 2][-1] == NUM_STEPS // 4
    assert_same_on_processes(cfg, 2)
    on_processes(1, run_test, tmp_path / "whole", name)
    result = json.loads((tmp_path / "whole" / "test_results.json").read_text())
    assert result["evaluation"]["count"] == 100
