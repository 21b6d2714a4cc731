"""The state of a sweep on disk: damaged files, refused folders, and a sweep with kills whose survivors are exact."""

import dataclasses
import json
import random

import pytest
from support.runs import assert_same_run, small_options, train_and_stop
from support.sweeps import make_sweep

from distribuuuu.commands.sweep.asha import run_sweep
from distribuuuu.commands.sweep.trials import FAILED, FAILED_FILE, build_rows, open_sweep, read_state
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.trainer import train_model


def test_the_state_of_a_run_is_read_from_its_files_only(tmp_path):
    assert read_state(tmp_path / "missing", "top1").epochs == 0
    (tmp_path / "checkpoints").mkdir()
    for name in ("ckpt_ep_001.pth.tar", "ckpt_ep_001_step_000004.pth.tar", ".ckpt_ep_002.pth.tar.1.tmp"):
        (tmp_path / "checkpoints" / name).touch()
    found = [("train", 1, 1.0), ("eval", 1, 50.0), ("eval", 2, 60.0), ("eval", 1, "60"), ("eval", 1, None), ("x", 1, 2)]
    lines = [json.dumps({"kind": kind, "epoch": epoch, "step": 4, "top1": value}) for kind, epoch, value in found]
    hostile = ['{"kind": "eval", "epoch": 1, "top1": ' + value for value in ("", "9" * 500 + "}", "[" * 5000)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, *hostile]))
    state = read_state(tmp_path, "top1")
    assert (state.epochs, state.values, state.failure) == (1, {1: 50.0}, ""), "epoch 2 is not in a checkpoint yet"
    assert state.value(1) == 50.0 and state.value(2) is None
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('\n{"kind": "eval_ema", "epoch": 1, "step": 4, "top1": 70.0}\n')
    (tmp_path / "console.log").write_bytes(b"Traceback\n\xffValueError: no\n\n")
    (tmp_path / FAILED_FILE).write_text("1\n")
    state = read_state(tmp_path, "top1")
    assert state.value(1) == 70.0 and state.value(2) != state.value(2) and state.failure.endswith("ValueError: no")


def test_a_folder_belongs_to_one_sweep(tmp_path):
    sweep = make_sweep(tmp_path / "out", [{"OPTIM.BASE_LR": "0.1"}, {"OPTIM.BASE_LR": "0.2"}], epochs=2)
    sweep = dataclasses.replace(sweep, inputs={**sweep.inputs, "config": "config/x/a.yaml", "config_sha256": "1"})
    (tmp_path / "out").mkdir()
    for _ in range(2):
        assert open_sweep(sweep, b"RNG_SEED: 1\n") == sweep
    assert (tmp_path / "out/config/x/a.yaml").read_text() == "RNG_SEED: 1\n"
    other = dataclasses.replace(sweep, inputs={**sweep.inputs, "seeds": 2})
    with pytest.raises(ConfigError, match="describes the sweep of other arguments"):
        open_sweep(other, b"RNG_SEED: 1\n")
    (tmp_path / "out/config/x/a.yaml").write_text("PLUGINS: [./evil.py]")  # the jobs would import it
    with pytest.raises(ConfigError, match="a.yaml is not the config of --cfg, which its runs expect; fix"):
        open_sweep(sweep, b"RNG_SEED: 1\n")
    for content in ("", '{"schema": 1}', "[" * 9999):
        (tmp_path / "out/sweep.json").write_text(content)
        with pytest.raises(ConfigError, match="sweep.json"):
            open_sweep(sweep, b"")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="is the folder of a run"):
        open_sweep(dataclasses.replace(sweep, out_dir=tmp_path / "run"), b"")


class InProcess:
    """An executor that runs one job at a time in this process, and kills some after a checkpoint."""

    def __init__(self, rng: random.Random, monkeypatch, num_kills: int):
        self.rng, self.monkeypatch, self.num_kills = rng, monkeypatch, num_kills
        self.running: list = []

    def update(self, wanted) -> dict:
        if not wanted:
            return {}
        job, words = wanted[0], list(wanted[0].command[4:])
        stop = words.index("--stop-epoch") if "--stop-epoch" in words else None
        epoch = int(words[stop + 1]) if stop is not None else None
        if stop is not None:
            del words[stop : stop + 2]
        job.folder.mkdir(parents=True, exist_ok=True)
        cfg = load_cfg(None, words)
        state = read_state(job.folder, "top1")
        try:
            if self.num_kills and job.epoch > state.epochs:
                # After the last step of an epoch, before its evaluation; or after the evaluation.
                places = [(state.epochs, 4), (state.epochs + 1, 0)]
                train_and_stop(cfg, self.rng.choice(places), self.monkeypatch)
                self.num_kills -= 1
                return {job: -9}
            train_model(cfg, epoch)
        except ConfigError as error:
            (job.folder / "console.log").write_text(str(error))
            return {job: 2}
        return {job: 0}

    def stop(self, signum: int) -> None:
        """Not used."""


@pytest.mark.slow
def test_a_sweep_with_kills_has_the_same_table_and_runs(image_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("distribuuuu.commands.sweep.asha.POLL_S", 0)
    values = [{"OPTIM.BASE_LR": str(lr)} for lr in (0.01, 0.1, 0.03, 0.2)]
    values.insert(2, {"MODEL.KWARGS.norm": "nope"})
    words = small_options(image_folder, tmp_path, "MODEL.KWARGS.width", 4, "OPTIM.MAX_EPOCH", 4)
    rows = {}
    for name, num_kills in (("calm", 0), ("killed", 8)):
        sweep = make_sweep(tmp_path / name, values, 4, eta=2, seeds=(3, 4), overrides=words)
        sweep.out_dir.mkdir()
        states = run_sweep(sweep, InProcess(random.Random(0), monkeypatch, num_kills))
        rows[name] = build_rows(sweep, states)
        again = run_sweep(sweep, InProcess(random.Random(0), monkeypatch, 0))
        assert again == states, "the files alone tell that nothing is left to do"
    assert repr(rows["calm"]) == repr(rows["killed"])
    failed = next(row for row in rows["killed"] if row.status == FAILED)
    assert failed.trial == 2 and "nope" in failed.failures[3]
    best = rows["killed"][0]
    assert best.epochs == 4 and best.seeds.keys() == {3, 4}
    for seed in (3, 4):
        options = ["MODEL.KWARGS.width", 4, "OPTIM.MAX_EPOCH", 4, "RNG_SEED", seed]
        options += [word for pair in sweep.trials[best.trial].values.items() for word in pair]
        train_model(load_cfg(None, small_options(image_folder, tmp_path / f"alone{seed}", *options)))
        assert_same_run(tmp_path / f"alone{seed}", sweep.folder(best.trial, seed))
