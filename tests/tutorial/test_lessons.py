"""Tests of the tutorial: each lesson runs with its documented commands, and the pages agree with the lessons."""

import ast
import difflib
import functools
import importlib.util
import re
import sys

import pytest
from support.runs import ROOT

TUTORIAL = ROOT / "tutorial"
spec = importlib.util.spec_from_file_location("tutorial_run_all", TUTORIAL / "run_all.py")
run_all = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run_all)
run_cached = functools.cache(run_all.run)

UNEXPECTED = re.compile(r"warn|Traceback|Error", re.IGNORECASE)
# A warning of torch 2.6.
EXPECTED_WARNING = re.compile(r".*UserWarning: DTensor random operators may not have complete support on cpu.*\n.*\n")
# torch's threads occasionally abort a process at exit; this is not a failure of the lesson.
ABORTED_AT_EXIT = "terminate called without an active exception"
MAX_ABORTS = 3


def check(command):
    """Run a command of a lesson; it must assert its claim and write no warning or error to stderr."""
    if reason := run_all.skip_reason(command):
        pytest.skip(reason)
    status, out, err = run_cached(command)
    for _ in range(MAX_ABORTS):
        if status and run_all.find_claim(out) and ABORTED_AT_EXIT in err:
            status, out, err = run_all.run(command)
    if needs := re.search(r"FSDP2 on a CPU needs torch .*", err):
        pytest.skip(needs[0])
    assert status == 0, out + err
    assert run_all.find_claim(out), out
    assert out.splitlines()[-1] == run_all.find_claim(out), "the claim is not the last line"
    assert not UNEXPECTED.search(EXPECTED_WARNING.sub("", err)), err


# srun reaches the cluster that other tests use.
ON_CLUSTER = [name for name in run_all.LESSONS if any(line.startswith("srun") for line in run_all.read_section(name))]


@pytest.mark.tutorial
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slurm) if name in ON_CLUSTER else name for name in run_all.LESSONS]
)
def test_a_lesson_runs_and_asserts_its_claim(name):
    commands = run_all.read_section(name)
    for command in commands:
        check(command)


def test_every_file_is_a_lesson():
    assert {path.stem for path in TUTORIAL.glob("*.py")} == {*run_all.LESSONS, "run_all"}
    assert len(run_all.LESSONS) == 24


@pytest.mark.project
@pytest.mark.parametrize("name", run_all.LESSONS)
def test_a_lesson_is_short_self_contained_and_says_how_to_run_it(name):
    text = (TUTORIAL / f"{name}.py").read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 150
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported <= {*sys.stdlib_module_names, "torch", "torchvision", "numpy"} - {*run_all.LESSONS}
    if "nn.Conv2d" in text and "double" not in text:  # convolutions are compared in float32
        assert "torch.backends.cudnn.allow_tf32 = False" in text
    for command in run_all.read_section(name) + run_all.read_section(name, "Also:"):
        assert re.match(r"(python|torchrun|srun) ", command) and f"tutorial/{name}.py" in command, command
    assert run_all.read_section(name) and run_all.read_section(name, "Look at:")


def read_pages(language):
    """Return the text of the README and of all lessons in a language."""
    readme = TUTORIAL / ("README.md" if language == "en" else f"README.{language}.md")
    return "\n".join(path.read_text() for path in [readme, *sorted((TUTORIAL / language).glob("*.md"))])


def blocks_of(language, kind):
    """Return the code blocks of one kind in the pages of a language."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", read_pages(language), re.MULTILINE | re.DOTALL)


def lines_of(language, pattern):
    """Return the matches of a pattern in the pages of a language outside of code blocks."""
    text = re.sub(r"^```.*?^```$", "", read_pages(language), flags=re.MULTILINE | re.DOTALL)
    return re.findall(pattern, text, re.MULTILINE)


def test_both_languages_have_the_same_headings_figures_commands_and_outputs():
    for pattern in (r"^#+(?= )", r"^#+ \d+\. `\w+\.py`", r"figures/\w+\.svg"):
        assert lines_of("en", pattern) == lines_of("zh", pattern)
    for kind in ("bash", "text", "diff"):
        assert blocks_of("en", kind) == blocks_of("zh", kind)


def changes_in(name):
    """Return the diff of a lesson against lesson 6, without docstrings and blank lines."""
    texts = [(TUTORIAL / f"{lesson}.py").read_text() for lesson in ("snsc", name)]
    bodies = [text.splitlines()[ast.parse(text).body[0].end_lineno :] for text in texts]
    _, _, *lines = difflib.unified_diff(*bodies, n=0, lineterm="")
    return [line for line in lines if line[0] in "+-" and line[1:]]


def test_the_diffs_in_the_pages_are_current():
    some, *shown = [block.splitlines() for block in blocks_of("en", "diff")]
    assert [line for line in changes_in("snmc_dp") if line in some] == some
    assert shown == [changes_in(f"mnmc_ddp_{name}") for name in ("launch", "mp", "slurm")] + [changes_in("imagenet")]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_pages_have_every_lesson_with_its_commands_and_figure(language):
    expected = [f"{number}. `{name}.py`" for number, name in enumerate(run_all.LESSONS, 1)]
    assert lines_of(language, r"^# (\d+\. `\w+\.py`)") == expected
    figures = lines_of(language, r"\(\.\./figures/(\w+)\.svg\)")
    assert sorted(figures) == sorted(path.stem for path in (TUTORIAL / "figures").glob("*.svg"))
    commands = [line for block in blocks_of(language, "bash") for line in block.splitlines() if "tutorial/" in line]
    for name in run_all.LESSONS:
        documented = run_all.read_section(name) + run_all.read_section(name, "Also:")
        shown = [command for command in commands if f"tutorial/{name}.py" in command]
        assert set(run_all.read_section(name)) <= set(shown), name
        assert set(shown) <= set(documented), f"{name}: a page has a command that the docstring lacks"
