"""docs/examples/layer_norms and soup: values in the records, resumption, two processes, and saved soups."""

import re
import subprocess
import sys

import pytest
import torch
from support.processes import on_processes
from support.runs import GROUP_NORM, ROOT, assert_same_run, records, timeless, train_and_kill

import distribuuuu
from distribuuuu.config import load_cfg
from distribuuuu.trainer import train_model

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "docs" / "examples"
SHORT = ("DATA.NAME", "imagefolder", "OPTIM.MAX_EPOCH", 2, "OPTIM.WARMUP_EPOCHS", 0, "TRAIN.WORKERS", 0,
         "LOG.TENSORBOARD", False, "RNG_SEED", 1, "TRAIN.BATCH_SIZE", 40, "TRAIN.PRINT_FREQ", 3,
         "CHECKPOINT.EVERY_STEPS", 1, "CHECKPOINT.KEEP_LAST", 99)  # fmt: skip


@pytest.fixture
def load(shapes_folder, tmp_path):
    """Return load(example, OUT_DIR in the folder of the test, more words): the config of a short run."""

    def make(name: str, out: str, *words):
        folders = ("TRAIN.DATASET", shapes_folder, "TEST.DATASET", shapes_folder, "OUT_DIR", tmp_path / out)
        return load_cfg(str(EXAMPLES / f"{name}.yaml"), [str(word) for word in (*SHORT, *folders, *words)])

    return make


def test_layer_norms_are_logged_and_resumed(load, tmp_path):
    on_processes(1, train_model, load("layer_norms", "whole"))
    for place in ((0, 2), (0, 5), (1, 4)):
        on_processes(1, train_and_kill, load("layer_norms", f"{place}"), place)
        on_processes(1, train_model, load("layer_norms", f"{place}"))
        assert_same_run(tmp_path / "whole", tmp_path / f"{place}")
        assert timeless(tmp_path / "whole") == timeless(tmp_path / f"{place}")
    on_processes(1, train_model, load("layer_norms", "plain", "TASK.NAME", "auto"))
    assert_same_run(tmp_path / "whole", tmp_path / "plain")
    names = {f"{stage}_norm" for stage in ("stem", "stage1", "stage2", "stage3", "fc")}
    rows = records(tmp_path / "whole")
    assert all(names <= row.keys() and row["fc_norm"] > 0 for row in rows)
    assert all(row["trust fc.weight"] > 0 for row in rows if row["kind"] == "eval")
    assert " stage1_norm " in (tmp_path / "whole" / "train.log").read_text()


def test_layer_norms_do_not_depend_on_the_processes(load, tmp_path):
    same = (*GROUP_NORM, "TRAIN.GLOBAL_BATCH_SIZE", 40, "OPTIM.BASE_LR", 0.01)
    for num in (1, 2):
        on_processes(num, train_model, load("layer_norms", f"{num}", *same, "TRAIN.BATCH_SIZE", 40 // num))
    for one, two in zip(timeless(tmp_path / "1"), timeless(tmp_path / "2"), strict=True):
        logged = [name for name in one if name.endswith("_norm") or name.startswith("trust ")]
        assert [one[name] for name in logged] == pytest.approx([two[name] for name in logged], rel=1e-2)
        assert len(logged) >= 5 and one.keys() == two.keys()


def test_soups_are_evaluated_and_saved(load, tmp_path):
    train_model(load("soup", "base", "FINETUNE.WEIGHTS", ""))
    members = [tmp_path / f"seed_{seed}" for seed in (1, 2, 3)]
    for seed, member in enumerate(members):
        train_model(load("soup", member.name, "FINETUNE.WEIGHTS", tmp_path / "base", "RNG_SEED", seed))
    script = [str(EXAMPLES / "soup.py"), *map(str, members), "--recalibrate", "80", "--out"]
    shown = []
    for words in ((), ("-m", "torch.distributed.run", "--nproc_per_node=2")):
        out = tmp_path / f"out_{len(shown)}"
        done = subprocess.run([sys.executable, *words, *script, str(out)], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        shown.append(re.findall(r"(\w+) soup of (.+): top1 ([\d.]+);", done.stdout))
    assert all([kind for kind, *_ in lines] == ["uniform", "greedy"] for lines in shown)
    for kind, _, value in shown[0]:
        test = distribuuuu.evaluate(members[0], {"MODEL.WEIGHTS": tmp_path / "out_0" / f"{kind}.pth.tar"})
        assert f"{test['top1']:.2f}" == value
    uniform, *states = (torch.load(path, weights_only=True) for path in (
        tmp_path / "out_0" / "uniform.pth.tar", *(member / "best.pth.tar" for member in members)))  # fmt: skip
    mean = torch.stack([state["state_dict"]["fc.weight"] for state in states]).mean(0)
    assert torch.equal(uniform["fc.weight"], mean)
