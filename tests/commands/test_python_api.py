"""The Python API of commands: results as values, errors as exceptions, nothing printed."""

import json
import threading

import numpy as np
import pytest
import torch
from support.predictions import change_predictions

import distribuuuu
from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.commands.main import find_commands
from distribuuuu.config import ConfigError

NAMES = ("export", "probe", "report", "doctor", "split")
if not set(NAMES) <= set(find_commands()):
    pytest.skip("a command was deleted", allow_module_level=True)


@pytest.mark.slow
def test_commands_are_functions(copied_run, image_folder, tmp_path, capsys):
    assert set(distribuuuu.doctor(image_folder)["splits"]) == {"train", "val"}
    lists = distribuuuu.split(image_folder / "train", tmp_path / "lists", val=0.25, overrides={})
    assert [path.name for path in lists] == ["train.csv", "val.csv"]
    probed = distribuuuu.probe(copied_run)
    assert probed == json.loads((copied_run / "probe.json").read_text())
    figures = []
    thread = threading.Thread(target=lambda: figures.append(distribuuuu.report(copied_run, tmp_path / "page.html")))
    thread.start()
    thread.join()
    assert figures[0]["probe"]["k-NN"] == probed["top1"]["k-NN"] and (tmp_path / "page.html").exists()
    record = distribuuuu.export(copied_run, "safetensors", tmp_path / "unchecked", check=False)
    assert record["verified"] is None and (tmp_path / "unchecked" / "model.safetensors").exists()
    assert capsys.readouterr().out == ""
    for call, said in [
        (lambda: distribuuuu.report("no_such"), "no such file or folder: no_such"),
        (lambda: distribuuuu.export(copied_run, "png", "x"), "invalid choice: 'png'"),
        (lambda: distribuuuu.split(image_folder, "x", val=3), "--val: got 3; expected a share"),
    ]:
        with pytest.raises(ConfigError, match=said):
            call()


def test_scores_and_weights_that_are_not_finite_are_refused(copied_run, tmp_path):
    content = read_checkpoint(copied_run / "best.pth.tar")
    content["state_dict"]["fc.bias"][0] = torch.nan
    torch.save(content, copied_run / "best.pth.tar")
    with np.load(copied_run / "predictions.npz") as file:
        change_predictions(copied_run, {}, logits=np.full_like(file["logits"], np.nan))
    for call in (
        lambda: distribuuuu.report(copied_run),
        lambda: distribuuuu.probe(copied_run),
        lambda: distribuuuu.export(copied_run, "safetensors", tmp_path / "exported", check=False),
    ):
        with pytest.raises(ConfigError, match="RUN: .* not finite; fix: "):
            call()
