"""Completion of command lines, as a shell asks for it."""

import os
import subprocess
import sys

import pytest
from support.tables import each_row

from distribuuuu.config.model_names import NameTable, keep_table


@each_row("line, expected, other", [
    ("distribuuuu trai", ["train "], "test"),
    ("distribuuuu train --dump", ["--dump-config "], "--cfg"),
    ("distribuuuu train --cfg shapes/res", ["shapes/resnet14 "], "imagenet/resnet50"),
    ("distribuuuu train --cfg shapes/resnet14 OPTIM.BASE", ["OPTIM.BASE_LR "], "OPTIM.MIN_LR"),
    ("distribuuuu train OPTIM.BASE_LR 0.1 MODEL.COMPILE max", ["max-autotune "], "default"),
    ("distribuuuu test exp/run OPTIM.LR_POLICY c", ["cos", "cos_after_warmup", "cos_timm"], "lin"),
    ("distribuuuu test exp/run 'OPTIM.BASE_", ["OPTIM.BASE_LR"], "OPTIM.MIN_LR"),
    ("distribuuuu train MODEL.ARCH resn", ["resnet8", "resnet88"], "vit_tiny"),
    ("distribuuuu train OPTIM.NAME ada", ["adamw", "adan"], "lion"),
    ("distribuuuu train --cfg shapes", ["shapes/resnet14", "shapes_mine.yaml"], "imagenet/resnet50"),
    ("distribuuuu export exp/run --to o", ["onnx "], "timm"),
    ("distribuuuu plan --", ["--nproc", "--steps", "--format"], "--gpus"),
    ("distribuuuu test exp/run --", ["--cfg", "--nproc"], "--stop-epoch"),
])  # fmt: skip
def test_a_line_is_completed(line, expected, other, tmp_path, monkeypatch):
    pytest.importorskip("argcomplete")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_table("distribuuuu", lambda: NameTable({"resnet8": None, "vit_tiny": None}))
    keep_table("timm", lambda: NameTable({"resnet88": None}))
    keep_table("optimizers", lambda: NameTable({"adamw": None, "adan": None, "lion": None}))
    (tmp_path / "shapes_mine.yaml").write_text("")
    found = tmp_path / "found"
    environment = {
        **os.environ, "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_STDOUT_FILENAME": str(found),
    }  # fmt: skip
    subprocess.run([sys.executable, "-m", "distribuuuu"], cwd=tmp_path, env=environment, timeout=60, check=False)
    words = [word.strip("'") for word in found.read_text().splitlines()]
    assert [word for word in expected if word in words] == expected, words
    assert other not in [word.strip() for word in words]
