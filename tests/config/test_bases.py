"""Bases of configs and several files of --cfg: the order of merging, origins, errors, and what runs store."""

import json
import os

import pytest
from support.commands import command_module
from support.errors import problems_of
from support.runs import small_options

from distribuuuu.commands.arguments import parse_args
from distribuuuu.config import load_cfg
from distribuuuu.config.explain import dump_with_origins
from distribuuuu.config.locate import FoundConfig
from distribuuuu.records.results import config_name
from distribuuuu.trainer import train_model


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(**files: str) -> None:
    for name, text in files.items():
        with open(f"{name}.yaml", "w") as file:
            file.write(text)


def test_later_files_win_and_a_shared_base_is_merged_once():
    write(
        c="OPTIM: {BASE_LR: 1, MAX_EPOCH: 10, MOMENTUM: 0.1}\nRNG_SEED: 7\n",
        a="_BASE_: c.yaml\nOPTIM: {BASE_LR: 2, MAX_EPOCH: 20}\n", b="_BASE_: ./c\nOPTIM: {MAX_EPOCH: 30}\n",
        top="OPTIM: {STEPS: [1]}\n_BASE_: [a.yaml, b.yaml]\n",
    )  # fmt: skip
    cfg = load_cfg("top.yaml", ["OPTIM.MOMENTUM", "0.5"])
    assert (cfg.OPTIM.BASE_LR, cfg.OPTIM.MAX_EPOCH, cfg.OPTIM.MOMENTUM, cfg.OPTIM.STEPS) == (2, 30, 0.5, (1,))
    dumped = dump_with_origins(cfg)
    for line in ("BASE_LR: 2.0  # ./a.yaml:2, base of top.yaml:2", "MAX_EPOCH: 30  # ./b.yaml:2, base of top.yaml:2",
                 "MOMENTUM: 0.5  # command line", "STEPS: [1]  # top.yaml:1",
                 "RNG_SEED: 7  # ./c.yaml:2, base of ./a.yaml:1, base of top.yaml:2"):  # fmt: skip
        assert line.replace("./", "") in dumped.replace("./", "")
    assert "_BASE_" not in dumped and config_name(cfg).endswith("/top")
    both = load_cfg(["a.yaml", "c.yaml"])
    assert (both.OPTIM.BASE_LR, both.RNG_SEED) == (1, 7), "a file of --cfg wins over the one before, also as its base"


def test_several_files_follow_one_flag(capsys):
    write(a="RNG_SEED: 1\nOUT_DIR: a\n", b="RNG_SEED: 2\n")
    for words in (["--cfg", "a.yaml", "b.yaml"], ["--cfg=a.yaml", "./b.yaml"], ["--cfg", "a", "b"]):
        parse_args("", [*words, "--dump-config", "OPTIM.BASE_LR", "3"], train=True)
        out = capsys.readouterr().out
        assert "RNG_SEED: 2" in out and "OUT_DIR: a " in out and "BASE_LR: 3.0" in out
    assert config_name(load_cfg(["a", "b"])).count("+") == 1


@pytest.mark.parametrize("text, kwargs", [
    ("MODEL: {ARCH: resnet20}", {}), ("MODEL: {ARCH: resnet8}", {"width": 8}),
    ("MODEL: {KWARGS: {width: 4}}", {"width": 4}), ("MODEL: {KWARGS: {}}", {}),
    ("MODEL: {KWARGS: {norm: bn}, ARCH: resnet20}", {"norm": "bn"}),
])  # fmt: skip
def test_arguments_of_a_base_belong_to_its_model(text, kwargs):
    write(base="MODEL: {ARCH: resnet8, KWARGS: {width: 8}}\nLOSS: {NAME: bce}\n", top=f"_BASE_: base.yaml\n{text}\n")
    cfg = load_cfg("top.yaml")
    assert cfg.MODEL.KWARGS == kwargs and ("MODEL.KWARGS.width" in cfg.origins) == ("width" in kwargs)


@pytest.mark.parametrize("test, expected", [(None, "b"), ("a", "a"), ("b", "b")])
def test_the_evaluation_set_follows_a_training_set_of_a_later_file(test, expected):
    write(a="TRAIN: {DATASET: a}\nTEST: {DATASET: a}\n",
          b="TRAIN: {DATASET: b}\n" + (f"TEST: {{DATASET: {test}}}\n" if test else ""))  # fmt: skip
    assert load_cfg(["a.yaml", "b.yaml"]).TEST.DATASET == expected


def test_a_base_may_be_a_shipped_config_and_plug_ins_are_beside_their_own_file(folder):
    (folder / "base").mkdir()
    (folder / "base" / "plug.py").write_text("")
    write(**{"base/a": "PLUGINS: [plug.py]\n", "top": "_BASE_: [shapes/resnet14, base/a]\nOUT_DIR: x\n"})
    cfg = load_cfg("top.yaml")
    assert cfg.PLUGINS == (str(folder / "base" / "plug.py"),) and cfg.DATA.NAME == "shapes"


def test_wrong_bases_name_the_chain():
    write(
        one="_BASE_: two.yaml\n", two="_BASE_: one.yaml\n", own="_BASE_: own.yaml\n", gone="_BASE_: twoo.yaml\n",
        user="RNG_SEED: 1\n_BASE_: gone.yaml\n", number="_BASE_: 3\n", empty="_BASE_: []\n", map="_BASE_: {a: 1}\n",
        broken="_BASE_: bad.yaml\n", bad="OPTIM: {BASE_LRR: 1}\n", folder="_BASE_: .\n", home="_BASE_: ~/root\n",
    )  # fmt: skip
    for name, said in {
        "one": "_BASE_ (two.yaml:1): got a file that is its own base: one.yaml -> two.yaml -> one.yaml; fix: remove",
        "own": "_BASE_ (own.yaml:1): got a file that is its own base: own.yaml -> own.yaml",
        "user": "_BASE_ (gone.yaml:1): no such file: user.yaml -> gone.yaml -> twoo.yaml; did you mean two.yaml",
        "number": "_BASE_ (number.yaml:1): got 3; expected the path of a YAML file, or a list of paths",
        "empty": "_BASE_ (empty.yaml:1): got []; expected the path",
        "map": "_BASE_.a (map.yaml:1): no such key",
        "broken": "OPTIM.BASE_LRR (bad.yaml:1, base of broken.yaml:1): no such key; did you mean OPTIM.BASE_LR",
        "folder": "_BASE_ (folder.yaml:1): no such file: folder.yaml -> .; did you mean ",
        "home": f"_BASE_ (home.yaml:1): no such file: home.yaml -> {os.path.expanduser('~/root')}",
    }.items():
        (problem,) = problems_of(load_cfg, f"{name}.yaml")
        assert problem.startswith(said)


def test_a_config_in_the_folder_of_a_run_names_no_base():
    write(config="_BASE_: secret.yaml\n", secret="RNG_SEED: 1\n")
    (problem,) = problems_of(load_cfg, FoundConfig("config.yaml"))
    assert problem.startswith("_BASE_ (config.yaml:1): got 'secret.yaml' in the folder of a run")
    read_configs = command_module("table.table").read_configs
    assert read_configs(["config.yaml"], [])[0].RNG_SEED == 1, "a folder of configs, which the user names, may"


def test_a_run_stores_the_merged_config(image_folder, folder):
    (folder / "configs").mkdir()
    write(
        **{"configs/base": "OPTIM: {BASE_LR: 0.01, MOMENTUM: 0.5}\n", "configs/top": "_BASE_: base.yaml\nRNG_SEED: 3\n"}
    )
    small = small_options(image_folder, folder / "out")
    cfg = load_cfg("configs/top.yaml", small)
    train_model(cfg)
    stored = (folder / "out" / "config.yaml").read_text()
    assert "_BASE_" not in stored and load_cfg(str(folder / "out" / "config.yaml")) == cfg
    assert json.loads((folder / "out" / "results.json").read_text())["config"] == "configs/top"


def test_a_sweep_stores_the_files_and_their_bases(image_folder, folder):
    sweep, trials = command_module("sweep.sweep"), command_module("sweep.trials")
    (folder / "configs").mkdir()
    write(**{"configs/base": "OPTIM: {MOMENTUM: 0.5}\n", "configs/top": "_BASE_: base.yaml\nRNG_SEED: 3\n"})
    (folder / "sweep").mkdir()
    small = small_options(image_folder, folder / "out")
    words = ["--cfg", "configs/top.yaml", "OPTIM.NESTEROV=true,false", *small[:-2], "OUT_DIR", "sweep"]
    plan = sweep.plan_sweep(*sweep.parse_args("sweep", words))
    trials.open_sweep(plan, sweep.read_files("configs/top.yaml")[1])
    copy = load_cfg("sweep/config/configs/top.yaml")
    assert (copy.OPTIM.MOMENTUM, copy.RNG_SEED, config_name(copy)) == (0.5, 3, "configs/top")
