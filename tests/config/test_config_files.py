"""Files of configs and runs: where they are found, bases, several files of --cfg, and names of a run's own files."""

import os
from pathlib import Path

import pytest
from support.runs import ROOT, problems_of

from distribuuuu.commands.arguments import parse_args
from distribuuuu.config import ConfigError, load_cfg, locate, run_files
from distribuuuu.config.explain import dump_with_origins
from distribuuuu.config.locate import FoundConfig, ListedConfig, find_config, shipped_file
from distribuuuu.config.run_files import RUN_FILES, find_name_problem, find_path_problem
from distribuuuu.hints.words import suggest_configs
from distribuuuu.records.results import config_name
from distribuuuu.trainer import evaluate_weights as evaluate_model
from distribuuuu.trainer import train_model


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(**files: str) -> None:
    for name, text in files.items():
        write_config(f"{name}.yaml", text)


def write_config(path: str, text: str = "OUT_DIR: mine\n") -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


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
        parse_args(None, [*words, "--dump-config", "OPTIM.BASE_LR", "3"], train=True)
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


def test_a_base_may_be_a_shipped_config_and_plug_ins_are_beside_their_own_file(folder):
    write_config("base/plug.py", "")
    write(**{"base/a": "PLUGINS: [plug.py]\n", "top": "_BASE_: [shapes/resnet14, base/a]\nOUT_DIR: x\n"})
    cfg = load_cfg("top.yaml")
    assert cfg.PLUGINS == (str(folder / "base" / "plug.py"),) and cfg.DATA.NAME == "shapes"


def test_wrong_bases_name_the_chain():
    write(
        one="_BASE_: two.yaml\n", two="_BASE_: one.yaml\n", gone="_BASE_: twoo.yaml\n",
        user="RNG_SEED: 1\n_BASE_: gone.yaml\n", number="_BASE_: 3\n", map="_BASE_: {a: 1}\n",
        broken="_BASE_: bad.yaml\n", bad="OPTIM: {BASE_LRR: 1}\n", folder="_BASE_: .\n", home="_BASE_: ~/root\n",
    )  # fmt: skip
    for name, said in {
        "one": "_BASE_ (two.yaml:1): got a file that is its own base: one.yaml -> two.yaml -> one.yaml; fix: remove",
        "user": "_BASE_ (gone.yaml:1): no such file: user.yaml -> gone.yaml -> twoo.yaml; did you mean two.yaml",
        "number": "_BASE_ (number.yaml:1): got 3; expected the path of a YAML file, or a list of paths",
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
    assert load_cfg(ListedConfig("config.yaml")).RNG_SEED == 1, "a folder of configs, which the user names, may"


SHIPPED = str(ROOT / "configs" / "shapes" / "resnet14.yaml")


def test_a_shipped_config_is_found_by_its_name():
    for name in ("shapes/resnet14", "shapes/resnet14.yaml", "configs/shapes/resnet14.yaml",
                 "./configs/shapes/resnet14", "shapes//resnet14"):  # fmt: skip
        assert find_config(name) == SHIPPED
        cfg = load_cfg(name)
        assert cfg.DATA.NAME == "shapes" and config_name(cfg) == "shapes/resnet14"
    assert find_config("configs/transfer/grocery.yaml") == str(ROOT / "configs/from_scratch/grocery.yaml"), "moved"


@pytest.mark.parametrize("mine", ["shapes/resnet14", "shapes/resnet14.yaml", "configs/shapes/resnet14.yaml"])
def test_a_file_of_the_current_folder_wins(mine):
    write_config(mine)
    assert load_cfg("shapes/resnet14").OUT_DIR == "mine"


def test_other_paths_stay_as_they_are():
    for path in ("../shapes/resnet14", "../configs/shapes/resnet14.yaml", "/shapes/resnet14.yaml",
                 "/configs/shapes/resnet14", "shapes", "resnet14", ""):  # fmt: skip
        assert find_config(path) == path
    with pytest.raises(ConfigError, match="no such file"):  # beside the shipped configs
        load_cfg("../benchmarks/reported.yaml")


def test_a_wrong_name_lists_the_nearest_configs(monkeypatch, tmp_path):
    for path, meant in {
        "shapes/resnet41": "shapes/resnet14.yaml", "imagnet/resnet50_a1.yaml": "imagenet/resnet50_a1.yaml",
        "resnet50_a1": "imagenet/resnet50_a1.yaml?", "config/resnet18.yaml": "imagenet2021/resnet18.yaml?",
        "imagenet2021/botnet5O": "imagenet2021/botnet50.yaml", "shapes": "shapes/resnet14.yaml?",
    }.items():  # fmt: skip
        monkeypatch.chdir(tmp_path)
        assert suggest_configs(path).startswith(f"; did you mean {meant}")
        assert str(ROOT) not in suggest_configs(path)
        monkeypatch.chdir(ROOT)
        assert suggest_configs(f"configs/{path}").startswith(f"; did you mean {meant}")


def test_the_files_of_a_wheel_are_in_the_package(monkeypatch, tmp_path):
    assert shipped_file("configs") == ROOT / "configs"
    write_config("package/shipped/configs/shapes/resnet14.yaml")
    monkeypatch.setattr(locate, "_PACKAGE", tmp_path / "package")
    assert shipped_file("benchmarks/reported.yaml") == tmp_path / "package" / "shipped" / "benchmarks" / "reported.yaml"
    assert load_cfg("shapes/resnet14").OUT_DIR == "mine"
    assert suggest_configs("shapes/resnet41") == "; did you mean shapes/resnet14.yaml?"


@pytest.mark.slow
def test_every_file_that_a_run_writes_is_in_the_list(small_cfg, tmp_path):
    cfg = small_cfg("LOG.TENSORBOARD", True, "EMA.HALF_LIFE", 100, "TRAIN.AUTO_RESUME", False, "OPTIM.MAX_EPOCH", 1)
    train_model(cfg)
    train_model(cfg)
    evaluate_model(cfg)
    found = {path.name for path in (tmp_path / "out").iterdir()} - {cfg.CFG_DEST}
    assert [name for name in found if not run_files.is_run_file(name)] == [] and "checkpoints.1" in found
    assert set(RUN_FILES) - found == {run_files.STACKS, run_files.TRACKERS_FOLDER}, "on a hang, and with LOG.TRACKERS"


def test_a_name_that_is_no_plain_file_name_or_one_of_the_run_is_refused():
    for name in ("", " ", "..", "a/b", "a\nb", "a\u202eb", "~x", ".x", *RUN_FILES, "best_ema.pth.tar", "x.tmp"):
        assert "expected" in (find_name_problem(name) or ""), name
    for name in ("config.yaml", "cfg.txt", "my run.yaml", "\u65e5\u672c.yaml", "bestof.yaml", "console"):
        assert find_name_problem(name) is None, name


def test_a_url_and_the_root_in_any_spelling_are_no_folder_for_a_run(tmp_path):
    for scheme in ("s3", "gs", "hf", "http", "https", "file", "S3", "abfs", "host"):
        assert "expected a local path" in find_path_problem(f"{scheme}://bucket/run")
    (tmp_path / "link").symlink_to("/")
    for path in ("/", "//", "/.", "/tmp/..", str(tmp_path / "link")):
        assert "root of the file system" in find_path_problem(path)
    for path in ("exp", ".", "/tmp", "C:/runs", "exp/lr=0.1:2", "host:runs"):
        assert find_path_problem(path) is None
