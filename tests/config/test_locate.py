"""Location of config files: the current folder, ./configs, and those that are shipped with the package."""

from pathlib import Path

import pytest
from support.runs import ROOT

from distribuuuu.config import ConfigError, load_cfg, locate
from distribuuuu.config.locate import find_config, shipped_file
from distribuuuu.hints.words import suggest_configs
from distribuuuu.records.results import config_name

SHIPPED = str(ROOT / "configs" / "shapes" / "resnet14.yaml")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, text: str = "OUT_DIR: mine\n") -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def test_a_shipped_config_is_found_by_its_name():
    for name in ("shapes/resnet14", "shapes/resnet14.yaml", "configs/shapes/resnet14.yaml",
                 "./configs/shapes/resnet14", "shapes//resnet14"):  # fmt: skip
        assert find_config(name) == SHIPPED
        cfg = load_cfg(name)
        assert cfg.DATA.NAME == "shapes" and config_name(cfg) == "shapes/resnet14"


@pytest.mark.parametrize("mine", ["shapes/resnet14", "shapes/resnet14.yaml", "configs/shapes/resnet14.yaml"])
def test_a_file_of_the_current_folder_wins(mine):
    write(mine)
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
        assert suggest_configs(f"configs/{path}").startswith(f"; did you mean configs/{meant}")


def test_the_files_of_a_wheel_are_in_the_package(monkeypatch, tmp_path):
    assert shipped_file("configs") == ROOT / "configs"
    write("package/shipped/configs/shapes/resnet14.yaml")
    monkeypatch.setattr(locate, "_PACKAGE", tmp_path / "package")
    assert shipped_file("benchmarks/reported.yaml") == tmp_path / "package" / "shipped" / "benchmarks" / "reported.yaml"
    assert load_cfg("shapes/resnet14").OUT_DIR == "mine"
    assert suggest_configs("shapes/resnet41") == "; did you mean shapes/resnet14.yaml?"
