"""Runs in a Jupyter kernel; skipped without nbclient and ipykernel, which the package does not need."""

import pytest
from support.runs import ROOT, small_options

pytestmark = pytest.mark.slow

INTERRUPT = """
def interrupt():
    path = os.path.join(options["OUT_DIR"], "metrics.jsonl")
    while not os.path.exists(path) or not open(path).read():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
distribuuuu.train(None, {**options, "OPTIM.MAX_EPOCH": 200})
"""
LEFT = """
print(open(f"/proc/self/task/{os.getpid()}/children").read().split())
print(signal.getsignal(signal.SIGINT) is before)
"""


def test_a_notebook_trains_stops_resumes_and_continues_after_errors(image_folder, tmp_path):
    nbformat, nbclient, _ = map(pytest.importorskip, ("nbformat", "nbclient", "ipykernel"))
    words = small_options(image_folder, tmp_path / "out", "TRAIN.WORKERS", 1)
    options = dict(zip(words[::2], words[1::2], strict=True))
    sources = [
        f"import os, signal, sys, threading, time\nsys.path.insert(0, {str(ROOT)!r})\nimport distribuuuu\n"
        f"options = {options!r}\nbefore = signal.getsignal(signal.SIGINT)",
        "distribuuuu.train(None, {**options, 'NO.KEY': 1})",
        INTERRUPT,
        "result = distribuuuu.train(None, {**options, 'OPTIM.MAX_EPOCH': 1, 'TRAIN.AUTO_RESUME': False})",
        "print(distribuuuu.evaluate(result)['top1'] == result.metrics['top1'])",
        LEFT,
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbclient.NotebookClient(notebook, timeout=300, allow_errors=True, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in notebook.cells]
    errors = {number: output.ename for number, cell in enumerate(outputs) for output in cell if "ename" in output}
    assert errors == {1: "ConfigError", 2: "KeyboardInterrupt"}
    texts = ["".join(str(output.get("text", output.get("data", ""))) for output in cell) for cell in outputs]
    assert "a checkpoint was saved" in str(outputs[2][-1]) and "epoch 1/1" in texts[3], "the text of the progress bar"
    assert texts[4].endswith("True\n") and texts[5] == "[]\nTrue\n"
    assert "can only test a child process" not in "".join(texts)
