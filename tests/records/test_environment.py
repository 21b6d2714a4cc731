"""Environment of a run: git commit in several kinds of checkouts, hardware, versions."""

import subprocess

import pytest
import torch

from distribuuuu.records import environment
from distribuuuu.records.environment import describe_hardware, find_commit


def git(folder, *args: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", "-C", folder, *identity, *args], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def checkout(tmp_path):
    package = tmp_path / "repository" / "package"
    package.mkdir(parents=True)
    (package / "code.py").write_text("1\n")
    git(package.parent, "init", "-q")
    git(package, "add", ".")
    git(package, "commit", "-qm", "first")
    return package


def test_the_commit_is_that_of_the_code_and_says_if_the_code_was_changed(checkout, capfd):
    head = git(checkout, "rev-parse", "HEAD").strip()
    assert find_commit(checkout) == head
    (checkout.parent / "notes.txt").write_text("not code")
    assert find_commit(checkout) == head
    (checkout / "my_net.py").write_text("a new model\n")
    assert find_commit(checkout) == f"{head}+changes"
    (checkout / "my_net.py").unlink()
    (checkout / "code.py").write_text("2\n")
    assert find_commit(checkout) == f"{head}+changes"
    assert capfd.readouterr() == ("", "")


def test_no_commit_is_made_up(checkout, tmp_path, monkeypatch):
    assert find_commit(tmp_path) is None  # no repository
    installed = checkout.parent / ".venv" / "package"  # in a repository that is not its own
    installed.mkdir(parents=True)
    (installed / "code.py").write_text("1\n")
    assert find_commit(installed) is None
    monkeypatch.setenv("GIT_DIR", str(checkout.parent / ".git"))  # as in a hook of that repository
    assert find_commit(tmp_path) is None
    monkeypatch.delenv("GIT_DIR")
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert find_commit(checkout) is None


def test_hardware_is_counted_once_though_processes_share_it(monkeypatch):
    own = environment._describe_local_hardware(torch.device("cpu"))
    assert describe_hardware(torch.device("cpu")) == own[1]
    cards = [("a 1", "H100"), ("a 2", "H100"), ("a 2", "H100"), ("b 1", "H200")]
    monkeypatch.setattr(environment.dist, "gather_objects", lambda value: cards)
    assert describe_hardware(torch.device("cpu")) == "2 x H100 + H200"
