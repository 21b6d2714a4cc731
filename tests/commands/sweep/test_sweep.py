"""The command sweep: its errors, the best config, the cores of jobs, and a sweep that is killed and stopped."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import RESULT_S, wait_for
from support.runs import ROOT, problems_of, records, small_options

from distribuuuu.commands.sweep import executors
from distribuuuu.commands.sweep.executors import LocalExecutor, plan_slots
from distribuuuu.commands.sweep.sweep import parse_args, plan_sweep, sweep, write_outcome
from distribuuuu.commands.sweep.trials import Job, RunState, build_rows
from distribuuuu.config import ConfigError, get_cfg, load_cfg
from distribuuuu.config.config_node import iter_options


def fixed_options(images: Path, *overrides) -> list[str]:
    """Return the options of a small run without OUT_DIR and the learning rate."""
    words = small_options(images, Path(), *overrides)
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    return [word for key in pairs if key not in ("OUT_DIR", "OPTIM.BASE_LR") for word in (key, pairs[key])]


def parse(*words) -> None:
    parse_args("sweep", [str(word) for word in words])


def test_all_problems_are_reported_at_once(image_folder, tmp_path):
    small = fixed_options(image_folder)
    words = ("OPTIM.MOMENTM=0.8,0.9", "OPTIM.WEIGHT_DECAY=log:0:1", "DATA.FLIP=lin:0:1")
    assert problems_of(parse, "--tirals", "3", *words, *small) == [
        "command line: no such flag: --tirals; did you mean --trials?",
        "OPTIM.WEIGHT_DECAY: got log:0:1; expected LOW > 0 for a logarithmic range; fix: use lin",
        "--trials: is missing; DATA.FLIP is a range; fix: add --trials 20",
        "OUT_DIR: is missing; fix: add OUT_DIR exp/my_sweep",
        "OPTIM.MOMENTM (command line): no such key; did you mean OPTIM.MOMENTUM?",
    ]
    swept = ("OPTIM.MAX_EPOCH=3,4", "OPTIM.WARMUP_EPOCHS", 0, "TRAIN.AUTO_RESUME", False, "OUT_DIR", tmp_path)
    asha, resume = problems_of(parse, *swept, "--asha", 3, "TRAIN.DATASET", image_folder)
    assert asha.startswith("OPTIM.MAX_EPOCH: cannot be swept with --asha") and resume.startswith("TRAIN.AUTO_RESUME")
    (none,) = problems_of(parse, *small, "OUT_DIR", tmp_path, "OPTIM.BASE_LR=1,2", "OPTIM.MAX_EPOCH", "0")
    assert none == "OPTIM.MAX_EPOCH: got 0; expected 1 or more: a trial without epochs has no result"
    assert "has no value" in problems_of(parse, "OPTIM.BASE_LR=1,2", *small, "OUT_DIR")[-1]
    (url,) = problems_of(parse, "OPTIM.BASE_LR=1,2", *small, "OUT_DIR", "s3://bucket/sweep")
    assert url.startswith("OUT_DIR") and "expected a local path" in url
    for flags, said in ((("--trials", "9"), "--trials: got 9"), (("--asha", "3"), "--asha: got 3 for 2 trials of 2")):
        args = parse_args("sweep", [*flags, "OPTIM.BASE_LR=1,2", *small, "OUT_DIR", str(tmp_path)])
        with pytest.raises(ConfigError, match=said):
            plan_sweep(*args)


def test_names_of_all_trials_are_checked_before_the_first_start(image_folder, tmp_path):
    small = fixed_options(image_folder, "OPTIM.KWARGS.caution", True, "MODEL.NUM_CLASSES", 0)
    small = [word for word in small if word not in ("MODEL.ARCH", "resnet8")]
    words = ["OPTIM.NAME=sgd,adamw,adamm", "MODEL.ARCH=resnet8,resnte14", *small, "OUT_DIR", str(tmp_path)]
    args = parse_args("sweep", words)
    expected = [
        "OPTIM.KWARGS.caution (command line): sgd has no such argument; ",
        "MODEL.ARCH (command line): unknown model 'resnte14'; did you mean resnet14",
        "OPTIM.KWARGS.caution (command line): adamw has no such argument; ",
        "OPTIM.NAME (command line): unknown optimizer 'adamm'; did you mean adam",
    ]
    for problem, start in zip(problems_of(plan_sweep, *args), expected, strict=True):
        assert problem.startswith(start)
    (tmp_path / "sweep.json").write_text("{}")
    assert len(plan_sweep(*args).trials) == 6, "a sweep that has begun continues"


def test_the_best_config_is_a_config_file_of_what_differs_from_the_defaults(image_folder, tmp_path):
    small = fixed_options(image_folder, "MODEL.KWARGS.width", 4)
    words = [*small, "FINETUNE.LR_MULT", "{'layer1.*': 2}", "OPTIM.STEPS", "[1, 2]", "TEST.METRICS", "topk,top1"]
    args = ["OPTIM.BASE_LR=0.1,0.2", "OPTIM.NESTEROV=true,false", *words, "OUT_DIR", str(tmp_path), "--seeds", "2"]
    plan = plan_sweep(*parse_args("sweep", args))
    assert (plan.metric, plan.higher_is_better, plan.seeds, plan.rungs) == ("top3", True, (3, 4), ())
    values = {0: 3.0, 1: 5.0, 2: 9.0, 3: float("nan")}
    write_outcome(plan, build_rows(plan, {(trial, 3): RunState(2, {2: value}) for trial, value in values.items()}))
    best = load_cfg(str(tmp_path / "best.yaml"))
    expected = load_cfg(None, [*words, "OPTIM.BASE_LR", "0.2", "OUT_DIR", f"{tmp_path}/best"])
    assert best == expected and best.OPTIM.BASE_LR == 0.2 and best.OPTIM.NESTEROV
    assert len((tmp_path / "best.yaml").read_text().splitlines()) < 45 < len(list(iter_options(get_cfg())))
    rows = json.loads((tmp_path / "sweep_results.json").read_text())["rows"]
    assert [(row["trial"], row["objective"]) for row in rows] == [(2, 9.0), (1, 5.0), (0, 3.0), (3, None)]


def test_jobs_share_the_cores_and_the_gpus_evenly(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores, gpus = [0, 1, 2, 3, 6, 7], ["4", "5", "6", "7"]
    slots = [(own, env["OMP_NUM_THREADS"]) for own, env in plan_slots(2, 1, cores, [])]
    assert slots == [({0, 1, 2}, "3"), ({3, 6, 7}, "3")]
    slots = [env for _, env in plan_slots(2, 2, cores, gpus)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in slots] == ["4,5", "6,7"] and slots[0]["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert plan_slots(1, 1, cores, [])[0][1] == {"OMP_NUM_THREADS": "5"}


@pytest.fixture
def start():
    started = []

    def run(out: Path, *words: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "distribuuuu", "sweep", *words, "OUT_DIR", str(out)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, cwd=ROOT, env=env, **streams))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def list_runs(out: Path) -> list[str]:
    lines = {path.parent.name: path for path in Path("/proc").glob("[0-9]*/cmdline")}
    return [pid for pid, path in lines.items() if f"{out}/trial_".encode() in read(path)]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_run_and_continues_and_a_failed_trial_is_listed(start, image_folder, tmp_path):
    small = fixed_options(image_folder, "MODEL.KWARGS.width", 4, "OPTIM.MAX_EPOCH", 12)
    out, words = tmp_path / "out", ("MODEL.KWARGS.norm=group,nope", *small)
    folder = out / "trial_000" / "seed_3"
    sweep = start(out, *words)
    wait_for(lambda: (folder / "metrics.jsonl").exists() and len(records(folder)) > 5)
    sweep.kill()
    sweep.communicate()
    wait_for(lambda: not list_runs(out))
    assert "SIGTERM: stopped in epoch" in (folder / "console.log").read_text().splitlines()[-1]
    sweep = start(out, *words)
    output = sweep.communicate(timeout=RESULT_S)[0]
    assert sweep.returncode == 0, output
    assert (folder / "console.log").read_text().count("resumed from") == 1
    rows = json.loads((out / "sweep_results.json").read_text())["rows"]
    assert [(row["trial"], row["status"], row["epochs"]) for row in rows] == [(0, "finished", 12), (1, "failed", 0)]
    assert "got norm 'nope'" in rows[1]["failures"]["3"] and "got norm 'nope'" in output
    assert (out / "trial_001" / "seed_3" / "failed.txt").read_text() == "2\n"
    assert load_cfg(str(out / "best.yaml")).MODEL.KWARGS.norm == "group"


def test_the_runs_of_a_sweep_know_its_plug_ins_by_absolute_paths(image_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "own.py").write_text("")
    (tmp_path / "own.yaml").write_text("PLUGINS: [./own.py]\n")
    words = ["--cfg", str(tmp_path / "own.yaml"), "OPTIM.BASE_LR=0.1,0.2", *fixed_options(image_folder)]
    plan = plan_sweep(*parse_args("sweep", [*words, "OUT_DIR", str(tmp_path / "out")]))
    command = plan.job(0, 3, 1).command
    assert command[command.index("PLUGINS") + 1] == f"['{tmp_path}/own.py']"


def test_a_run_that_the_system_does_not_start_is_reported_as_that(image_folder, tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(executors, "start_child", refuse)
    words = ["OPTIM.BASE_LR=0.1,0.2", *map(str, fixed_options(image_folder)), "OUT_DIR", str(tmp_path / "out")]
    (problem,) = problems_of(sweep, "sweep", words)
    assert problem.startswith(f"OUT_DIR: a run in {tmp_path / 'out'} cannot be started: Resource temporarily")


def test_the_output_of_a_run_is_not_written_through_a_link(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "console.log").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="console.log"):
        LocalExecutor(1).update([Job(0, 0, 1, tmp_path, (sys.executable, "-c", "print(1)"))])
    assert (tmp_path / "victim").read_text() == "mine"
