"""docs/extending.md: each example is copied out of the page, counted and run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import ROOT, records

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+)\n((?:.|\n)*?)(?=^## |\Z)", PAGE, re.MULTILINE))
LIMITS = {
    anchor: (int(files), int(lines))
    for files, lines, anchor in re.findall(r"^\| .+ \| (\d+) \| (\d+) \| \[example\]\(#(.+)\) \|$", PAGE, re.MULTILINE)
}
# The sections with an example; the others describe interfaces.
EXAMPLES = [title for title in SECTIONS if title.lower().replace(" ", "-") in LIMITS]
# What makes a run of the page short.
SHORT = ("OPTIM.MAX_EPOCH", "1", "OPTIM.WARMUP_EPOCHS", "0", "TRAIN.WORKERS", "0", "LOG.TENSORBOARD", "False")


def anchor_of(title: str) -> str:
    return title.lower().replace(" ", "-")


def files_of(section: str) -> dict[str, str]:
    """Return the files of a section by path; a difference is by the path of the file that it changes."""
    blocks = re.findall(r"^```(?:python|yaml|diff)\n# (\S+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return dict(blocks)


def commands_of(section: str) -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return [shlex.split(block.replace("\\\n", " ")) for block in blocks]


def count_lines(path: str, text: str) -> int:
    """Return the lines that an example adds, without blank ones."""
    lines = [line for line in text.splitlines() if line.strip()]
    is_difference = path == "distribuuuu/trainer.py"
    return sum(line.startswith("+") for line in lines) if is_difference else len(lines)


def apply_difference(original: str, difference: str) -> str:
    """Insert the added lines after the lines before them, which must occur once."""
    context = "".join(line + "\n" for line in difference.splitlines() if not line.startswith("+"))
    added = "".join(line[1:] + "\n" for line in difference.splitlines() if line.startswith("+"))
    assert original.count(context) == 1
    return original.replace(context, context + added)


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy of the project that the examples may change."""
    for name in ("distribuuuu", "tools", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def write_example(project: Path, title: str) -> None:
    for path, text in files_of(SECTIONS[title]).items():
        file = project / path
        file.write_text(apply_difference(file.read_text(), text) if file.exists() else text)


def run(project: Path, command: list[str], *options: str) -> subprocess.CompletedProcess:
    words = [sys.executable, *command[1:], *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(project)}
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done


def test_every_row_of_the_table_has_an_example():
    assert {anchor_of(title) for title in EXAMPLES} == LIMITS.keys() and len(LIMITS) >= 9


@pytest.mark.house
@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_costs_no_more_files_and_lines_than_the_table_says(title):
    files, (most_files, most_lines) = files_of(SECTIONS[title]), LIMITS[anchor_of(title)]
    assert 1 <= len(files) <= most_files
    assert sum(count_lines(path, text) for path, text in files.items()) <= most_lines


@pytest.mark.slow
@pytest.mark.parametrize("title", [title for title in EXAMPLES if title != "A self-supervised task"])
def test_an_example_trains(project, title):
    write_example(project, title)
    (command,) = commands_of(SECTIONS[title])
    done = run(project, command, *SHORT, "OUT_DIR", "exp")
    rows = records(project / "exp")
    assert rows[-1]["kind"] == "eval"
    if title == "A metric":
        assert "worst_class" in rows[-1] and "worst_class" in (project / "exp" / "results.json").read_text()
        assert "worst_class" in done.stderr
    if title == "Quantities of a task":
        assert "confidence" in rows[0] and {"confidence", "fc_norm"} <= rows[-1].keys() and "confidence" in done.stderr
        assert "confidence" in (project / "exp" / "results.json").read_text()
    if title == "The gradient norm in the log":
        assert "step 0: gradient norm" in done.stderr


@pytest.mark.slow
def test_simclr_trains_is_the_same_on_two_processes_and_its_features_can_be_probed(project):
    title = "A self-supervised task"
    write_example(project, title)
    train, probe = commands_of(SECTIONS[title])
    short = ("OPTIM.MAX_EPOCH", "3", "OPTIM.WARMUP_EPOCHS", "0", "TRAIN.WORKERS", "0", "LOG.TENSORBOARD", "False",
             "MODEL.KWARGS.norm", "group", "TRAIN.PRINT_FREQ", "1", "OPTIM.BASE_LR", "0.01")  # fmt: skip
    run(project, train, *short)
    run(project, train, *short, "TRAIN.BATCH_SIZE", "64", "OUT_DIR", "exp/two", "--nproc", "2")
    one, two = (
        [(row["step"], row["loss"]) for row in records(project / "exp" / name) if row["kind"] == "train"]
        for name in ("simclr", "two")
    )
    assert [step for step, _ in one] == [step for step, _ in two]
    # Rounding differences grow from step to step.
    assert [loss for _, loss in two[:5]] == pytest.approx([loss for _, loss in one[:5]], rel=1e-4)
    losses = [loss for _, loss in one]
    assert sum(losses[-7:]) < sum(losses[:7])
    run(project, probe, *SHORT, "MODEL.KWARGS.norm", "group")
    assert records(project / "exp" / "simclr_probe")[-1]["kind"] == "eval"
