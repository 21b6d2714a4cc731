"""docs/photographs.md: its commands, run as they stand, lead to an ONNX file with the answers of predict."""

import csv
import os
import re
import subprocess
import sys

import pytest
from PIL import Image
from support.images import draw_folder
from support.runs import ROOT

PAGE = (ROOT / "docs" / "photographs.md").read_text(encoding="utf-8")
COMMANDS = re.search(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
# What the page advises without a network.
FROM_SCRATCH = " ".join(re.search(r"`(--cfg clothing10/resnet14\s.*?)`", PAGE, re.DOTALL)[1].split())
# Runs the code of a model card for each image in a process without this package.
CARD = """
import runpy, sys
predict = runpy.run_path("card.py")["predict"]
print("\\n".join(predict(path)[0][0] for path in sys.argv[1:]))
assert not any(name.partition(".")[0] in ("distribuuuu", "torch") for name in sys.modules)
"""


@pytest.mark.slow
def test_the_commands_lead_to_an_onnx_file_with_the_answers_of_predict(tmp_path):
    pytest.importorskip("onnxruntime")
    for number, size in enumerate([(80, 60), (60, 90), (64, 64)]):
        draw_folder(tmp_path / "my_images", "", {"ant": 20, "bee": 20, "cat": 20}, size)
        for path in (tmp_path / "my_images").rglob("[0-9]*.jpg"):
            path.rename(path.with_name(f"{number}{path.name}").with_suffix([".jpeg", ".JPG", ".jpg"][number]).with_stem(
                f"photo {number}{path.stem}"))  # fmt: skip
    gray = next((tmp_path / "my_images" / "ant").iterdir())
    Image.open(gray).convert("L").save(gray)
    (exif := Image.Exif())[0x0112] = 6  # a quarter turn
    for path in list((tmp_path / "my_images").rglob("photo 1*.JPG"))[::3]:
        Image.open(path).save(path, exif=exif)
    (bin_folder := tmp_path / "bin").mkdir()
    (program := bin_folder / "distribuuuu").write_text(f'#!/bin/sh\nexec {sys.executable} -m distribuuuu "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = ["bash", "-euo", "pipefail", "-c", COMMANDS.replace("--cfg photographs", FROM_SCRATCH)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert (tmp_path / "exp" / "my_images" / "report.html").exists()

    with open(tmp_path / "answers.csv", newline="", encoding="utf-8") as file:
        answers = {row["path"]: row["label"] for row in csv.DictReader(file)}
    assert len(answers) == 180
    exported = tmp_path / "exported"
    card = (exported / "README.md").read_text(encoding="utf-8")
    (exported / "card.py").write_text(re.search(r"^```python\n(.*?)^```$", card, re.MULTILINE | re.DOTALL)[1])
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", CARD, *(str(tmp_path / path) for path in answers)]
    printed = subprocess.run(command, cwd=exported, env=clean, capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.split() == [*answers.values()]
    assert {"ant", "bee", "cat"} == {*answers.values()}, "the model has learned the classes"
