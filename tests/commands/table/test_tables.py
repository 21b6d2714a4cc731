"""Tables of results: statistics, grouping of runs, messages, and blocks of a README."""

import json
import re
import shlex
import sys
from pathlib import Path

import make_table
import pytest
import yaml
from support.predictions import change
from support.recipe_facts import BASELINES, RECIPES
from support.runs import ROOT

from distribuuuu.commands.main import start_command
from distribuuuu.config import ConfigError
from distribuuuu.inference.locate_run import locate_run
from distribuuuu.records.read_results import read_results

ONE_RUN = "93.00 [92.48, 93.48] (n = 1)"
EVALUATION = {"epoch": 7, "top1": 93.0, "topk": 99.5, "loss": 0.2}
RECORD = {
    "schema": 1, "kind": "training", "finished": True, "config": "fashion_mnist/resnet14", "overrides": {},
    "config_hash": "a1b2c3d4e5f6", "seed": 0, "model": {"arch": "resnet14", "params_m": 0.68625},
    "data": {"name": "fashion_mnist", "folder": "data", "num_classes": 10, "num_train": 60000, "num_val": 10000},
    "evaluation": {"resize": 28, "crop": 28, "interpolation": "bilinear", "k": 5, "count": 10000,
                   "metrics": {"top1": "top1", "topk": "top5"}},
    "accuracy": {"raw": {"last": EVALUATION, "best": {**EVALUATION, "epoch": 6, "top1": 93.4}}},
    "training": {"px": 28, "epochs_done": 7, "epochs_planned": 7, "global_batch": 64, "processes": 1, "hours": 0.2,
                 "images_per_s": 1500.0},
    "peak_memory": {"mib": 700.0, "of": "host"}, "hardware": "EPYC, 2 cores", "versions": {"torch": "2.7.0"},
    "commit": "0123456789abcdef",
}  # fmt: skip


def save(path: Path, **changes) -> Path:
    """Write a record with changes, e.g. `training__hours=2`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(change(RECORD, **changes)))
    return path


def seeds(folder: Path, *top1: float, **changes) -> None:
    for seed, value in enumerate(top1):
        save(folder / f"seed_{seed}.json", seed=seed, accuracy__raw__last__top1=value, **changes)


@pytest.fixture
def make(capsys):
    """Return make(ARG, ...): exit status, the table as a list of {column: cell}, and standard error."""

    def call(*args):
        status = start_command("table", "table", [str(arg) for arg in args])
        out, err = capsys.readouterr()
        return status, rows_of(out), err

    return call


def rows_of(text: str) -> list[dict[str, str]]:
    """Return the rows of a Markdown table, {column: cell}."""
    lines = [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def test_mean_and_sample_deviation_over_the_seeds(make, tmp_path):
    assert read_results(save(tmp_path / "seed_0.json")) == RECORD
    seeds(tmp_path, 93.0, 94.0, 92.0)
    save(tmp_path / "seed_1.json", seed=1, accuracy__raw__last__top1=94.0, training__hours=0.5, peak_memory__mib=900.0,
         training__images_per_s=None)  # fmt: skip
    status, rows, err = make(tmp_path)
    assert (status, err) == (0, "")
    assert rows == [{
        "config": "fashion_mnist/resnet14", "params (M)": "0.686", "px": "28 → 28/28", "epochs": "7",
        "global batch": "64", "top-1 here": "93.00 ± 1.00 [90.52, 95.48] (n = 3)",
        "top-5 here": "99.50 ± 0.00", "hours": "0.3",
        "images/s": "1,500", "peak memory": "900 MiB", "hardware": "EPYC, 2 cores", "commit": "0123456",
    }]  # fmt: skip


def test_a_terminal_shows_what_was_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert start_command("table", "table", [str(save(tmp_path / "a.json"))]) == 0
    header, row, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["config", "epochs", "top-1", "here"] and "|" not in header and ONE_RUN in row
    save(tmp_path / "a.json", overrides={f"MODEL.KWARGS.option_{number}": number for number in range(9)})
    assert start_command("table", "table", [str(tmp_path / "a.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and ONE_RUN in lines[1] and lines[2].startswith("  MODEL.KWARGS.option_")


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_names_in_the_files_of_runs_are_escaped(tmp_path, capsys, form):
    odd = "a\x1b[2J\u202e\nb"
    for number in range(2):
        save(tmp_path / f"{number}/results.json", config=odd, data__folder=f"{odd}{number}", hardware=odd, commit=odd)
    save(tmp_path / odd / "results.json", finished=False)
    assert start_command("table", "table", [f"{tmp_path}/*", "--format", form]) == 0
    out, err = capsys.readouterr()
    assert not {"\x1b", "\u202e"} & set(out + err) and "\nb" not in out + err and "a\\x1b[2J\\u202e" in out


def test_the_average_of_the_weights_counts_where_every_run_has_it(make, tmp_path):
    ema = {"last": {**EVALUATION, "top1": 95.0}, "best": EVALUATION}
    raw = RECORD["accuracy"]["raw"]
    save(tmp_path / "seed_0.json", accuracy={"raw": raw, "ema": ema})
    save(tmp_path / "seed_1.json", seed=1, accuracy={"raw": raw, "ema": ema})
    assert make(tmp_path)[1][0]["top-1 here"] == "95.00 ± 0.00 [95.00, 95.00] (n = 2, EMA)"
    save(tmp_path / "seed_1.json", seed=1)
    assert make(tmp_path)[1][0]["top-1 here"] == "93.00 ± 0.00 [93.00, 93.00] (n = 2)"


def test_the_folds_of_a_config_are_one_row(make, tmp_path):
    for fold, top1 in enumerate((90.0, 92.0, 94.0), 1):
        save(tmp_path / f"{fold}/results.json", data__folder=f"fold_{fold}", data__num_val=100 + fold,
             data__num_train=400 - fold, accuracy__raw__last__top1=top1)  # fmt: skip
    assert [row["top-1 here"] for row in make(tmp_path)[1]] == ["92.00 ± 2.00 [87.03, 96.97] (n = 3, 3 folds)"]
    assert make(tmp_path / "1")[1][0]["top-1 here"].endswith("(n = 1)")


def test_only_runs_of_one_config_batch_and_data_are_averaged(make, tmp_path):
    save(tmp_path / "a" / "results.json")
    save(tmp_path / "b" / "results.json", seed=1, config_hash="ffff0000ffff")
    save(tmp_path / "c" / "results.json", seed=2, training__global_batch=128)
    save(tmp_path / "d" / "results.json", seed=3, data__num_train=50000)
    save(tmp_path / "e" / "results.json", seed=4, config_hash="e", overrides={"OPTIM.MAX_EPOCH": 9})
    save(tmp_path / "f" / "results.json", seed=5, data__folder="photos")
    save(tmp_path / "g" / "results.json", accuracy__raw__last__top1=99.0)
    (tmp_path / "e" / "test_results.json").write_text("{}")
    _, rows, err = make(tmp_path, tmp_path / "a", f"{tmp_path}/[b-f]")  # each run and seed once
    assert f"{tmp_path}/g/results.json: skipped: seed 0 is already in {tmp_path}/a/results.json" in err
    assert {row["top-1 here"] for row in rows} == {ONE_RUN}
    names = sorted(row["config"] for row in rows)
    assert all(name.startswith("fashion_mnist/resnet14 (config a1b2c3d4; ") for name in names[:4])
    assert "50000 + 10000 images" in names[0] and "photos, 60000 + 10000" in names[3]
    assert names[4].startswith("fashion_mnist/resnet14 (config ffff0000; ")
    assert names[5] == "fashion_mnist/resnet14, OPTIM.MAX_EPOCH 9"


def test_a_sweep_has_a_row_for_each_finished_trial_and_one_message(make, tmp_path):
    (tmp_path / "sweep.json").write_text("{}")
    for trial in range(5):
        changes = {"config_hash": f"{trial}", "overrides": {"OPTIM.BASE_LR": trial}, "finished": trial < 2}
        for seed in range(3 if trial == 0 else 1):
            top1 = 95.0 - trial + seed / 10
            save(tmp_path / f"trial_00{trial}" / f"seed_{seed}" / "results.json", seed=seed,
                 accuracy__raw__last__top1=top1, **changes)  # fmt: skip
    with pytest.raises(ConfigError) as error:  # names this command
        locate_run(str(tmp_path))
    status, rows, err = make(re.search(r"fix: distribuuuu table (\S+), or open \S+/sweep.html$", str(error.value))[1])
    found = [(row["config"].partition(", ")[2], row["top-1 here"].partition(" (")[2]) for row in rows]
    assert (status, found) == (0, [("OPTIM.BASE_LR 0", "n = 3)"), ("OPTIM.BASE_LR 1", "n = 1)")])
    first = f"{tmp_path}/trial_002/seed_0/results.json (7 of 7 epochs), "
    assert err.startswith(f"skipped, as they are not finished: {first}")
    assert err.count("results.json") == 3 and err.count("\n") == 1


def test_bad_input_is_reported_line_by_line_and_the_rest_is_shown(make, tmp_path):
    save(tmp_path / "seed_0.json")
    (tmp_path / "seed_1.json").write_text('{"schema": 1')
    save(tmp_path / "seed_2.json", schema=2)
    save(tmp_path / "seed_3.json", training__hours="long")
    (tmp_path / "empty").mkdir()
    status, rows, err = make(tmp_path, tmp_path / "empty", tmp_path / "seed_9.json")
    assert status == 2 and rows[0]["top-1 here"] == ONE_RUN
    lines = err.splitlines()
    assert lines[0] == "5 problems to solve first:" and len(lines) == 6
    parts = ["empty: contains no results.json or seed_*.json", "seed_9.json: no such file or folder; did you mean"]
    parts += ["seed_1.json: invalid JSON", "got schema 2", "`training.hours`: got 'long'"]
    for part in parts:
        assert part in err


def test_what_was_reported_is_the_published_table():
    reported = yaml.safe_load(make_table.REPORTED.read_text())
    names = {name for name in reported if name.startswith("imagenet")}
    assert names == {f"imagenet2021/{name}" for name in BASELINES} | {f"imagenet/{name}" for name in RECIPES}
    for name, recipe in RECIPES.items():
        entry = reported[f"imagenet/{name}"]
        assert tuple(entry[key] for key in ("top1", "top5") if key in entry) == recipe["reported"], name
        assert entry["params"] == f"{recipe['params']:.3f}", name
    table = make_table.make_table([], [str(ROOT / "configs" / "imagenet2021")])
    rows = {row["config"]: row for row in rows_of(table)}
    for name, (_, params, global_batch, *_, top1, top5) in BASELINES.items():
        entry = reported[f"imagenet2021/{name}"]
        assert (entry["params"], entry["global_batch"]) == (params, global_batch)
        row = rows[f"imagenet2021/{name}"]
        assert (row["top-1 reported"], row["top-5 reported"], row["global batch"]) == (top1, top5, str(global_batch))
        assert row["px"] == "224 → 256/224"


ZOO = "docs/MODEL_ZOO.md"
BLOCKS = re.findall(r"^<!-- table (\S+) -->\n<!-- made by: (.+) -->$", (ROOT / ZOO).read_text(), re.MULTILINE)
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*/*/seed_*.json"))


@pytest.mark.parametrize(("name", "command"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_the_tables_of_the_model_zoo_are_what_the_tool_makes(name, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    args = shlex.split(command)[2:]
    assert args[-4:] == ["--readme", ZOO, "--name", name]
    runs, _, configs = " ".join(args[:-4]).partition("--configs")
    table = make_table.make_table(runs.split(), configs.split())
    made = f"<!-- made by: {command} -->\n\n{table}\n<!-- /table -->"
    assert made in (ROOT / ZOO).read_text(), f"made anew by: {command}"


def test_every_table_of_the_model_zoo_names_its_command_and_every_result_is_in_one():
    text = (ROOT / ZOO).read_text()
    assert len(BLOCKS) == len(re.findall("^<!-- table ", text, re.MULTILINE)) > 0
    assert "<!-- table " not in (ROOT / "README.md").read_text()
    shown = [word for _, command in BLOCKS for word in shlex.split(command)[2:]]
    for path in RESULTS:
        folders = [str(folder.relative_to(ROOT)) for folder in (path, *path.parents[:3])]
        assert set(folders) & set(shown), f"{path} is in no table"
        record = read_results(path)
        assert record["finished"] and path.stem == f"seed_{record['seed']}"
        assert record["commit"] and not record["commit"].endswith("+changes"), f"{path}: of uncommitted code"
