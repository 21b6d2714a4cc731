"""docs/examples: each resumes bitwise, on two processes, and is evaluated; those of docs/extending.md are run."""

import ast
import functools
import json
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from support.processes import on_processes
from support.runs import ROOT, problems_of, records, run_python
from support.tables import slow

import distribuuuu
from distribuuuu.commands.main import dispatch
from distribuuuu.config import load_cfg, registry
from distribuuuu.config.config_node import changed
from distribuuuu.data.datasets import shapes
from distribuuuu.data.datasets.shapes import draw_shapes
from distribuuuu.inference.load_run import load_run
from distribuuuu.models import build_model
from distribuuuu.testing import assert_equal, assert_resumes, assert_same_on_processes, newest
from distribuuuu.trainer import train_model

EXAMPLES = ROOT / "docs" / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.yaml") if path.stem != "soup")  # a script, not a plug-in
MAX_LINES = 90
NUM_IMAGES, NUM_STEPS, NUM_EVALUATED = 160, 8, 40
SMALL_SHAPES = functools.partial(draw_shapes, num_train=NUM_IMAGES, num_val=NUM_EVALUATED)
# The quantities that an example records: in training, and in the evaluation.
QUANTITIES = {
    "dino": ({"entropy"}, set()), "distillation_token": ({"token_loss"}, set()),
    "fixmatch": ({"used", "unlabeled_loss"}, set()), "layer_norms": ({"stem_norm", "fc_norm"}, {"stem_norm"}),
    "test_time_adaptation": (set(), {"entropy"}), "update_norms": ({"update_norm", "largest_update"}, set()),
    "two_heads": ({"group_right"}, {"group_right"}),
}  # fmt: skip
# Options that let a small run do what an example is about: switch the loss, use pseudo-labels.
OPTIONS = {"ldam_drw": ["LOSS.KWARGS.from_epoch", "1"], "fixmatch": ["TASK.KWARGS", "{threshold: 0.2, ratio: 1}"],
           "swa": ["TASK.KWARGS.from_epoch", "1", "CHECKPOINT.KEEP_EVERY", "1"]}  # fmt: skip
# Options that make the runs small and, with group norm, independent of the division into processes.
SMALL = {
    "OPTIM.MAX_EPOCH": 2, "OPTIM.WARMUP_EPOCHS": 0, "OPTIM.BASE_LR": 0.001, "TRAIN.WORKERS": 0, "TRAIN.PRINT_FREQ": 5,
    "TRAIN.BATCH_SIZE": 40, "TRAIN.GLOBAL_BATCH_SIZE": 40, "CHECKPOINT.EVERY_STEPS": 3,
}  # fmt: skip


def write_parquet(folder: Path) -> None:
    """Write the shapes into train.parquet and val.parquet."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    root = draw_shapes(folder / "shapes", NUM_IMAGES, NUM_EVALUATED)
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
    if cfg.MODEL.ARCH.startswith("resnet"):
        words += ["MODEL.KWARGS", "{norm: group, width: 8}", "TRAIN.IM_SIZE", "16"]
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
    torch.save(build_model(load_cfg(None, ["MODEL.ARCH", "resnet14", "MODEL.NUM_CLASSES", "10"])).state_dict(),
               root / "teacher.pth.tar")  # fmt: skip
    return root


def check_quantities(name: str, out_dir: Path) -> None:
    """Find the quantities of an example in metrics.jsonl, in the table on the terminal and in TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows, written = records(out_dir), EventAccumulator(str(out_dir / "tensorboard"))
    written.Reload()
    log, tags = (out_dir / "train.log").read_text(), " ".join(written.Tags()["scalars"])
    for kind, names in zip(("train", "eval"), QUANTITIES.get(name, ((), ())), strict=True):
        for row in rows:
            assert row["kind"] != kind or row.keys() >= {*names, "loss"}
        assert all(f" {quantity} " in log and f"{kind}/{quantity}" in tags for quantity in (*names, "loss"))


@pytest.mark.project
@pytest.mark.parametrize("name", [*NAMES, "soup"])
def test_an_example_is_short_and_has_a_config(name):
    source = (EXAMPLES / f"{name}.py").read_text()
    assert len(source.splitlines()) <= MAX_LINES
    assert ast.get_docstring(ast.parse(source))
    assert f"({name}.py)" in (EXAMPLES / "README.md").read_text()
    assert f"./{name}.py" in (EXAMPLES / f"{name}.yaml").read_text() or name == "soup"


@pytest.mark.parametrize(("name", "words", "message"), [
    ("dino", "EMA.HALF_LIFE 0", "EMA.HALF_LIFE: got 0; dino expects an average, its teacher; fix: "),
    slow("parquet_set", "DATA.KWARGS.image picture", "train.parquet has no column picture; expected one of image"),
])  # fmt: skip
def test_a_wrong_option_of_an_example_is_one_message(name, words, message, root, tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "draw_shapes", draw_shapes)
    (problem,) = problems_of(run, name, [*words_of(name, root, tmp_path / "out"), *words.split()])
    assert message in problem


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_resumes_bitwise_and_runs_on_two_processes(name, root, tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "draw_shapes", SMALL_SHAPES)
    cfg = load_cfg(str(EXAMPLES / f"{name}.yaml"), words_of(name, root, tmp_path))
    assert_resumes(cfg, [3, 2], by=signal.SIGTERM if name == "sam" else signal.SIGKILL)
    check_quantities(name, tmp_path / "whole")
    rows = [row for row in records(tmp_path / "whole") if row["kind"] == "train"]
    if name == "ldam_drw":
        assert [row["stage"] for row in rows[:: len(rows) - 1]] == ["no class weights", "class weights"]
    if name == "fixmatch":
        assert any(0 < row["used"] < 1 and row["unlabeled_loss"] > 0 for row in rows)
    if name == "layer_norms":
        assert all(row["trust fc.weight"] > 0 for row in records(tmp_path / "whole") if row["kind"] == "eval")
    if name == "data_pruning":
        assert [row["step"] for row in rows if row["epoch"] == 2][-1] == NUM_STEPS // 4
    assert_same_on_processes(cfg, 2)
    if name in ("lora", "swa"):
        from distribuuuu.commands.export.exporter import export_run

        loaded = load_run(tmp_path / "whole", device="cpu")
        assert [*loaded.model.state_dict()] == [*build_model(loaded.cfg).state_dict()]
        assert export_run(loaded, "safetensors", tmp_path / "exported")["verified"]
        globals()[f"check_{name}"](cfg, tmp_path / "whole", loaded)
    on_processes(1, run_test, tmp_path / "whole", name)
    result = json.loads((tmp_path / "whole" / "test_results.json").read_text())
    assert result["evaluation"]["count"] == NUM_EVALUATED


def check_swa(cfg, out_dir: Path, loaded) -> None:
    """The average of a task is a kind of weights in files, records, evaluations and predictions."""
    assert loaded.weights == "swa" and loaded.source == str(out_dir / "best_swa.pth.tar")
    assert "best_swa.pth.tar (swa weights)" in loaded.describe()
    assert [row["kind"] for row in records(out_dir) if row["kind"] != "train"] == ["eval", "eval_swa"] * 2
    results = json.loads((out_dir / "results.json").read_text())
    assert results["accuracy"].keys() == results["weights_sha256"].keys() == {"raw", "swa"}
    last, content = newest(out_dir), newest(out_dir.parent / "stopped")
    assert torch.equal(last["swa_state_dict"]["fc.weight"], content["swa_state_dict"]["fc.weight"])
    first = torch.load(out_dir / "checkpoints" / "ckpt_ep_001.pth.tar")
    mean = (first["state_dict"]["fc.weight"] + last["state_dict"]["fc.weight"]) / 2
    assert torch.allclose(last["swa_state_dict"]["fc.weight"], mean, atol=1e-6)
    one, two = (newest(out_dir.parent / processes)["swa_state_dict"] for processes in "12")
    torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-3)


def check_lora(cfg, out_dir: Path, loaded) -> None:
    """Checkpoints lack the frozen tensors, which a start must bring again; best weights are whole."""
    content = newest(out_dir)
    name = content["unsaved"]["names"][0]
    assert name.endswith(".conv.weight") and name not in content["state_dict"]
    assert name in torch.load(out_dir / "best.pth.tar")["state_dict"]
    checkpoint = sorted((out_dir / "checkpoints").iterdir())[-1]
    (problem,) = problems_of(load_run, checkpoint)
    assert "leaves out tensors that only a resume adds; fix: name the run's best.pth.tar" in problem
    (problem,) = problems_of(train_model, changed(cfg, {"OUT_DIR": str(out_dir), "OPTIM.MAX_EPOCH": 3, "RNG_SEED": 5}))
    assert f"leaves out tensors, e.g. {name}, that are others in this start; fix: restore the task" in problem
    other = changed(cfg, {"TASK.NAME": "auto", "TASK.KWARGS": {}, "OUT_DIR": str(out_dir)})
    (problem,) = problems_of(train_model, other)
    assert "leaves out tensors, e.g. " in problem
    (problem,) = problems_of(train_model, changed(cfg, {"MODEL.WEIGHTS": "x", "OUT_DIR": str(out_dir / "new")}))
    assert problem.startswith("MODEL.WEIGHTS: got x, which no resume loads") and "fix: name it as FINETUNE" in problem


@pytest.mark.parametrize("difference, kind", [(1e-7, "looks like rounding"), (0.1, "is more than rounding")])
def test_a_tensor_that_differs_is_named_with_the_size_of_its_difference(difference, kind):
    pair = [{"state_dict": {"fc": torch.ones(3, dtype=torch.float64) + more}} for more in (difference, 0)]
    said = rf"(?s)state_dict after a resume: .*Mismatched elements: 3 / 3.*the largest value, which {kind}"
    with pytest.raises(AssertionError, match=said):
        assert_equal(*pair)


@pytest.mark.slow
def test_soups_are_evaluated_and_saved(shapes_folder, tmp_path, capsys):
    def train(name: str, weights: Path | str, seed: int) -> Path:
        words = {**SMALL, "DATA.NAME": "imagefolder", "TRAIN.DATASET": shapes_folder, "TEST.DATASET": shapes_folder,
                 "RNG_SEED": seed, "FINETUNE.WEIGHTS": weights, "OUT_DIR": tmp_path / name}  # fmt: skip
        train_model(load_cfg(str(EXAMPLES / "soup.yaml"), [str(word) for pair in words.items() for word in pair]))
        return tmp_path / name

    assert dispatch("distribuuuu", ["sauce", "PLUGINS", str(EXAMPLES / "soup.py")]) == 2
    assert re.search("no such command: sauce; expected one of train, .*, soup", capsys.readouterr().err)
    base = train("base", "", 1)
    members = [train(f"seed_{seed}", base, seed) for seed in range(3)]
    soup = ["-m", "distribuuuu", "soup", "PLUGINS", EXAMPLES / "soup.py"]
    script = [*soup, *members, "--recalibrate", "80", "--out", tmp_path / "out"]
    done = run_python("-m", "torch.distributed.run", "--nproc_per_node=2", *script)
    assert done.returncode == 0, done.stderr
    shown = dict(re.findall(r"(\w+) soup of .+: top1 ([\d.]+);", done.stdout))
    assert shown.keys() == {"uniform", "greedy"}
    for kind, value in shown.items():
        test = distribuuuu.evaluate(members[0], {"MODEL.WEIGHTS": tmp_path / "out" / f"{kind}.pth.tar"})
        assert f"{test['top1']:.2f}" == value
    uniform = torch.load(tmp_path / "out" / "uniform.pth.tar")["fc.weight"]
    states = [torch.load(member / "best.pth.tar")["state_dict"]["fc.weight"] for member in members]
    assert torch.equal(uniform, torch.stack(states).mean(0))


PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+)\n((?:.|\n)*?)(?=^## |\Z)", PAGE, re.MULTILINE))
ROWS = re.findall(r"^\| .+ \| (\d+) \| (\d+) \| \[example\]\(#(.+)\) \|$", PAGE, re.MULTILINE)
LIMITS = {anchor: (int(files), int(lines)) for files, lines, anchor in ROWS}
# The sections with an example; the others describe interfaces.
TITLES = {title.lower().replace(" ", "-"): title for title in SECTIONS if title.lower().replace(" ", "-") in LIMITS}
SIMCLR = "A self-supervised task"
# The examples of one run; those of the second one exclude some of the first.
SECOND = ["A model", "A loss"]
TOGETHER = [[title for title in TITLES.values() if title not in (*SECOND, SIMCLR)], SECOND]


def files_of(title: str) -> dict[str, str]:
    """Return the files of a section by path; a difference is by the path of the file that it changes."""
    return dict(re.findall(r"^```(?:python|yaml|diff)\n# (\S+)\n(.*?)^```", SECTIONS[title], re.MULTILINE | re.DOTALL))


def words_of_commands(title: str) -> list[list[str]]:
    """Return the arguments of the commands of a section, after the script."""
    blocks = re.findall(r"^```bash\n(.*?)^```", SECTIONS[title], re.MULTILINE | re.DOTALL)
    return [shlex.split(block.replace("\\\n", " "))[2:] for block in blocks]


def write_example(project: Path, title: str) -> None:
    """Write the files of a section; the added lines of a difference follow the lines before them, which occur once."""
    for path, text in files_of(title).items():
        if (file := project / path).exists():
            lines = text.splitlines(keepends=True)
            context = "".join(line for line in lines if not line.startswith("+"))
            assert file.read_text().count(context) == 1
            text = file.read_text().replace(context, context + "".join(line[1:] for line in lines if line[0] == "+"))
        file.write_text(text)


@pytest.mark.project
def test_an_example_costs_no_more_files_and_lines_than_the_table_says():
    assert TITLES.keys() == LIMITS.keys() and len(LIMITS) >= 9
    for anchor, (most_files, most_lines) in LIMITS.items():
        files, num = files_of(TITLES[anchor]), 0
        for path, text in files.items():
            num += sum(line.startswith("+" * path.endswith("trainer.py")) for line in text.splitlines() if line.strip())
        assert 1 <= len(files) <= most_files and num <= most_lines, anchor


@pytest.mark.slow
@pytest.mark.parametrize("titles", TOGETHER, ids=["most", "a model and a loss"])
def test_the_examples_of_the_page_train(tmp_path, titles):
    for name in ("distribuuuu", "tools", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    options: dict[str, str] = {}
    for title in titles:
        write_example(tmp_path, title)
        (words,) = words_of_commands(title)
        assert all(options.get(key, value) == value for key, value in zip(words[::2], words[1::2], strict=True)
                   if key != "OUT_DIR"), f"{title} excludes another example"  # fmt: skip
        options |= dict(zip(words[::2], words[1::2], strict=True))
    options |= {"OPTIM.MAX_EPOCH": "1", "OPTIM.WARMUP_EPOCHS": "0", "TRAIN.WORKERS": "0", "OUT_DIR": "exp"}
    words = [word for pair in options.items() for word in pair]
    done = run_python("tools/train_net.py", *words, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    first, *_, last = records(tmp_path / "exp")
    assert last["kind"] == "eval"
    if "A metric" in titles:
        assert "confidence" in first and {"worst_class", "confidence", "fc_norm"} <= last.keys()
        results = (tmp_path / "exp" / "results.json").read_text()
        assert all(name in done.stderr and name in results for name in ("worst_class", "confidence"))
        assert "step 0: gradient norm" in done.stderr


@pytest.mark.slow
def test_simclr_trains_is_the_same_on_two_processes_and_its_features_can_be_probed(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "draw_shapes", functools.partial(draw_shapes, num_train=320, num_val=40))
    monkeypatch.chdir(tmp_path)
    write_example(tmp_path, SIMCLR)
    # In float32, 16 steps make 1e-3 of the rounding of the first one; in float64 the difference stays below 1e-12.
    source = (tmp_path / "simclr.py").read_text().replace("features.float()", "features")
    double = "model.register_forward_pre_hook(lambda _, inputs: inputs[0].double())\n        return model.double()"
    (tmp_path / "simclr.py").write_text(source.replace("return model\n", f"{double}\n"))
    (_, config), probe = words_of_commands(SIMCLR)
    words = [*words_of("sam", tmp_path, tmp_path / "out"), "OPTIM.BASE_LR", "0.01", "TRAIN.PRINT_FREQ", "1"]
    assert_same_on_processes(load_cfg(config, words), 2, tolerance=1e-12)
    losses = [row["loss"] for row in records(tmp_path / "out" / "1") if row["kind"] == "train"]
    assert sum(losses[-4:]) < sum(losses[:4])
    options = dict(zip(probe[2::2], probe[3::2], strict=True))
    options |= {"FINETUNE.WEIGHTS": tmp_path / "out" / "1" / "best.pth.tar", "OUT_DIR": tmp_path / "probe"}
    own = [str(word) for pair in options.items() for word in pair]
    on_processes(1, train_model, load_cfg(str(ROOT / probe[1]), [*words_of("sam", tmp_path, ""), *own]))
    assert records(tmp_path / "probe")[-1]["kind"] == "eval"
