"""plan --tune: which options are recommended, on simulated machines; the processes that are measured; the output."""

import contextlib
import json
import multiprocessing
import random
import re
import threading

import pytest
import torch
import yaml
from support.runs import ROOT

from distribuuuu.commands.measure import timing
from distribuuuu.commands.plan import tune
from distribuuuu.commands.plan.plan import format_text, parse_flags_and_cfg
from distribuuuu.commands.plan.tune import Change, Gain, Process, Unusable, format_command, list_candidates
from distribuuuu.config import load_cfg
from distribuuuu.config.config_node import get_value
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.workers import count_workers
from distribuuuu.engine.run_description import SPEED_OPTIONS, list_unused_speed
from distribuuuu.launch.detect import Launch

CHANNELS_LAST, AMP = Change("MODEL.CHANNELS_LAST", "True"), Change("TRAIN.AMP", "bf16")
COMPILE, THREADS = Change("MODEL.COMPILE", "default"), Change("OMP_NUM_THREADS", "1")
WORKERS = [Change("TRAIN.WORKERS", "1"), Change("TRAIN.WORKERS", "2")]
ALL = [CHANNELS_LAST, AMP, COMPILE, *WORKERS, THREADS]


class Machine:
    """A simulated machine: `speed_of(changes)` in images/s, times noise, slower with each block."""

    def __init__(self, speed_of, noise: float = 0.0, drift: float = 0.0, seed: int = 0):
        self.speed_of, self.noise, self.drift = speed_of, noise, drift
        self.random, self.blocks, self.open, self.most, self.opened = random.Random(seed), 0, 0, 0, []

    def __call__(self, changes):
        machine, speed = self, self.speed_of(tuple(changes))
        if isinstance(speed, str):
            raise Unusable(speed)
        machine.open += 1
        machine.most = max(machine.most, machine.open)
        machine.opened.append(tuple(changes))

        class Run:
            def block(self) -> float:
                machine.blocks += 1
                return speed * machine.random.lognormvariate(0, machine.noise) * (1 - machine.drift) ** machine.blocks

            def close(self) -> None:
                machine.open -= 1

        return Run()


def factors(**by_key: float):
    def speed_of(changes) -> float:
        speed = 100.0
        for change in changes:
            speed *= by_key.get(change.key.rpartition(".")[2], 1.0)
        return speed

    return speed_of


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
def test_a_wide_network_gets_channels_last_and_a_small_one_does_not(noise):
    wide = Machine(factors(CHANNELS_LAST=2.0, AMP=0.5, COMPILE=0.98), noise, drift=0.002)
    found = tune.tune(wide, [CHANNELS_LAST, AMP, COMPILE])
    assert found["used"] == [CHANNELS_LAST] and found["gain"] == pytest.approx(2.0, rel=max(0.01, 1.5 * noise))
    assert [row["used"] for row in found["options"]] == [True, False, False]
    small = Machine(factors(CHANNELS_LAST=0.9, AMP=0.5, COMPILE=1.005), noise, drift=0.002)
    found = tune.tune(small, [CHANNELS_LAST, AMP, COMPILE])
    assert found["used"] == [] and (found["gain"], found["spread"]) == (1.0, 0.0)


def test_noise_and_drift_are_no_gain():
    recommended = 0
    for seed in range(400):
        machine = Machine(factors(), noise=0.2, drift=0.01, seed=seed)
        recommended += tune.measure_gain(machine(()), machine(())).is_real
    assert recommended <= 8  # one in fifty
    with_drift = Machine(factors(AMP=1.1), drift=0.02)
    gain = tune.measure_gain(with_drift(()), with_drift([AMP]))
    assert gain.ratio == pytest.approx(1.1, rel=0.03) and 0 < gain.spread < 0.1 and gain.is_real


def test_one_disturbed_pair_does_not_hide_a_gain_and_small_gains_are_not_real():
    base, fast = (Machine(factors(AMP=1.5))(changes) for changes in ((), [AMP]))
    speeds = iter([100, 100, 100, 9, 100, 100, 100])
    base.block = lambda: next(speeds)
    assert tune.measure_gain(base, fast) == Gain(pytest.approx(1.5), pytest.approx(0, abs=1e-9))
    assert not Gain(1.019, 0.0).is_real and Gain(1.021, 0.0).is_real and not Gain(1.1, 0.11).is_real
    assert not Gain(0.99, 0.0).is_loss and Gain(0.9, 0.05).is_loss and not Gain(0.9, 0.2).is_loss


def test_options_are_added_while_they_gain_and_the_combination_is_measured():
    def speed_of(changes) -> float:
        keys = {change.key for change in changes}
        model = 100.0 * (2.0 if CHANNELS_LAST.key in keys else 1.3 if AMP.key in keys else 1.0)
        loader = 120.0 + 60.0 * (WORKERS[0] in changes) + 100.0 * (WORKERS[1] in changes)
        return min(model, loader) * (0.7 if THREADS in changes else 1.0)

    machine = Machine(speed_of)
    found = tune.tune(machine, ALL)
    # Channels last and bf16 gain the same alone, because then the loader limits both; workers gain only with them.
    assert found["used"] == [CHANNELS_LAST, WORKERS[0]] and found["gain"] == pytest.approx(1.8)
    gains = {row["option"]: row["gain"] for row in found["options"]}
    assert gains["TRAIN.WORKERS 1"] == pytest.approx(1.0) and gains["OMP_NUM_THREADS=1"] == pytest.approx(0.7)
    assert sum(THREADS in changes for changes in machine.opened) == 1  # what is slower is not tried again
    assert not any(set(WORKERS) <= set(changes) for changes in machine.opened)
    assert machine.opened[-2:] == [(), (CHANNELS_LAST, WORKERS[0])]
    assert machine.open == 0 and machine.most == 2  # memory for two runs


def test_what_cannot_be_measured_is_reported_and_left_out():
    def speed_of(changes):
        return "no C++ compiler" if COMPILE in changes else 100.0 * (1.5 if AMP in changes else 1.0)

    found, lines = None, []
    found = tune.tune(Machine(speed_of), [COMPILE, AMP], lines.append)
    assert found["options"][0] == {
        "option": "MODEL.COMPILE default", "gain": None, "spread": None, "used": False, "failed": "no C++ compiler"
    }  # fmt: skip
    assert found["used"] == [AMP] and lines[0] == "MODEL.COMPILE default: failed: no C++ compiler"


def test_a_combination_that_is_slower_than_the_base_is_not_recommended():
    def speed_of(changes) -> float:
        measured_before = len(machine.opened) > 5
        return {0: 100.0, 1: 150.0, 2: 200.0 if not measured_before else 90.0}[len(changes)]

    machine = Machine(speed_of)
    found = tune.tune(machine, [CHANNELS_LAST, AMP])
    assert found["used"] == [CHANNELS_LAST] and found["gain"] == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("words", "is_cuda", "expected", "missing"),
    [
        ((), False, {CHANNELS_LAST, AMP, COMPILE, Change("DATA.WORKER_KIND", "thread"), Change("TRAIN.WORKERS", "0")},
         {"DATA.LOADER", "TRAIN.DATASET"}),
        (("MODEL.CHANNELS_LAST", "True", "TRAIN.AMP", "bf16", "MODEL.COMPILE", "default", "TRAIN.WORKERS", "0"), False,
         {Change("MODEL.CHANNELS_LAST", "False"), Change("TRAIN.AMP", "none"), Change("MODEL.COMPILE", "none")}, set()),
        (("TRAIN.AMP", "fp16"), True, {AMP}, {"OMP_NUM_THREADS"}),
        (("DATA.NAME", "fashion_mnist", "DATA.LOADER", "device"), True, {AMP},
         {"TRAIN.WORKERS", "DATA.WORKER_KIND", "DATA.DECODER", "OMP_NUM_THREADS"}),
    ],
)  # fmt: skip
def test_the_changes_are_the_other_values_of_options_outside_of_the_recipe(words, is_cuda, expected, missing):
    cfg = load_cfg(None, words)
    changes = list_candidates(cfg, is_cuda)
    assert expected <= set(changes) and not missing & {change.key for change in changes}
    here = Launch("test")
    for change in changes:
        if change.key == "OMP_NUM_THREADS":
            assert int(change.value) != torch.get_num_threads()
            continue
        other = load_cfg(None, [*words, change.key, change.value])
        assert get_value(other, change.key) != get_value(cfg, change.key)
        if change.key == "TRAIN.WORKERS":
            assert count_workers(other.TRAIN.WORKERS, here) != count_workers(cfg.TRAIN.WORKERS, here)


def test_installed_decoders_are_measured(monkeypatch):
    monkeypatch.setattr(tune.importlib.util, "find_spec", lambda name: object() if name == "simplejpeg" else None)
    assert Change("DATA.DECODER", "simplejpeg") in list_candidates(load_cfg(None), True)
    assert not any(change.value == "nvimgcodec" for change in list_candidates(load_cfg(None), True))

    def find_no_parent(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(tune.importlib.util, "find_spec", find_no_parent)
    assert not any(change.key == "DATA.DECODER" for change in list_candidates(load_cfg(None), True))


def test_the_command_replaces_the_options_that_it_changes():
    words = ["TRAIN.WORKERS", "0", "OUT_DIR", "a b"]
    assert format_command("shapes/resnet14", 2, words, [AMP, WORKERS[0], THREADS]) == (
        "OMP_NUM_THREADS=1 distribuuuu train --cfg shapes/resnet14 --nproc 2 OUT_DIR 'a b' "
        "TRAIN.AMP bf16 TRAIN.WORKERS 1"
    )
    assert format_command(None, 1, words, [AMP]) == "distribuuuu train TRAIN.WORKERS 0 OUT_DIR 'a b' TRAIN.AMP bf16"
    flags = parse_flags_and_cfg(None, ["--tune", "TRAIN.AMP", "bf16"])[0]
    assert flags.overrides == ["TRAIN.AMP", "bf16"] and flags.tune and not parse_flags_and_cfg(None, [])[0].tune


PLANNED = {
    "config": "shapes/resnet14", "batch": {"micro_batch": 12, "accum_steps": 1, "world_size": 1},
    "memory": {"fits": True, "peak_mib": 100, "workers_mib": 0, "free_mib": 1000, "of": "host"},
}  # fmt: skip


@pytest.mark.parametrize("memory, problem", [
    ({"fits": False}, "does not fit into memory"),
    ({"free_mib": 150}, "200 MiB for two runs at a time, 150 MiB are free; fix: a smaller TRAIN.BATCH_SIZE"),
])  # fmt: skip
def test_without_memory_for_two_runs_or_a_base_nothing_is_measured(memory, problem, monkeypatch):
    monkeypatch.setattr(tune, "Process", None)
    found = tune.tune_plan(load_cfg(None), {**PLANNED, "memory": {**PLANNED["memory"], **memory}}, [])
    assert problem in found["problem"] and list(found) == ["problem"]
    assert list(tune.list_rows(found)) == [("tuning", f"not measured: {found['problem']}")]
    monkeypatch.setattr(tune, "Process", lambda cfg, plan, changes: Machine(lambda changes: "no data")(()))
    assert tune.tune_plan(load_cfg(None), PLANNED, []) == {"problem": "no data"}


def test_images_have_their_largest_size(monkeypatch):
    seen = []

    def note(cfg, plan, changes):
        seen.append((cfg.TRAIN.IM_SIZE_START, cfg.TRAIN.IM_SIZE, plan))
        return Machine(factors(CHANNELS_LAST=2))(changes)

    monkeypatch.setattr(tune, "Process", note)
    cfg = load_cfg(None, ["TRAIN.IM_SIZE_START", "160", "TRAIN.IM_SIZE_EPOCHS", "[1, 9]"])
    found = tune.tune_plan(cfg, PLANNED, ["TRAIN.IM_SIZE_START", "160"])
    assert set(seen) == {(0, 224, BatchPlan(12, 1, 1))}
    assert found["used"] == ["MODEL.CHANNELS_LAST True"] and json.dumps(found)
    assert "TRAIN.IM_SIZE_START 160 MODEL.CHANNELS_LAST True" in found["command"]


def test_the_rows_have_80_columns_and_the_command_can_be_copied():
    rows = {
        "MODEL.CHANNELS_LAST True": (1.94, 0.05, True, None),
        "MODEL.COMPILE default": (None, None, False, "no " * 40),
    }
    names = ("option", "gain", "spread", "used", "failed")
    options = [dict(zip(names, (option, *row), strict=True)) for option, row in rows.items()]
    words = ["OUT_DIR", "exp/a_long_name_of_a_folder"]
    command = format_command("fashion_mnist/resnet14", 1, words, [CHANNELS_LAST, AMP])
    measured = {"images_per_s": 512.0, "gain": 1.94, "spread": 0.05}
    tuning = {"options": options, **measured, "used": ["x"], "command": command}
    model = {"arch": "resnet14", "params_m": 1, "gflops": 1}
    result = {
        **PLANNED, "model": model, "images": {"train": 1, "val": 1}, "epochs": 1, "steps_per_epoch": 1, "steps": 1,
        "images_seen": 1, "batch": {**PLANNED["batch"], "global_batch": 12}, "step_s": {32: 0.1}, "images_per_s": {},
        "seconds": {"start": 1}, "hours": 1, "checkpoints": 1, "checkpoint_mib": 1, "disk_mib": 1, "best_mib": 1,
        "bottleneck": "x", "assumption": None, "unused": ["TRAIN.AMP bf16"], "tuning": tuning,
        "memory": {**PLANNED["memory"], "predicted_mib": None},
    }  # fmt: skip
    lines = format_text(result).splitlines()
    assert max(map(len, lines)) <= 80
    assert "              MODEL.CHANNELS_LAST True: 1.94 x, spread 0.05; used" in lines
    assert any(line.startswith("together      1.94 x, spread 0.05: about 993 images/s") for line in lines)
    assert "not in use    TRAIN.AMP bf16; --tune measures the gain of each" in lines
    start = next(number for number, line in enumerate(lines) if line.startswith("command "))
    assert re.sub(r" \\\n\s*", " ", "\n".join(lines[start:])) == f"command       {command}"
    assert "no option is faster" in str(list(tune.list_rows({**tuning, "used": []})))


@pytest.mark.parametrize("words", [("TRAIN.WORKERS", 2, "DATA.WORKER_KIND", "thread"), ("DATA.LOADER", "device")])
def test_blocks_are_timed_on_demand_and_the_weights_stay(small_cfg, tmp_path, monkeypatch, words):
    for name in ("MEASURE_S", "BLOCK_S", "WARM_UP_S"):
        monkeypatch.setattr(timing, name, 0.01)
    cfg, runs, steps = small_cfg(*words), [], []
    real = tune.take_step
    monkeypatch.setattr(tune, "take_step", lambda run, *rest: (runs.append(run), steps.append(1), real(run, *rest)))
    mine, theirs = multiprocessing.Pipe()
    (tmp_path / "trial").mkdir()
    args = (str(tmp_path / "trial"), cfg, BatchPlan(12, 1, 1), 0, theirs)
    thread = threading.Thread(target=tune.serve_blocks, args=args)
    thread.start()
    assert mine.poll(60) and mine.recv() is None
    weights = [parameter.detach().clone() for parameter in runs[0].state.model.parameters()]
    before = len(steps)
    mine.send(True)
    assert mine.poll(60) and mine.recv() > 0
    assert len(steps) > before + 1  # at least one group that does not count, and one that does
    mine.send(False)
    thread.join(60)
    assert not thread.is_alive()
    assert all(map(torch.equal, weights, runs[0].state.model.parameters()))


def test_a_change_that_contradicts_the_config_is_unusable(small_cfg):
    with pytest.raises(Unusable, match="TRAIN.AMP"):
        Process(small_cfg(), BatchPlan(12, 1, 1), [Change("TRAIN.AMP", "bf17")])


@pytest.mark.slow
def test_a_process_serves_blocks_and_one_that_fails_says_why(small_cfg, tmp_path):
    with contextlib.closing(Process(small_cfg(), BatchPlan(12, 1, 1), [CHANNELS_LAST, THREADS])) as run:
        assert run.block() > 0 and run.block() > 0
    assert not multiprocessing.active_children()
    with pytest.raises(Unusable, match="MODEL.NUM_CLASSES"):
        Process(small_cfg("TRAIN.DATASET", tmp_path / "missing"), BatchPlan(12, 1, 1), [])
    assert not multiprocessing.active_children() and not (tmp_path / "out").exists()


def test_the_overlay_the_documented_command_and_the_list_are_the_same():
    overlay = ROOT / "configs" / "speed" / "gpu.yaml"
    content = {f"{section}.{key}": value for section, keys in yaml.safe_load(overlay.read_text()).items()
               for key, value in keys.items()}  # fmt: skip
    assert content == SPEED_OPTIONS
    words = [word for key, value in SPEED_OPTIONS.items() for word in (key, str(value))]
    line = " ".join(words)
    assert line in overlay.read_text() and line in (ROOT / "docs" / "recipes.md").read_text()
    recipe = str(ROOT / "configs" / "imagenet" / "resnet50.yaml")
    cfg, expected = load_cfg(recipe, words), load_cfg(recipe).clone()
    expected.defrost()
    expected.merge_from_file(str(overlay))
    assert cfg.dump() == expected.dump()


def test_options_that_are_not_in_use_are_named():
    assert list_unused_speed(load_cfg(None, ["TRAIN.WORKERS", "0"]), Launch("test")) == [
        "TRAIN.AMP bf16", "MODEL.CHANNELS_LAST True", "MODEL.COMPILE default", "TRAIN.WORKERS -1"
    ]  # fmt: skip
    used = ["TRAIN.AMP", "fp16", "MODEL.CHANNELS_LAST", "True", "MODEL.COMPILE", "reduce-overhead"]
    assert list_unused_speed(load_cfg(None, [*used, "TRAIN.WORKERS", "-1"]), Launch("test")) == []
    assert list_unused_speed(load_cfg(None, [*used, "TRAIN.WORKERS", "99"]), Launch("test")) == []
    on_device = [*used, "TRAIN.WORKERS", "0", "DATA.LOADER", "device", "DATA.NAME", "cifar10"]
    assert list_unused_speed(load_cfg(None, on_device), Launch("test")) == []
