"""Command line: each mistake is reported with its fix, with status 2 and without a traceback."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from support.images import draw_folder
from support.runs import ROOT, problems_of, run_tool, small_options

from distribuuuu.commands.arguments import parse_args
from distribuuuu.commands.main import dispatch
from distribuuuu.config import ConfigError, get_cfg

WRONG = {
    "a missing data folder": (["TRAIN.DATASET", "/no/such/folder"], "no such folder: /no/such/folder"),
    "an indivisible global batch": (["TRAIN.GLOBAL_BATCH_SIZE", 37], "fix: set it to"),
    "two of different kinds": (["TRAIN.FOO", 1, "TRAIN.SPLIT", "nowhere"], ("TRAIN.FOO", "no folder 'nowhere'")),
    "an output folder that is a file": (["OUT_DIR", "/etc/hostname/x"], "/etc/hostname is a file"),
}


@pytest.fixture
def refuse(capsys) -> Callable[..., str]:
    """Return refuse(word, ...): start a training whose exit status must be 2; return its standard error."""

    def train(*words: object) -> str:
        status = dispatch("distribuuuu", ["train", *map(str, words)])
        error = capsys.readouterr().err
        assert status == 2 and "Traceback" not in error, error
        return error

    return train


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_answered_with_its_remedy(case, image_folder, tmp_path, refuse):
    words, said = WRONG[case]
    error = refuse(*small_options(image_folder, tmp_path / "out"), *words)
    assert all(text in error for text in ((said,) if isinstance(said, str) else said)), error
    assert not (tmp_path / "out").exists(), "a run that cannot start leaves nothing behind"


@pytest.mark.slow
def test_one_process_of_many_tells_the_mistake():
    start = {"WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1", "RANK": "1"}
    assert run_tool("train_net.py", "NO.KEY", 1, **start).stderr == ""
    alone = run_tool("train_net.py", "--cfg", "missing.yaml", **start).stderr  # the first one has the file
    assert "process 1 on" in alone and "missing.yaml: no such file" in alone


def parse(*words: object) -> None:
    parse_args(None, [str(word) for word in words], train=True)


def test_an_unknown_flag_is_answered_with_the_nearest_flag_or_option():
    for words, meant in [
        (["--cgf", "x.yaml"], "did you mean --cfg?"),
        (["--weigth-decay", "1"], "did you mean OPTIM.WEIGHT_DECAY?"), (["--amp=1"], "did you mean TRAIN.AMP?"),
        (["-b", "64"], "options are KEY VALUE arguments; train --help-config lists them"),
    ]:  # fmt: skip
        (problem,) = problems_of(parse, *words, "--dump-config")
        assert problem == f"command line: no such flag: {words[0].partition('=')[0]}; {meant}"


@pytest.mark.parametrize("words", [
    ["OPTIM.BASE_LR", "0.7", "OPTIM.MAX_EPOCH", "30"], ["OPTIM.BASE_LR=0.7", "OPTIM.MAX_EPOCH=30"],
    ["--set", "OPTIM.BASE_LR", "0.7", "--set", "OPTIM.MAX_EPOCH=30"], ["--lr", "0.7", "--epochs=30"],
])  # fmt: skip
def test_an_option_is_given_in_four_ways(words, capsys):
    parse(*words, "--batch-size", "5", "--dump-config")
    out = capsys.readouterr().out
    assert all(f"{line}  # command line" in out for line in ("BASE_LR: 0.7", "MAX_EPOCH: 30", "BATCH_SIZE: 5"))


def test_the_resolved_config_is_dumped_with_origins_and_can_be_run_and_help_gives_the_meaning(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("TRAIN: {BATCH_SIZE: 32}\nTEST: {BATCH_SIZE: 200}\n")
    parse("--cfg", tmp_path / "a.yaml", "OPTIM.MOMENTUM", get_cfg().OPTIM.MOMENTUM, "--dump-config")
    out = capsys.readouterr().out
    lines = ("MOMENTUM: 0.9  # command line", f"BATCH_SIZE: 200  # {tmp_path}/a.yaml:2")
    assert all(f"  {line}\n" in out for line in lines) and out.count("  # ") == 3
    (tmp_path / "b.yaml").write_text(out)
    parse("--dump-config", "--cfg", tmp_path / "b.yaml")
    again = [line.partition("  # ")[0] for line in capsys.readouterr().out.splitlines()]
    assert again == [line.partition("  # ")[0] for line in out.splitlines()]
    parse("--help-config", "OPTIM.BASE_LR")
    assert capsys.readouterr().out.startswith("OPTIM.BASE_LR: 0.2\n    Base learning rate")


def test_an_empty_name_and_no_name_of_a_config_are_refused():
    for words in (["--cfg", ""], ["--cfg="], ["--cfg", "", "OPTIM.BASE_LR", 1]):
        (problem,) = problems_of(parse, *words, "--dump-config")
        assert problem.startswith("--cfg: got an empty name; expected a file; fix: ")
    (problem,) = problems_of(parse, "--cfg")
    assert problem == "command line: argument --cfg: expected one argument"


def test_every_unknown_flag_and_every_other_problem_is_reported_at_once():
    words = ["--wd", "0.1", "TRAIN.BATCH_SZE", 3, "--zzz"]
    flag, other, key = problems_of(parse, *words, "--dump-config")
    assert "no such flag: --wd" in flag and "no such flag: --zzz" in other and "TRAIN.BATCH_SZE" in key


def test_printing_into_a_closed_pipe_is_no_error_and_a_closed_connection_remains_one(capsys):
    before = signal.getsignal(signal.SIGPIPE)
    assert parse_args(None, ["--dump-config"], train=True)[0] is None and capsys.readouterr().out
    assert signal.getsignal(signal.SIGPIPE) == before
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, str(ROOT / "tools" / "train_net.py"), "--help-config"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_an_evaluation_takes_a_run_in_place_of_its_files(tmp_path, image_folder, monkeypatch, capsys):
    run = tmp_path / "exp" / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "ckpt_ep_001.pth.tar").touch()
    (run / "best.pth.tar").touch()
    text = f"MODEL: {{ARCH: resnet8, NUM_CLASSES: 3, WEIGHTS: /start.pth}}\nTRAIN: {{DATASET: {image_folder}}}"
    (run / "config.yaml").write_text(text)  # what the run started from is not what it came to
    for words, weights in (([run], None), ([run, "TEST.BATCH_SIZE", 3], None),
                           ([run, "MODEL.WEIGHTS", run / "best.pth.tar"], "best.pth.tar"),
                           ([run / "checkpoints" / "ckpt_ep_001.pth.tar"], "ckpt_ep_001.pth.tar")):  # fmt: skip
        cfg, _ = parse_args(None, [str(word) for word in words], train=False)
        assert (cfg.OUT_DIR, cfg.MODEL.ARCH) == (str(run), "resnet8")
        assert (cfg.MODEL.WEIGHTS or "").rpartition("/")[2] == (weights or "")
    parse("OUT_DIR", run, "--dump-config")  # a training run starts from the defaults
    assert "ARCH: resnet18\n" in capsys.readouterr().out
    draw_folder(tmp_path / "data", "val", {"ant": 1, "bee": 1, "cat": 1})
    cfg, _ = parse_args(None, [str(run), "TRAIN.DATASET", str(tmp_path / "data")], train=False)
    assert cfg.TEST.DATASET == cfg.TRAIN.DATASET == str(tmp_path / "data")
    other = str(tmp_path / "other")  # the results go there, config and best weights come from the run
    cfg, _ = parse_args(None, [str(run), "TEST.BATCH_SIZE", "3", "OUT_DIR", other], train=False)
    assert (cfg.OUT_DIR, cfg.MODEL.ARCH, cfg.MODEL.WEIGHTS) == (other, "resnet8", str(run / "best.pth.tar"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.json").touch()  # of a training: another run
    with pytest.raises(ConfigError, match="OUT_DIR: .*other holds another run, whose files stay"):
        parse_args(None, [str(run), "OUT_DIR", other], train=False)
    for folder, file in ((run, "best.pth.tar"), (run / "checkpoints", "ckpt_ep_001.pth.tar")):
        monkeypatch.chdir(folder)
        cfg, _ = parse_args(None, [file], train=False)
        assert (cfg.OUT_DIR, cfg.MODEL.ARCH, cfg.MODEL.WEIGHTS) == (str(run), "resnet8", file)
    (foreign := tmp_path / "exp" / "foreign.pth").touch()
    lacks = "no config.yaml in or above"
    for word, said in ((foreign.parent, lacks), (tmp_path / "none", "no such"), (foreign, f"{lacks} .*foreign.pth")):
        with pytest.raises(ConfigError, match=f"^RUN: .*{said}.*; expected the OUT_DIR of a run"):
            parse_args(None, [str(word)], train=False)
    with pytest.raises(ConfigError, match="'TEST.BATCH_SIZE' has no value"):  # named, not the run
        parse_args(None, [str(run), "TEST.BATCH_SIZE"], train=False)
    with pytest.raises(ConfigError, match="^(?!RUN).*TRAIN.TOPKK"):  # an option without its value is no run
        parse_args(None, ["TRAIN.TOPKK"], train=False)
