"""Model cards: metadata that the Hub reads, numbers of the run, code that runs."""

import json
import os
import re

import pytest
import yaml
from huggingface_hub import ModelCard

from distribuuuu import load_run
from distribuuuu.commands.export.exporter import export_run
from distribuuuu.commands.export.model_card import render_card
from distribuuuu.trainer import train_model

OTHER = ("DATA.MEAN", "[0.4, 0.5, 0.3]", "DATA.STD", "[0.2, 0.3, 0.25]", "MODEL.LICENSE", "mit")
# Names that could break a table, a block of code or a line.
NAMES = ("a|b`", "```\n# c", "x" * 200)


@pytest.mark.slow
def test_a_card_has_valid_metadata_and_the_numbers_of_the_run(small_cfg, tmp_path, image_folder):
    for split in ("train", "val"):
        (tmp_path / "data" / split).mkdir(parents=True)
        for name, source in zip(NAMES, ("ant", "bee", "cat"), strict=True):
            os.symlink(image_folder / split / source, tmp_path / "data" / split / name)
    averaged = ("EMA.HALF_LIFE", "40", "AUG.MIXUP", "0.2", "TEST.FLIP", "True")
    cfg = small_cfg("TRAIN.DATASET", tmp_path / "data", *averaged, *OTHER)
    train_model(cfg)
    export_run(load_run(cfg.OUT_DIR, device="cpu"), "safetensors", tmp_path / "exported")
    card = (tmp_path / "exported" / "README.md").read_text()
    data = ModelCard(card).data
    assert (data.library_name, data.pipeline_tag) == ("distribuuuu", "image-classification")
    assert data.model_name == "resnet8" and data.tags == ["image-classification", "distribuuuu"]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    best = results["accuracy"]["ema"]["best"]
    found = {result.metric_name: result for result in data.eval_results}
    assert found["top1"].metric_type == "accuracy" and found["top1"].metric_value == best["top1"]
    assert found["top1"].dataset_split == "val" and found["top1"].task_type == "image-classification"
    front_matter = yaml.safe_load(card.split("---\n")[1])
    assert ModelCard(f"---\n{data.to_yaml()}\n---\n").data.to_dict() == data.to_dict()
    assert front_matter["model-index"][0]["name"] == "resnet8"
    assert f"| top1 | {best['top1']:.2f} |" in card
    assert "| license of the initial weights | mit |" in card and results["model"]["license"] == "mit"
    again = load_run(tmp_path / "exported")  # whose card keeps the figures
    assert again.results == {**results, "overrides": {}, "environment": {}}
    record = {"format": "onnx", "verified": None, "source": ""}
    assert f"| top1 | {best['top1']:.2f} |" in render_card(again, record, "")
    assert "48 training and 37 evaluation images, 3 classes" in card
    for text in ("| weights | ema, ", "shorter side 18 px, center crop 16 px, bilinear",
                 "mean [0.4, 0.5, 0.3]", "average the logits with those of the mirrored image",
                 "**verified**", results["commit"]):  # fmt: skip
        assert text in card, text
    assert str(tmp_path) not in card and "TRAIN.DATASET" not in card
    assert json.loads(re.search(r"```json\n(.*?)\n```", card, re.DOTALL)[1]) == sorted(NAMES)
