"""Deletion of the optional commands in a copy of the project: nothing that remains needs them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import OPTIONAL_COMMANDS
from support.runs import ROOT

pytestmark = pytest.mark.slow

# What only optional commands use; it is deleted with the last of them.
SHARED = [f"{folder}/commands/{name}" for folder in ("distribuuuu", "tests") for name in ("html", "scan", "stats")]
SHARED += ["tests/commands/test_output.py", "tests/test_reproduce.py"]  # train needs a part of output.py
IGNORED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "*.egg-info", "exp", "data")
# Tests of the project's rules and of the list of commands.
ALWAYS = ("tests/test_repo.py", "tests/commands/test_main.py", "tests/commands/test_output.py")


def copy_project(target: Path) -> Path:
    shutil.copytree(ROOT, target, ignore=lambda folder, names: IGNORED(folder, names) if Path(folder) == ROOT else
                    {name for name in names if name == "__pycache__"})  # fmt: skip
    return target


def delete(root: Path, paths) -> None:
    for path in {root / name for name in paths}:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def run(root: Path, *words: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run([sys.executable, *words], cwd=root, env=env, capture_output=True, text=True)


def find_tests(root: Path, words) -> list[str]:
    """Return the test files that import a module of one of the commands; only they can need what is deleted."""
    if not words:
        return []
    pattern = re.compile(rf"""commands\.({"|".join(words)})\b|command_module\("({"|".join(words)})\b""")
    files = [path for path in sorted((root / "tests").rglob("test_*.py")) if path.name != "test_deletion.py"]
    return [str(path.relative_to(root)) for path in files if pattern.search(path.read_text())]


def check_rest(root: Path, deleted, *more: str) -> None:
    """Check the list of commands, and run the default-tier tests that may have used what is deleted."""
    listed = run(root, "-m", "distribuuuu", "--help")
    names = re.findall(r"^  (\w+)  ", listed.stdout, re.MULTILINE)
    assert {"train", "test"} <= {*names} and not {*names} & {*deleted}, listed
    files = [*(name for name in ALWAYS if (root / name).exists()), *more, *find_tests(root, deleted)]
    done = run(root, "-m", "pytest", "-n", "0", "-q", *files)
    assert done.returncode == 0, done.stdout[-5000:]


def check_project(root: Path, *files: str) -> None:
    """Check the rules of the project; what holds without all commands holds without one of them."""
    done = run(root, "-m", "pytest", "-n", "0", "-q", "-m", "project", "tests/test_repo.py", *files)
    assert done.returncode == 0, done.stdout[-5000:]


def check_collection(root: Path) -> None:
    """Check that all remaining tests can be collected, so that none needs what is deleted when it is imported."""
    collected = run(root, "-m", "pytest", "-n", "0", "-q", "--collect-only", "-m", "")
    assert collected.returncode == 0, collected.stdout[-3000:]


# No command imports another, and all of them can be deleted; these two are needed by most tests of others.
@pytest.mark.parametrize("name", ["pack", "report"])
def test_a_command_can_be_deleted_with_its_tests_and_its_page(name, tmp_path):
    root = copy_project(tmp_path / "copy")
    delete(root, OPTIONAL_COMMANDS[name])
    check_rest(root, [other for other, paths in OPTIONAL_COMMANDS.items() if paths == OPTIONAL_COMMANDS[name]])


def test_all_optional_commands_can_be_deleted(tmp_path):
    root = copy_project(tmp_path / "copy")
    delete(root, [path for paths in OPTIONAL_COMMANDS.values() for path in paths] + SHARED)
    check_collection(root)  # with all of them deleted, this need not be repeated for each
    check_rest(root, list(OPTIONAL_COMMANDS), "tests/test_docs.py")
    check_project(root, "tests/test_docs.py")


def test_the_mirror_of_runs_can_be_deleted(tmp_path):
    root = copy_project(tmp_path / "copy")
    delete(root, ["distribuuuu/mirror", "tests/mirror"])
    refused = run(root, "-m", "distribuuuu", "train", "OUT_DIR", "s3://bucket/run")
    assert refused.returncode == 2 and "OUT_DIR" in refused.stderr and "expected a local path" in refused.stderr
    check_collection(root)
    check_rest(root, [], "tests/config/test_reader.py", "tests/inference/test_load_run.py")
    check_project(root)
