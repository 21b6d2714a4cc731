"""The command sweep: its errors, the choices of Optuna, failures, kills, several processes, the table and the page."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.predictions import Page, change
from support.processes import RESULT_S, wait_for
from support.runs import ROOT, assert_same_run, problems_of, records, small_options
from support.tables import each_row, slow

pytest.importorskip("optuna", reason="pip install 'distribuuuu[sweep]'")
from distribuuuu.commands.sweep import study as module
from distribuuuu.commands.sweep import sweep as command
from distribuuuu.commands.sweep.study import NUM_SEEDED, Row, Study, build_sweep_page, list_cells, summarize
from distribuuuu.commands.sweep.sweep import Plan, list_ends, open_sweep, parse_space, plan_rungs
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.files.untrusted import InvalidFileError
from distribuuuu.launch.signals import RunStopped
from distribuuuu.trainer import train_model

LR = "OPTIM.BASE_LR=log:0.001:1"
RECORD = json.loads((ROOT / "benchmarks/results/shapes/resnet14/seed_0.json").read_text())


def fixed_options(images: Path, *overrides) -> list[str]:
    """Return the options of a small run without OUT_DIR and the learning rate."""
    words = small_options(images, Path(), *overrides)
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    return [word for key in pairs if key not in ("OUT_DIR", "OPTIM.BASE_LR") for word in (key, pairs[key])]


def parse(*words) -> Plan:
    return Plan("sweep", [str(word) for word in words])


@pytest.fixture
def make_plan(image_folder, tmp_path):
    """Return make_plan(WORD, ...): the plan of a sweep of runs of eight epochs, which is begun in tmp_path/out."""

    def make(*words, epochs: int = 8) -> Plan:
        options = fixed_options(image_folder, "OPTIM.MAX_EPOCH", epochs)
        plan = parse(*words, *options, "OUT_DIR", tmp_path / "out")
        open_sweep(plan)
        return plan

    return make


# ------------------------------------------------------------------------------------ command line


def test_all_problems_are_reported_at_once(image_folder, tmp_path, monkeypatch):
    small = fixed_options(image_folder)
    words = ("OPTIM.MOMENTM=0.8,0.9", "OPTIM.WEIGHT_DECAY=log:0:1", "DATA.FLIP=lin:0:1")
    flag, decay, *others = problems_of(parse, "--tirals", "3", *words, *small)
    assert flag == "command line: no such flag: --tirals; did you mean --trials?"
    assert decay.startswith("OPTIM.WEIGHT_DECAY: got 'log:0:1'; `low > 0` must hold")
    assert others == [
        "--trials: is missing; DATA.FLIP is a range; fix: add --trials 20",
        "OUT_DIR: is missing; fix: add OUT_DIR exp/my_sweep",
        "OPTIM.MOMENTM (command line): no such key; did you mean OPTIM.MOMENTUM?",
    ]
    swept = ("OPTIM.MAX_EPOCH=3,4", "OPTIM.WARMUP_EPOCHS", 0, "OUT_DIR", tmp_path)
    (asha,) = problems_of(parse, *swept, "--asha", 3, "TRAIN.DATASET", image_folder)
    assert asha.startswith("OPTIM.MAX_EPOCH: cannot be swept with --asha")
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert problems_of(parse, *words) == ["sweep: optuna is not installed; fix: pip install 'distribuuuu[sweep]'"]


@each_row("words, message", [
    ("OPTIM.BASE_LR=1,2 OUT_DIR s3://bucket/sweep", "expected a local path"),
    ("OPTIM.BASE_LR=1,2 --asha 3", "--asha: got 3; expected at most the trials and the epochs"),
])  # fmt: skip
def test_mistakes_are_found_before_the_first_start(image_folder, tmp_path, words, message):
    keys = [word.partition("=")[0] for word in words.split()]
    small = fixed_options(image_folder)
    small = [word for pair in zip(small[::2], small[1::2], strict=True) if pair[0] not in keys for word in pair]
    out_dir = () if "OUT_DIR" in keys else ("OUT_DIR", tmp_path)
    problems = problems_of(parse, *words.split(), *small, *out_dir)
    assert any(message in problem for problem in problems), problems


@each_row("words, message", [
    ("A.B=", "expected values a,b,c or a range"), ("A.B=1", "to fix a value, write KEY VALUE"),
    ("A.B=1,,2", "expected values a,b,c"), ("A.B=1,1", "expected values a,b,c"), ("A.B=log:1:1", "LOW < HIGH"),
    ("A.B=lin:nan:1", "LOW < HIGH"), ("A.B=lin:1:inf", "LOW < HIGH"), ("A.B=lin:a:b", "float"),
    ("A.B=int:1:2", "or a range log:LOW:HIGH"), ("A.B=log:0:1", "low > 0"), ("A.B=lgo:1:2", "or a range log:LOW:HIGH"),
    ("A.B=1,2 A.B=3,4", "is given twice"), ("A.B=1,2 A.B 3", "is given twice"),
    ("RNG_SEED=1,2", "--seeds N"), ("OUT_DIR x", "no option is swept"),
])  # fmt: skip
def test_a_wrong_space_is_explained(words, message):
    _, _, problems = parse_space(words.split())
    assert len(problems) == 1 and message in str(problems[0])


def test_arguments_are_divided_into_fixed_and_swept_ones():
    words = ["OUT_DIR", "exp/lr=1", "OPTIM.BASE_LR=0.1, 0.2", "OPTIM.STEPS=[1, 2],[3]", "RNG_SEED", "3"]
    fixed, space, problems = parse_space([*words, "FINETUNE.LR_MULT.layer[12].*=log:1e-3:1"])
    assert fixed == ["OUT_DIR", "exp/lr=1", "RNG_SEED", "3"] and problems == []
    assert space["OPTIM.BASE_LR"].choices == ("0.1", "0.2") and space["OPTIM.STEPS"].choices == ("[1, 2]", "[3]")
    ends = [trial["FINETUNE.LR_MULT.layer[12].*"] for trial in list_ends(space)]
    assert ends == ["0.001", "1"]


def test_rungs_leave_a_trial_for_the_last_epoch():
    assert plan_rungs(14, 3, 20) == (2, 6) and plan_rungs(14, 3, 8) == (5,) and plan_rungs(14, 3, 2) == ()
    assert plan_rungs(14, 3, 20, 4) == (4, 12) and plan_rungs(14, 3, 20, 14) == ()
    assert plan_rungs(2, 3, 20) == () and plan_rungs(9, 3, 81) == (1, 3) and plan_rungs(9, 0, 81) == ()


def test_a_folder_belongs_to_one_sweep(make_plan, tmp_path):
    plan = make_plan(LR, "--trials", 3)
    make_plan(LR, "--trials", 5)  # more trials continue a sweep
    for more in (("--seeds", 2), ("OPTIM.MOMENTUM", 0.5), ("--asha", 2)):
        with pytest.raises(ConfigError, match="describes the sweep of other arguments, of another"):
            make_plan(LR, "--trials", 3, *more)
    for content, message in (("", "sweep.json"), ('{"schema": 1}', "or of an older version; fix: set another OUT_DIR")):
        (tmp_path / "out/sweep.json").write_text(content)
        with pytest.raises(ConfigError, match=message):
            open_sweep(plan)
    (tmp_path / "out/checkpoints").mkdir()
    with pytest.raises(ConfigError, match="is the folder of a run"):
        open_sweep(plan)


def test_a_config_that_is_edited_meanwhile_ends_the_sweep(make_plan, monkeypatch, tmp_path):
    (tmp_path / "own.yaml").write_text("OPTIM: {MOMENTUM: 0.5}\n")
    study = Study(make_plan("--cfg", tmp_path / "own.yaml", "OPTIM.BASE_LR=0.1,0.2"))
    runs = Runs(monkeypatch, lambda lr, epoch: (tmp_path / "own.yaml").write_text("OPTIM: {MOMENTUM: 0.9}\n") / 1)
    with pytest.raises(ConfigError, match="describes the sweep of other arguments, of another"):
        study.run()
    assert len(runs.started) == 1


# ------------------------------------------------------------------------------- trials, without training


class Runs:
    """Runs whose objective is a function of (learning rate, epoch); a status instead of one ends the run early."""

    def __init__(self, monkeypatch, objective):
        self.objective, self.started, self.options = objective, [], []
        monkeypatch.setattr(module, "start_child", self.start)

    def start(self, words, name, env, **streams):
        words = words[words.index("train") + 1 :]
        stop = int(words[words.index("--stop-epoch") + 1]) if "--stop-epoch" in words else None
        options = dict(zip(words[-2::-2], words[::-2], strict=False))
        folder, epochs = Path(options["OUT_DIR"]), stop or int(options["OPTIM.MAX_EPOCH"])
        self.started.append((folder.parent.name, folder.name, epochs))
        self.options.append(options)
        (folder / "checkpoints").mkdir(exist_ok=True)
        done = len(list((folder / "checkpoints").iterdir()))
        planned = int(options["OPTIM.MAX_EPOCH"])
        for epoch in range(done + 1, epochs + 1):
            value = self.objective(float(options.get("OPTIM.BASE_LR", 0)), epoch)
            if isinstance(value, int):
                return self.Ended(value)
            record = change(RECORD, finished=epoch == planned, training__epochs_done=epoch,
                            accuracy__raw__last__top1=None if math.isnan(value) else value)  # fmt: skip
            (folder / "results.json").write_text(json.dumps(record))
            (folder / "checkpoints" / f"ckpt_ep_{epoch:03d}.pth.tar").touch()
        return self.Ended(0)

    class Ended:
        def __init__(self, status):
            self.status = status

        def wait(self):
            return self.status

        def send_signal(self, signum):
            """Do nothing: it has ended."""


def good_at(lr: float, epoch: int) -> float:
    """Return an objective that is best at 0.1."""
    return 90.0 - abs(math.log10(lr) + 1) * 10 + epoch


def values_of(rows) -> list[str]:
    return [row.values_of["OPTIM.BASE_LR"] for row in sorted(rows, key=lambda row: row.trial)]


@pytest.mark.parametrize("sampler", [slow("tpe"), "random", slow("sobol")])
def test_a_sampler_continues_after_a_restart_and_with_more_trials(make_plan, monkeypatch, sampler, tmp_path):
    runs = Runs(monkeypatch, good_at)
    words = (LR, "OPTIM.NAME=sgd,adamw", "--sampler", sampler)
    Study(make_plan(*words, "--trials", 6)).run()
    study = Study(make_plan(*words, "--trials", 14))
    study.run()
    found = values_of(study.rows())
    assert len(runs.started) == 14 and len({*found}) == 14 and all(0.001 <= float(lr) <= 1 for lr in found)
    assert {options["OPTIM.NAME"] for options in runs.options} == {"sgd", "adamw"}
    assert study.rows()[0].objective > 90 and study.importance().keys() == {"OPTIM.BASE_LR", "OPTIM.NAME"}
    if sampler != "tpe":  # they do not depend on results
        (tmp_path / "out").rename(tmp_path / "first")
        study = Study(make_plan(*words, "--trials", 14))
        study.run()
        assert values_of(study.rows()) == found


def test_pruned_trials_are_paused_and_the_best_are_repeated(make_plan, monkeypatch):
    runs = Runs(monkeypatch, good_at)
    words = (LR, "--trials", 16, "--asha", 2, "--sampler", "sobol", "--seeds", 3)
    study = Study(make_plan(*words))
    study.run()
    rows = study.rows()
    assert Counter(row.status for row in rows).keys() == {"paused", "finished"}
    assert {row.epochs for row in rows if row.status == "paused"} <= {1, 2, 4}
    finished = [row for row in rows if row.status == "finished"]
    num_repeated = sum(row.seeds.keys() == {3, 4, 5} for row in rows)
    assert rows[: len(finished)] == finished and num_repeated == min(NUM_SEEDED, len(finished)) > 1
    ends = Counter(runs.started)
    assert max(ends.values()) == 1, "each part of a run is trained once"
    before = len(runs.started)
    Study(make_plan(*words)).run()
    assert len(runs.started) == before


class Killed(BaseException):
    """The process of a sweep is killed."""


@pytest.mark.parametrize("place", ["enqueue_trial", "ask", "report", "should_prune", "tell"])
def test_a_trial_whose_process_is_killed_is_continued_and_counts_once(make_plan, monkeypatch, place):
    """The rungs are those of an undisturbed sweep: a continued trial has one value in each."""
    words = (LR, "--trials", 8, "--asha", 2, "--sampler", "random")
    if place == "enqueue_trial":
        words = ("OPTIM.BASE_LR=0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8", "--asha", 2)
    runs, calls = Runs(monkeypatch, good_at), Counter()
    import optuna

    owner = optuna.trial.Trial if place in ("report", "should_prune") else optuna.study.Study
    original = getattr(owner, place)

    def call(self, *args, **options):
        calls[place] += 1
        if calls[place] == 4 and place not in ("enqueue_trial", "ask"):
            raise Killed
        result = original(self, *args, **options)
        if calls[place] == 4:
            raise Killed
        return result

    monkeypatch.setattr(owner, place, call)
    with pytest.raises(Killed):
        Study(make_plan(*words)).run()
    study = Study(make_plan(*words))
    study.run()
    trials = study._study.get_trials()
    assert [trial.number for trial in trials] == list(range(8)) and len({*values_of(study.rows())}) == 8
    assert all(trial.state.name in ("PRUNED", "COMPLETE") for trial in trials)
    reached = Counter(key for trial in trials for key in trial.system_attrs if key.startswith("completed_rung"))
    assert reached["completed_rung_0"] == 8
    assert max(Counter(runs.started).values()) <= 1 + (place == "report")


def test_failed_killed_and_diverged_runs_are_listed_and_the_rest_goes_on(make_plan, monkeypatch):
    def objective(lr: float, epoch: int):
        return {0.1: 1, 0.2: -9, 0.3: math.nan if epoch == 8 else 5.0, 0.4: 50.0}[lr]

    runs = Runs(monkeypatch, objective)
    plan = make_plan("OPTIM.BASE_LR=0.1,0.2,0.3,0.4")
    study = Study(plan)
    study.run()
    rows = {row.trial: row for row in study.rows()}
    assert [rows[trial].status for trial in range(4)] == ["failed", "failed", "finished", "finished"]
    assert [rows[trial].error for trial in (0, 1)] == ["exit status 1", "exit status -9"]
    assert rows[3].seeds == {3: 50.0} and [row.trial for row in study.rows()][0] == 3
    runs.objective = lambda lr, epoch: 60.0
    study = Study(plan)
    study.run()
    assert Counter(runs.started)["trial_000", "seed_3", 8] == 2, "a new start tries it again"
    assert [row.status for row in study.rows()] == ["finished"] * 4 and len(runs.started) == 6


def test_the_lowest_value_of_a_metric_may_be_the_best(make_plan, monkeypatch):
    Runs(monkeypatch, lambda lr, epoch: lr)
    study = Study(make_plan("OPTIM.BASE_LR=0.8,0.7,0.6,0.5,0.9", "--asha", 2, "TEST.METRICS", "[ece]"))
    study.run()
    assert [(row.trial, row.status[0]) for row in study.rows()] == [(3, "f"), (2, "f"), (1, "f"), (0, "f"), (4, "p")]


def test_a_torn_line_of_the_journal_is_removed_and_a_damaged_one_reported(make_plan, monkeypatch, tmp_path):
    runs = Runs(monkeypatch, good_at)
    plan = make_plan("OPTIM.BASE_LR=0.1,0.2")
    Study(plan).run()
    journal = tmp_path / "out/study.journal"
    content = journal.read_bytes()
    journal.write_bytes(content + b'{"op_code": 4, "study')
    study = Study(plan)
    study.run()
    assert len(study.rows()) == len(runs.started) == 2
    journal.write_bytes(b"[1]\n" + content)
    with pytest.raises(InvalidFileError, match="study.journal: not a valid journal of Optuna"):
        Study(plan)


# ------------------------------------------------------------------------------------------ results


def test_the_table_and_the_page(make_plan, tmp_path):
    hostile = "RuntimeError: <script>alert(1)</script>"
    plan = make_plan(LR, "OPTIM.NAME=sgd,adamw", "--trials", 9, "--asha", 3, "--seeds", 2, epochs=9)
    values = {"OPTIM.BASE_LR": "0.1", "OPTIM.NAME": "adamw"}
    rows = [Row(2, "finished", 9, 9, {3: 92.0, 4: 94.0}, 93.0, "", values),
            Row(3, "paused", 3, 9, {}, 81.5, "", values),
            Row(4, "failed", 1, 9, {}, None, hostile, values)]  # fmt: skip
    page = build_sweep_page(plan, rows, {"OPTIM.BASE_LR": 0.7, "OPTIM.NAME": 0.3})
    texts = Page(page).texts
    assert hostile in texts and "<script>alert" not in page
    for text in ("Summary", "Trials", "Best config: trial 2", "Importance of the options", "70 %", "93.00",
                 "3/9"):  # fmt: skip
        assert text in texts, text
    empty = Page(build_sweep_page(plan, [Row(5, "running", 0, 9, {}, None, "", {})], {})).texts
    assert any(text.startswith("1 trial: 1 running") for text in empty)
    lines = list_cells(plan, rows)
    assert lines[0] == ["trial", "status", "epochs", "top1", "seeds", *values, "error"] and len(lines) == 4
    assert lines[1] == ["2", "finished", "9/9", "93", "2", "0.1", "adamw", ""] and lines[3][-1] == hostile
    assert summarize(rows) == "best: trial 2; 3 trials: 1 paused, 1 finished, 1 failed; 13 of 27 epochs"


def test_the_best_config_and_the_table_are_files(image_folder, tmp_path, monkeypatch, capsys):
    Runs(monkeypatch, lambda lr, epoch: {0.1: 3.0, 0.2: 9.0}[lr])
    words = [*fixed_options(image_folder, "MODEL.KWARGS.width", 4), "FINETUNE.LR_MULT", "{'layer1.*': 2}"]
    (tmp_path / "own.py").write_text("")
    (tmp_path / "own.yaml").write_text("PLUGINS: [./own.py]\n")
    out = ["--cfg", str(tmp_path / "own.yaml"), "OUT_DIR", str(tmp_path / "out")]
    assert command.sweep("sweep", ["OPTIM.BASE_LR=0.1,0.2", *words, *out]) == 0
    best = load_cfg(str(tmp_path / "out/best.yaml"))
    assert best == load_cfg(out[1], [*words, "OPTIM.BASE_LR", "0.2", "OUT_DIR", f"{tmp_path}/out/best"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:3] == [["1", "finished", "2/2", "9", "1", "0.2"], ["0", "finished", "2/2", "3", "1", "0.1"]]
    assert lines[3][-1] == f"{tmp_path}/out/best.yaml" and (tmp_path / "out/sweep.html").is_file()
    Runs(monkeypatch, lambda lr, epoch: 1)
    failed = ["OUT_DIR", str(tmp_path / "failed")]
    assert command.sweep("sweep", ["OPTIM.BASE_LR=0.1,0.2", *words, *failed]) == 1


# -------------------------------------------------------------------------------------- real runs


@pytest.fixture
def start():
    started = []

    def run(out: Path, *words: str) -> subprocess.Popen:
        line = [sys.executable, "-m", "distribuuuu", "sweep", *words, "OUT_DIR", str(out)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(line, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, **streams))
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
def test_a_killed_sweep_leaves_no_run_and_continues_bitwise(start, image_folder, tmp_path):
    small = fixed_options(image_folder, "MODEL.KWARGS.width", 4, "OPTIM.MAX_EPOCH", 12)
    out, words = tmp_path / "out", ("MODEL.KWARGS.norm=group,nope", *small)
    folder = out / "trial_000" / "seed_3"
    for stop, status in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        known = len(records(folder)) if (folder / "metrics.jsonl").exists() else 0
        sweep = start(out, *words)
        wait_for(lambda known=known: (folder / "metrics.jsonl").exists() and len(records(folder)) > known + 5)
        sweep.send_signal(stop)
        sweep.communicate()
        wait_for(lambda: not list_runs(out))
        assert sweep.returncode == status and ": stopped in epoch" in (folder / "console.log").read_text()
    sweep = start(out, *words)
    output = sweep.communicate(timeout=RESULT_S)[0]
    assert sweep.returncode == 0, output
    assert (folder / "console.log").read_text().count("resumed from") == 2
    assert re.search(r"\n +0  finished +12/12 .*\n +1 +failed +0/12 .* got norm 'nope'", output), output
    best = load_cfg(str(out / "best.yaml"))
    train_model(best)
    assert_same_run(best.OUT_DIR, folder)


@pytest.mark.slow
def test_processes_join_a_sweep_and_continue_the_run_of_a_killed_one(start, image_folder, tmp_path):
    small = fixed_options(image_folder, "MODEL.KWARGS.width", 4, "OPTIM.MAX_EPOCH", 6)
    words = (LR, *small, "--trials", "3", "--asha", "2")
    out = tmp_path / "out"
    first = start(out, *words)
    wait_for(lambda: (out / "trial_000/seed_3/metrics.jsonl").exists())
    second = start(out, *words)
    wait_for(lambda: (out / "trial_001/seed_3/metrics.jsonl").exists())
    first.kill()
    output = second.communicate(timeout=RESULT_S)[0]
    assert second.returncode == 0 and len(re.findall(r"\n +\d +(?:paused|finished) ", output)) == 3, output


def test_a_signal_between_two_runs_stops_the_sweep(make_plan, monkeypatch):
    runs = Runs(monkeypatch, good_at)
    study = Study(make_plan("OPTIM.BASE_LR=0.1,0.2"))
    runs.objective = lambda lr, epoch: study._stop(signal.SIGTERM) or 5.0
    with pytest.raises(RunStopped, match="SIGTERM"):
        study.run()
    assert len(runs.started) == 1
