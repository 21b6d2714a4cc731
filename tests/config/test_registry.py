"""Tables of names: discovered late, each name once, a typo answered with what is near."""

import sys

import pytest
from support.runs import run_python

from distribuuuu.config import ConfigError
from distribuuuu.config.registry import DATASETS, Registry


def make_package(root, name, files):
    package = root / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    for file, text in files.items():
        (package / file).write_text(text)


REGISTERS = "from {package} import TABLE\n@TABLE.register\ndef {name}(): return {name!r}\n"


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A registry over a package of two files that register, and one that must not be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"things_{tmp_path.name}"
    make_package(tmp_path, name, {"slow.py": "raise ImportError('must be left alone')\n"})
    table = Registry("TABLE", "thing", name)
    (tmp_path / name / "__init__.py").write_text("TABLE = None\n")
    module = __import__(name)
    module.TABLE = table
    for thing in ("apple", "pear"):
        (tmp_path / name / f"{thing}.py").write_text(REGISTERS.format(package=name, name=thing))
    return table


def test_files_that_register_are_found_and_others_left_alone(table):
    assert table.names() == ["apple", "pear"]
    assert table.get("pear")() == "pear"
    assert f"{table.package}.pear" in sys.modules and f"{table.package}.apple" not in sys.modules
    assert "apple" in table and "plum" not in table


def test_a_name_in_two_files_of_the_package_is_refused(table, tmp_path):
    (tmp_path / table.package / "fruit.py").write_text(REGISTERS.format(package=table.package, name="pear"))
    with pytest.raises(ConfigError, match="thing 'pear' is registered twice: in things_.*fruit and in .*pear; fix: "):
        table.get("pear")


def test_an_unknown_name_lists_the_near_ones_or_all(table):
    with pytest.raises(LookupError, match="unknown thing 'aple'; did you mean apple?"):
        table.get("aple")
    with pytest.raises(LookupError, match="known: apple, pear"):
        table.get("zzz")


def test_the_names_of_the_data_sets_are_known_without_torch():
    code = "import sys, distribuuuu.config.registry as r; r.DATASETS.names(); sys.exit('torch' in sys.modules)"
    assert run_python("-c", code).returncode == 0
    known = "cifar10 cifar100 dummy fashion_mnist imagefolder list mnist multilabel packed shapes"
    assert {*known.split()} <= {*DATASETS.names()}
