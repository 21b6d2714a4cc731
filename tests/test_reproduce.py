"""benchmarks/reproduce.py: rows, refused options, the verdict, and a rerun that is resumed and compared."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import reproduce
from support.predictions import change
from support.runs import ROOT, run_tool
from support.tables import each_row

from distribuuuu.commands.stats.run_groups import Result
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.registry import dataset_class
from distribuuuu.records.results import hash_config

RECORD = json.loads((reproduce.RESULTS / "shapes" / "resnet14" / "seed_0.json").read_text())
RECORD = {key: value for key, value in RECORD.items() if key not in ("weights_sha256", "environment")}  # as older rows
HASHED = {
    "weights_sha256": {"raw": "a" * 64},
    "environment": {"device": "cpu", "threads": 1, "deterministic": True},
    "commit": "c" * 40,
}


def make_row(*values: float | None) -> list:
    record = {**RECORD, **HASHED}
    return [Result(Path(f"seed_{seed}.json"), change(record, seed=seed, accuracy__raw__last__top1=value))
            for seed, value in enumerate(values)]  # fmt: skip


@pytest.mark.parametrize("words, message", [
    (["OPTIM.BASE_LR", "0.1"], "OPTIM.BASE_LR: changes the result of ROW"), (["RNG_SEED", "1"], "fix: use --seed"),
    (["PLUGINS", "./evil.py"], "PLUGINS: changes the result"), (["TRAIN.WORKER", "1"], "TRAIN.WORKERS"),
])  # fmt: skip
def test_an_option_that_changes_the_result_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        reproduce.check_overrides(words, "ROW")


@pytest.mark.project
def test_the_rows_with_hashes_are_of_the_configs_of_today():
    """If this fails after a recipe was edited, measure its row again; after an option was added, see `hash_default`."""
    rows = reproduce.read_rows(reproduce.RESULTS).values()
    runs = [run for row in rows for run in row if "weights_sha256" in run.record]
    assert runs
    for run in runs:
        _, _, file, _, _, *words = reproduce.build_command(run.record, run.record["seed"], [])
        cfg, training = load_cfg(file, words), run.record["training"]
        if hash_config(cfg) != run.record["config_hash"]:
            # The recipe has come to state what its run had without: the batch of its processes, the crop of its data.
            own_batch = cfg.TRAIN.BATCH_SIZE * training["processes"]
            assert cfg.TRAIN.GLOBAL_BATCH_SIZE == training["global_batch"] == own_batch, run.path
            words += ["TRAIN.GLOBAL_BATCH_SIZE", "0"]
            words += ["DATA.CROP", "auto"] if cfg.DATA.CROP == "resized" == dataset_class(cfg).crop else []
        assert hash_config(load_cfg(file, words)) == run.record["config_hash"], run.path


@pytest.mark.parametrize("changes, message", [
    ({"config": "../../evil"}, "config: got ../../evil in the row; expected a shipped config"),
    ({"overrides": {"PLUGINS": "./evil.py"}}, "overrides: got 'PLUGINS' in the row; expected options of a recipe"),
])  # fmt: skip
def test_a_record_of_others_names_no_code(changes, message):
    with pytest.raises(ConfigError, match=message):
        reproduce.build_command(change(RECORD, **changes), 0, [])


@each_row("row, rerun, is_reproduced, texts", [
    # The interval of 90, 91, 92 is 91 +- 2.48, that of one more run 91 +- 4.97.
    ((90, 91, 92), {}, True, ["bitwise equal, sha256 aaaa", "reproduced: bitwise"]),
    ((90, 91, 92), {"weights_sha256": {"raw": "b" * 64}}, False, ["no recorded condition differs", "NOT repro"]),
    ((90, 91, 92), {"weights_sha256": {"raw": "b"}, "environment__threads": 2}, True,
     ["environment.threads: 1 in the row, 2 here", "reproduced: inside the 95 % interval"]),
    ((90, 91, 92), {"weights_sha256": {"raw": "b"}, "versions__torch": "9"}, True, ["versions.torch: 2.14.1"]),
    ((90, 91, 92), {"weights_sha256": {"raw": "b"}, "commit": "d" * 40}, True, ["cccccccc in the row, dddddddd"]),
    ((90, 91, 92), {"weights_sha256": {"raw": "b"}, "environment__deterministic": False}, True, ["deterministic"]),
    ((90, 91, 92), {"seed": 7, "accuracy__raw__last__top1": 95}, True, ["of this seed", "of a single run"]),
    ((90, 91, 92), {"seed": 7, "accuracy__raw__last__top1": 97}, False, ["NOT reproduced: outside"]),
    ((90, 91, 92), {"seed": 7, "accuracy__raw__last__top1": None}, False, ["not decided: the result is unknown"]),
    ((90,), {"seed": 7}, False, ["not decided: the row has one seed"]),
])  # fmt: skip
def test_the_verdict(row, rerun, is_reproduced, texts):
    runs = make_row(*row)
    found, text = reproduce.compare_run(runs, change(runs[0].record, **rerun))
    flat = " ".join(text.split())
    assert found == is_reproduced and all(part in flat for part in texts), text


@pytest.mark.slow
def test_a_row_is_rerun_bitwise_and_a_finished_rerun_is_only_compared(tmp_path, shapes_folder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    data = ("DATA.NAME", "imagefolder", "TRAIN.DATASET", shapes_folder)
    small = ("OPTIM.MAX_EPOCH", 1, "OPTIM.WARMUP_EPOCHS", 0, "MODEL.KWARGS.width", 8, "TRAIN.WORKERS", 0)
    run_tool("train_net.py", "--cfg", ROOT / "configs/shapes/resnet14.yaml", *data, *small, "OUT_DIR", tmp_path / "row")
    (tmp_path / "row" / "results.json").rename(tmp_path / "seed_0.json")
    name = next(iter(reproduce.read_rows(tmp_path / "seed_0.json")))
    words = [sys.executable, ROOT / "benchmarks/reproduce.py", name, "--results", "seed_0.json", "TRAIN.DATASET",
             shapes_folder, "OUT_DIR", "again"]  # fmt: skip
    for more, status in (([], 0), ([], 0), (["--seed", "5"], 2)):  # OUT_DIR is of seed 0
        assert subprocess.run([*words, *more], cwd=tmp_path).returncode == status
