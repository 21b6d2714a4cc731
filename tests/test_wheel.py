"""The wheel: what it contains, and the commands of an installation outside the checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from support.runs import ROOT

pytestmark = pytest.mark.slow

SMALL = ("MODEL.KWARGS.width", 8, "OPTIM.MAX_EPOCH", 1, "OPTIM.WARMUP_EPOCHS", 0, "TRAIN.WORKERS", 0)


def run(*command: object, cwd: Path, check: bool = True, **env: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    environment |= {"OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=environment, timeout=300)
    assert not check or done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("setuptools")
    root = tmp_path_factory.mktemp("build")
    source = root / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("distribuuuu", "configs", "tools", "benchmarks", "docs", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "shipped"))
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", root, cwd=source)
    shutil.unpack_archive(next(root.glob("*.tar.gz")), root)
    unpacked = next(path for path in root.iterdir() if path.is_dir() and path != source)
    run(sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", root, cwd=unpacked)
    return next(root.glob("*.whl"))


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory) -> Path:
    """The folder of the programs of a virtual environment with the wheel; its other packages are those of the tests."""
    root = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", root, cwd=root)
    packages = next((root / "lib").glob("python*/site-packages"))
    (packages / "tests.pth").write_text(sysconfig.get_path("purelib"))
    run(root / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel, cwd=root)
    return root / "bin"


def test_the_wheel_contains_the_shipped_files_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {name.removeprefix("distribuuuu/shipped/") for name in names if name.startswith("distribuuuu/shipped/")}
    benchmarks = [ROOT / "benchmarks" / "reported.yaml", *(ROOT / "benchmarks" / "results").rglob("*.json")]
    expected = [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "tools" / "slurm").iterdir(),
                *(ROOT / "tools").glob("*/*.yaml"), *benchmarks]  # fmt: skip
    assert shipped == {str(path.relative_to(ROOT)) for path in expected}
    code = {name for name in names if name.startswith("distribuuuu/") and not name.startswith("distribuuuu/shipped/")}
    found = [*(ROOT / "distribuuuu").rglob("*.py"), *(ROOT / "distribuuuu").rglob("templates/*")]
    assert code == {str(path.relative_to(ROOT)) for path in found}
    assert all(name.startswith(("distribuuuu/", "distribuuuu-")) for name in names)


def test_the_commands_of_an_installation(programs, tmp_path):
    command = programs / "distribuuuu"
    assert run(command, cwd=tmp_path).stdout.startswith("usage: distribuuuu COMMAND")
    wrong = run(command, "train", "--cfg", "shapes/resnet41", cwd=tmp_path, check=False)
    assert wrong.returncode == 2 and "did you mean shapes/resnet14.yaml" in wrong.stderr
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    train = ("train", "--cfg", "shapes/resnet14", "OUT_DIR", "r", *SMALL)
    done = run(command, *train, "--nproc", 2, cwd=tmp_path, **cache)
    assert "launcher: --nproc, process 0 of 2" in done.stderr
    results = json.loads((tmp_path / "r" / "results.json").read_text())
    assert (results["config"], results["commit"]) == ("shapes/resnet14", None)
    words = done.stderr.partition("next: ")[2].partition("\n")[0].split()
    assert words[:2] == ["distribuuuu", "test"]
    assert "validation of 500 images" in run(command, *words[1:], cwd=tmp_path, **cache).stderr
    assert "| imagenet2021/resnet50 " in run(command, "table", "--configs", "imagenet2021", cwd=tmp_path).stdout
