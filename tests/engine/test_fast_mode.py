"""TRAIN.AMP auto and MODEL.CHANNELS_LAST auto: the choice from given timings, its file, runs that keep it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import timm
import torch
from support.processes import on_processes
from support.runs import assert_same_run, small_options, train_model

from distribuuuu.commands.main import dispatch
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.config_node import changed
from distribuuuu.engine import fast_mode
from distribuuuu.engine.fast_mode import Measured, choose_mode, list_modes, measure_modes, resolve_mode
from distribuuuu.inference.load_run import find_fast_mode, find_run
from distribuuuu.trainer import evaluate_weights

AUTO = ("TRAIN.AMP", "auto", "MODEL.CHANNELS_LAST", "auto")
LOGITS = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.2, -0.1]])
ZEROS, ONE_OUTPUT = torch.zeros(2, 3), torch.tensor([[1.0], [-0.01]])


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def measured(seconds: list[float], logits: dict[int, torch.Tensor] | None = None) -> list[Measured]:
    return [Measured(options, seconds[number], (logits or {}).get(number, LOGITS).numpy(), 2.0**20)
            for number, options in enumerate(list_modes())]  # fmt: skip


def mode(amp: str, channels_last: bool) -> dict:
    return {"TRAIN.AMP": amp, "MODEL.CHANNELS_LAST": channels_last}


@pytest.mark.parametrize("seconds, logits, expected", [
    ([4, 4, 2, 1], {}, mode("bf16", True) | {"speedup": 4.0, "image_s": 1}),
    ([4, 3.8, 3.7, 3.9], {}, mode("none", False) | {"speedup": 1.0, "image_s": 4}),
    ([4, 2, 1.9, 1.9], {}, mode("none", True) | {"speedup": 2.0, "image_s": 2}),
    ([4, 2, 1, 1], {2: -LOGITS, 3: LOGITS * torch.tensor([1.0, -1.0, 1.0])}, mode("none", True)),
    ([4, 4, 1, 2], {2: LOGITS * torch.nan, 3: LOGITS + 0.01}, mode("bf16", True)),
    ([4, 4, 2, 1], dict.fromkeys(range(4), ZEROS), mode("bf16", True)),
    ([4, 4, 1, 2], {0: ONE_OUTPUT, 2: 1.3 * ONE_OUTPUT, 3: ONE_OUTPUT + 0.05}, mode("bf16", True)),
])  # fmt: skip
def test_the_fastest_mode_whose_logits_agree_is_chosen(seconds, logits, expected):
    assert expected.items() <= choose_mode(measured(seconds, logits)).items()


def test_only_what_is_open_is_measured(small_cfg):
    assert list_modes(small_cfg("TRAIN.AMP", "auto")) == [mode("none", False), mode("bf16", False)]
    assert list_modes(small_cfg("MODEL.CHANNELS_LAST", "auto", "TRAIN.AMP", "fp16")) == [
        mode("fp16", False), mode("fp16", True)]  # fmt: skip


@pytest.mark.parametrize("trains", [False, True])
def test_all_modes_have_the_same_weights(trains, monkeypatch):
    monkeypatch.setattr(fast_mode, "_SECONDS", 0)
    model = timm.create_model("test_resnet", num_classes=3)
    found = measure_modes(model, torch.randn(4, 3, 32, 32), list_modes(), trains)
    assert [one.options for one in found] == list_modes() and all(one.seconds > 0 < one.peak for one in found)
    assert all(fast_mode.agrees(one, found[0]) for one in found) and found[0].logits.shape == (4, 3)
    assert abs(found[1].logits - found[0].logits).max() < 1e-4 < abs(found[3].logits - found[0].logits).max()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_several_outputs_are_measured_and_compared_together(monkeypatch):
    monkeypatch.setattr(fast_mode, "_SECONDS", 0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3))
    model.register_forward_hook(lambda model, images, logits: {"a": logits, "b": [logits.sum(1), logits.mean()]})
    found = measure_modes(model, torch.randn(2, 3, 4, 4), list_modes(), trains=True)
    assert [one.logits.shape for one in found] == [(2, 4)] * 4 and fast_mode.agrees(found[3], found[0])


def test_frozen_layers_are_measured_without_their_gradients(small_cfg, monkeypatch):
    monkeypatch.setattr(fast_mode, "measure_modes", lambda model, *args, trains: model.named_parameters())
    named = fast_mode._measure_here("", small_cfg("FINETUNE.FREEZE", "[backbone]"), list_modes())
    assert [name for name, weight in named if weight.requires_grad] == ["fc.weight", "fc.bias"]


def test_a_measurement_is_kept_for_a_machine_and_a_model(small_cfg, tmp_path):
    found, times = {**mode("bf16", True), "speedup": 3.0, "image_s": 0.1}, list[int]()

    def recall(*words):
        return fast_mode.recall(small_cfg(*AUTO, *words), "steps", lambda: times.append(1) or found)

    assert recall() == recall() == found and len(times) == 1
    (file,) = tmp_path.glob("cache/distribuuuu/modes/*")
    assert recall("MODEL.KWARGS.width", 8) == found and len(times) == 2, "another model"
    assert recall("FINETUNE.FREEZE", "[backbone]") == found and len(times) == 3, "another training"
    file.write_text("")
    assert recall() == found and len(times) == 4
    file.parent.rename(tmp_path / "moved")
    file.parent.write_text("no folder")
    assert recall() == found and len(times) == 5


def fake_trial(seconds: list[float]):
    return lambda function, cfg, modes: [one for one in measured(seconds) if one.options in modes]


@pytest.mark.slow
def test_a_run_keeps_its_mode_and_equals_one_that_sets_it(small_cfg, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fast_mode, "in_fresh_process", fake_trial([4, 4, 3, 1]))
    assert evaluate_mode(small_cfg(*AUTO)) == ("none", False), "there is no run"
    train_model(small_cfg(*AUTO, "OUT_DIR", tmp_path / "auto"), stop_epoch=1)
    results = json.loads((tmp_path / "auto/results.json").read_text())
    assert mode("bf16", True).items() <= results["overrides"].items()
    said = "TRAIN.AMP bf16, MODEL.CHANNELS_LAST True: auto, "
    assert results["training"]["mode"] == f"{said}the fastest mode of this machine, 4.0 x the plainest"
    # As on another machine: without the file, and with another result.
    for file in tmp_path.glob("cache/distribuuuu/modes/*"):
        file.unlink()
    monkeypatch.setattr(fast_mode, "in_fresh_process", fake_trial([1, 4, 4, 4]))
    train_model(small_cfg(*AUTO, "OUT_DIR", tmp_path / "auto"))
    assert f"{said}kept from the run" in (tmp_path / "auto/train.log").read_text()
    train_model(small_cfg("TRAIN.AMP", "bf16", "MODEL.CHANNELS_LAST", True, "OUT_DIR", tmp_path / "hand"))
    assert_same_run(tmp_path / "auto", tmp_path / "hand")
    auto = small_cfg(*AUTO, "OUT_DIR", tmp_path / "auto")
    assert evaluate_mode(auto) == ("bf16", True)
    assert evaluate_weights(auto) == evaluate_weights(small_cfg("TRAIN.AMP", "bf16", "MODEL.CHANNELS_LAST", True,
                                                               "OUT_DIR", tmp_path / "hand"))  # fmt: skip


def test_a_run_whose_config_was_edited_to_auto_has_no_mode_to_keep(copied_run, small_cfg):
    config = copied_run / "config.yaml"
    config.write_text(config.read_text().replace("AMP: none", "AMP: auto"))
    with pytest.raises(ConfigError, match="TRAIN.AMP: got auto, as in .*/config.yaml; fix: write"):
        evaluate_mode(small_cfg(*AUTO))


def evaluate_mode(cfg) -> tuple:
    resolved = resolve_mode(cfg, trains=False)
    return resolved.TRAIN.AMP, resolved.MODEL.CHANNELS_LAST


def mode_on_process(args: list[str]) -> tuple:
    import os

    seconds = [4, 4, 3, 1] if os.environ["RANK"] == "0" else [1, 4, 4, 4]
    fast_mode.in_fresh_process = fake_trial(seconds)
    resolved = resolve_mode(load_cfg(None, args), trains=True)
    return resolved.TRAIN.AMP, resolved.MODEL.CHANNELS_LAST


@pytest.mark.slow
def test_the_first_process_decides_for_all(image_folder, tmp_path):
    args = small_options(image_folder, tmp_path / "out", *AUTO)
    assert on_processes(2, mode_on_process, args) == [("bf16", True)] * 2


def test_a_trained_model_has_its_own_mode_unless_auto_is_asked_for(finished_run, monkeypatch):
    assert find_run(finished_run).cfg.TRAIN.AMP == "none"
    rounds = [9.0, 2.0, 1.0, 1.0], [4.0, 9.0, 1.0, 1.0]  # in each, another program slows down one mode
    seconds = iter([*rounds[0], *rounds[1], 1.0, 1.0, 8.0])
    timer = SimpleNamespace(blocked_autorange=lambda min_run_time: SimpleNamespace(median=next(seconds)))
    monkeypatch.setattr(fast_mode, "Timer", lambda *args, **options: timer)
    run = find_run(finished_run, None, AUTO)
    assert run.cfg.TRAIN.AMP == "bf16" and "; TRAIN.AMP bf16, MODEL.CHANNELS_LAST " in (said := run.describe())
    assert said.endswith(": auto, the fastest mode of this machine, 4.0 x the plainest")
    assert find_run(finished_run, None, AUTO).cfg.TRAIN.AMP == "bf16", "from the file"
    open_run = replace(run, cfg=changed(run.cfg, dict(zip(AUTO[::2], AUTO[1::2], strict=True))))
    assert find_fast_mode(open_run)["image_s"] == 8 / 16, "the time of an image is measured each time"


def test_modes_are_compared_in_a_table(image_folder, tmp_path, monkeypatch, capsys):
    def in_fresh_process(function, cfg, modes):
        (options,), number = modes, len(asked)
        asked.append(options.get("MODEL.COMPILE", "none"))
        if number == 4:
            raise ConfigError("the compiler fails\nbadly")
        found = Measured(options, 0.5 / (1 + number), LOGITS.numpy() + number / 100, 2**21)
        return "killed" if number == 1 else [found]

    asked: list[str] = []
    monkeypatch.setattr(fast_mode, "in_fresh_process", in_fresh_process)
    args = small_options(image_folder, tmp_path / "out", *AUTO)
    assert dispatch("distribuuuu", ["plan", "--modes", *args]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and asked == ["none"] * 4 + ["default"]
    assert lines[1].split() == ["float32", "2.0", "1.00", "2", "0"] and "compiler fails" in lines[5]
    assert lines[2].startswith(f"{'float32, channels_last':<29} failed: ")
    assert lines[4].split() == ["bf16,", "channels_last", "8.0", "4.00", "2", "0.03"]
    assert not (tmp_path / "out").exists()
