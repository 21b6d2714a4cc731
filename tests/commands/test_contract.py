"""The contract of every command: a mistake is one message and status 2, early; a hostile folder executes nothing."""

import json
import os

import pytest
import torch
from support.commands import is_deleted
from support.runs import run_python

from distribuuuu.commands.main import dispatch, find_commands

# The arguments before those of a test, of commands that need some.
BEFORE = {
    "predict": ["{run}", "{image}"], "export": ["{run}", "--format", "safetensors", "--out", "{out}"],
    "calibrate": ["{run}"], "probe": ["{run}"],
    "report": ["{run}"], "compare": ["{run}", "{other}"], "track": ["{run}"], "table": ["{run}"], "test": ["{run}"],
    "finetune": ["{images}"], "embed": ["{run}", "{image}", "--out", "{out}.npz"],
    "split": ["{images}", "--val", "0.2", "--out", "{out}"], "doctor": ["{images}"], "pack": ["{out}"],
    "sweep": ["OPTIM.BASE_LR=1,2", "OUT_DIR", "{out}"],
}  # fmt: skip
TAKE_OPTIONS = [name for name in find_commands() if name not in ("report", "compare", "track", "table", "split")]
READ_RUNS = ("test", "predict", "calibrate", "export", "probe", "report", "compare", "track", "table", "embed")


def words_of(name: str, **places: object) -> list[str]:
    if is_deleted(name):
        pytest.skip(f"{name} has been deleted")
    return [name, *(word.format(**places) for word in BEFORE.get(name, []))]


@pytest.fixture
def refuse(capsys):
    """Return refuse(WORD, ...): run a command that must end with status 2 and one message; return the message."""

    def run(*words: object) -> str:
        status = dispatch("distribuuuu", list(map(str, words)))
        printed = capsys.readouterr()
        assert status == 2 and "Traceback" not in printed.err, printed.err
        assert "to solve first" in printed.err
        return printed.err

    return run


@pytest.fixture
def places(tmp_path, finished_run, image_folder) -> dict[str, object]:
    images = {"images": image_folder / "train", "image": next(image_folder.rglob("*.jpg"))}
    return {"run": finished_run, "other": tmp_path, "out": tmp_path / "o", **images}


@pytest.mark.parametrize("name", find_commands())
def test_an_unknown_flag_is_an_error(name, refuse, places):
    assert "no such flag: --frobnicate" in refuse(*words_of(name, **places), "--frobnicate")


@pytest.mark.parametrize("name", TAKE_OPTIONS)
def test_a_misspelled_option_is_answered_with_the_nearest(name, refuse, places):
    assert "TEST.IM_SIZ" in (said := refuse(*words_of(name, **places), "TEST.IM_SIZ", 3)) and "TEST.IM_SIZE" in said


def test_a_wrong_folder_is_reported_before_torch_is_imported(tmp_path):
    places = dict.fromkeys(("run", "other", "images", "image"), tmp_path / "no" / "such") | {"out": tmp_path / "out"}
    lines = [words_of(name, **places) for name in (*READ_RUNS, "doctor", "split", "finetune") if not is_deleted(name)]
    lines.append(["pack", str(tmp_path / "out"), "TRAIN.DATASET", str(tmp_path / "no" / "such")])
    code = "import json, sys; from distribuuuu.commands.main import dispatch\n"
    code += "for words in json.loads(sys.argv[1]): print(words[0], dispatch('d', words), 'torch' in sys.modules)"
    done = run_python("-c", code, json.dumps([words for words in lines if not is_deleted(words[0])]))
    answers = [line.split() for line in done.stdout.splitlines()]
    assert len(answers) >= 8 and not [answer for answer in answers if answer[1:] != ["2", "False"]], done
    assert done.stderr.count("no such") >= len(answers) and not os.listdir(tmp_path)


@pytest.mark.parametrize("name", READ_RUNS)
def test_a_hostile_run_folder_is_refused_and_executes_nothing(name, refuse, tmp_path, image_folder):
    run, mark = tmp_path / "run", tmp_path / "executed"
    (run / "checkpoints").mkdir(parents=True)
    (tmp_path / "own.py").write_text(f"open({str(mark)!r}, 'w')")
    (run / "config.yaml").write_text(f"PLUGINS: [{tmp_path}/own.py]\nMODEL: {{ARCH: resnet8, NUM_CLASSES: 3}}\n")

    class Evil:
        def __reduce__(self):
            return open, (str(mark), "w")

    torch.save({"state_dict": Evil()}, run / "best.pth.tar")
    (run / "predictions.npz").write_bytes(b"PK\x03\x04" + bytes(99))
    (run / "results.json").write_text("[" * 9999)
    (run / "metrics.jsonl").write_text('{"kind": ')
    words = words_of(name, run=run, other=tmp_path, image=next(image_folder.rglob("*.jpg")), out=tmp_path / "out")
    assert "run" in refuse(*words) and not mark.exists() and not (tmp_path / "out").exists()
