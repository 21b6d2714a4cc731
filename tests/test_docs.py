"""Documentation: its commands are run or parsed, its links, paths and options exist, its figures are those measured."""

import importlib
import inspect
import json
import math
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import timm
import torch
import yaml
from safetensors.torch import save_file
from support.commands import is_deleted, list_deleted_paths
from support.images import draw_folder
from support.runs import ROOT

import distribuuuu
from distribuuuu.commands.arguments import parse_args
from distribuuuu.commands.flag_hints import parse_flags
from distribuuuu.commands.main import find_commands
from distribuuuu.commands.train import build_train_parser
from distribuuuu.config import ConfigError, get_cfg, load_cfg
from distribuuuu.config.explain import read_comments, show_default
from distribuuuu.config.locate import RECIPE_PLUGINS
from distribuuuu.config.options import OPEN_SECTIONS, OPTIONS
from distribuuuu.config.reader import iter_options, read_cfg
from distribuuuu.config.registry import MODELS
from distribuuuu.engine.build import build_initial_model
from distribuuuu.models import build_model, count_parameters
from distribuuuu.models.freeze import freeze_parts

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
# The examples of docs/extending.md need the files that it describes: tests/test_examples.py runs them.
WITH_COMMANDS = [page for page in PAGES if page.name != "extending.md"]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
# Programs in the pages that are not part of this repository.
OTHER_PROGRAMS = (
    *("pip", "tensorboard", "pytest", "ruff", "mypy", "pre-commit", "mkdocs", "docker", "kubectl", "sky"),
    *("cd", "eval", "git", "mkdir", "cp", "tar", "unzip", "sha256sum", "export", "."),
)
SCRIPT = re.compile(r"(tools|benchmarks)/[\w/]+\.(py|sbatch)")


def blocks_of(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def logical_lines(block: str) -> Iterator[str]:
    """Yield the commands of a shell script: continued lines joined, `&&` and loops split, here-documents left out."""
    script = re.sub(r"<<'(\w+)'\n.*?^\1$", "", block.replace("\\\n", " "), flags=re.MULTILINE | re.DOTALL)
    for line in script.splitlines():
        for part in re.split(r"&&|;", line) if not line.lstrip().startswith("#") else ():
            if (command := part.strip().removeprefix("do ")) and not re.match(r"for |do$|done$", command):
                yield command


def commands_of(page: Path) -> list[str]:
    return [command for block in blocks_of(page, "bash") for command in logical_lines(block)]


def header_commands() -> list[tuple[str, str]]:
    """Return (file, command) of the commands in the headers of configs and Slurm scripts."""
    found = []
    for path in [*CONFIGS, *sorted((ROOT / "tools" / "slurm").iterdir())]:
        lines = re.findall(r"^#  +((?:distribuuuu|python|torchrun|srun|sbatch) .+)$", path.read_text(), re.MULTILINE)
        assert lines, f"{path}: the header has no command"
        found += [(str(path.relative_to(ROOT)), line) for line in lines]
    return found


COMMANDS = [(str(page.relative_to(ROOT)), command) for page in WITH_COMMANDS for command in commands_of(page)]
COMMANDS += header_commands()


def split_command(command: str) -> tuple[str, str, list[str]]:
    """Return the program of this repository ('': none), the command that it starts ('': none), and the arguments."""
    words = shlex.split(re.sub(r"^\w+=\S+ ", "", command.replace("$seed", "0").replace("$", "")), comments=True)
    for number, word in enumerate(words):
        if Path(word).name == "distribuuuu" and (number == 0 or words[number - 1] == "-m"):
            name, *args = words[number + 1 :] or ["--help"]
            return "distribuuuu", name, args[: args.index(">")] if ">" in args else args
        if SCRIPT.fullmatch(word):
            text = (ROOT / word).read_text() if (ROOT / word).exists() else ""
            started = re.search(r'start_command\("(\w+)"|-m distribuuuu (\w+) "\$@"', text)
            name = started[started.lastindex] if started else "train" if word.endswith(".sbatch") else ""
            return word, name, words[number + 1 :]
    return "", words[0].removeprefix(".venv/bin/"), []


def parse_command(command: str) -> None:
    """Pass the arguments of a command to its parser, which raises ConfigError or SystemExit if they are wrong."""
    program, name, args = split_command(command)
    if not program:
        assert name in OTHER_PROGRAMS or name.startswith("python"), f"unknown program: {name}"
        return
    if program == "distribuuuu" and name == "--help" or is_deleted(name) or program in list_deleted_paths():
        return
    assert program == "distribuuuu" or (ROOT / program).exists(), f"no such file: {program}"
    assert not name or name in find_commands(), f"no such command: {name}"
    if name == "test" and len(args) % 2 and not args[0].startswith("-") and not args[0].isupper():
        args = ["OUT_DIR", *args] if "://" not in args[0] else args[1:]  # a run, which is not there
    if name in ("train", "test"):
        parser = build_train_parser() if name == "train" else None
        parse_args(parser, [*args, *(() if "--help-config" in args else ("--dump-config",))], train=name != "test")
    elif name:
        module = importlib.import_module(find_commands()[name].module)
        PARSE_WITH.get(name, lambda module, args: module.build_parser("").parse_args(args))(module, args)


def parse_sweep(module: ModuleType, args: list[str]) -> None:
    flags, words, problems = parse_flags(module.build_parser(""), args)
    fixed, space, found = module.parse_space(words)
    trials = [[*module.to_words(values), *fixed] for values in module.list_ends(space)]
    assert not [*problems, *found, *(problem for words in trials for problem in read_cfg(flags.cfg, words)[1])]


def parse_split(module: ModuleType, args: list[str]) -> None:
    flags, words, problems = parse_flags(module.build_parser(""), args)
    given = getattr(flags, "cfg", None), words if hasattr(flags, "cfg") or not words else ["DATA.NAME", "list", *words]
    assert not [*problems, *read_cfg(*given)[1]]


# For commands whose arguments are more than flags.
PARSE_WITH = {
    "split": parse_split, "finetune": parse_split, "sweep": parse_sweep, "plan": parse_split,
    "pack": lambda module, args: load_cfg(None, module.build_parser("").parse_known_args(args)[1][1:]),
    "doctor": lambda module, args: module.parse_args(None, args),
}  # fmt: skip


@pytest.mark.project
@pytest.mark.parametrize("page", dict.fromkeys(page if page.endswith(".md") else "headers" for page, _ in COMMANDS))
def test_every_command_is_accepted_by_its_tool(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for where, command in COMMANDS:
        if page in (where, "headers") and where.endswith(".md") == (page != "headers"):
            try:
                parse_command(command)
            except (ConfigError, AssertionError, SystemExit) as error:
                pytest.fail(f"{where}: {command}: {error}")


@pytest.mark.project
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_paths_and_options_exist(page):
    prose = re.sub(r"^```.*?^```$|<!--.*?-->", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = page if not path else (page.parent / path).resolve()
        if linked.relative_to(ROOT).as_posix().startswith(tuple(list_deleted_paths())):
            continue
        assert linked.exists(), f"{target} does not exist"
        headings = [re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
                    for line in re.findall(r"^#+ .+$", linked.read_text(), re.MULTILINE)] if anchor else []  # fmt: skip
        assert not anchor or anchor in headings, f"{target}: no such heading"
    for path in re.findall(r"`((?:distribuuuu|tools|configs|benchmarks|tests|docs|tutorial)/[\w/.*-]*)`", prose):
        is_kept = not path.startswith(tuple(list_deleted_paths()))
        assert not is_kept or list(ROOT.glob(path.rstrip("/"))), f"`{path}` does not exist"
    options = {key for key, _ in iter_options(get_cfg())}
    sections = "|".join(sorted({key.split(".")[0] for key in options if "." in key}))
    for key in re.findall(rf"\b((?:{sections})\.[A-Z][A-Z_0-9]*)\b", prose):
        assert key in options or key in OPEN_SECTIONS, f"there is no option {key}"


@pytest.mark.project
def test_config_files_in_the_pages_are_accepted(tmp_path):
    found = [block for page in WITH_COMMANDS for block in blocks_of(page, "yaml") if re.match(r"[A-Z]+:", block)]
    for number, block in enumerate(found):
        (path := tmp_path / f"{number}.yaml").write_text(block)
        assert not read_cfg(str(path), [])[1]
    assert found


SAMPLES = [
    (page, *sample)
    for page in PAGES
    for sample in re.findall(r"^<!-- sample: (python [^\n]+) -->\n```\n(.*?)^```$", page.read_text(), re.M | re.S)
    if not is_deleted(split_command(sample[0])[1])
]


@pytest.mark.project
@pytest.mark.parametrize(("page", "command", "output"), SAMPLES, ids=[page.name for page, _, _ in SAMPLES])
def test_sample_messages_are_what_the_command_prints(page, command, output):
    words = [sys.executable, *shlex.split(command)[1:]]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert_same_sample(page, output, done.stdout + done.stderr)


def assert_same_sample(page: Path, shown: str, real: str) -> None:
    """Compare a sample in a page with the real output; with UPDATE_DOCS=1, replace it in the page."""
    if shown != real and os.environ.get("UPDATE_DOCS"):
        page.write_text(page.read_text().replace(shown, real))
    else:
        assert shown == real, "UPDATE_DOCS=1 pytest -n 0 tests/test_docs.py replaces the sample"


def options_page() -> str:
    """Return the sections of docs/options.md: each option with its default, its meaning and what it needs."""
    comments, lines, section = read_comments(), [], None
    for key, option in OPTIONS.items():
        if (own := key.split(".")[0] if "." in key else "Run") != section:
            section = own
            lines += ["", f"## {section}", ""]
        text = f"- `{key}`: `{show_default(option.default)}`. {comments[key]}".replace("*", r"\*")
        text += f" Needs {option.needs}." if option.needs else ""
        lines += textwrap.wrap(text, 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    return "\n".join([*lines, ""])


@pytest.mark.project
@pytest.mark.skipif(bool(list_deleted_paths()), reason="names of deleted entries are on the page")
def test_the_page_of_the_options_is_made_from_their_table():
    page = ROOT / "docs" / "options.md"
    head, mark, shown = page.read_text().partition("\n## MODEL\n")
    code = "from test_docs import options_page; print(options_page(), end='')"  # other tests register entries here
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "tests")
    assert_same_sample(page, mark + shown, done.stdout)


SMALL = "OPTIM.MAX_EPOCH 1 OPTIM.WARMUP_EPOCHS 0 TRAIN.WORKERS 0 LOG.TENSORBOARD False"
TINY = "MODEL.ARCH resnet8 MODEL.PRETRAINED False TRAIN.IM_SIZE 16 TEST.IM_SIZE 18"
RUN = {
    ("README.md", "train --cfg shapes"): "", ("README.md", "test exp/"): None,
    ("docs/configuration.md", "train --cfg shapes"): "", ("docs/configuration.md", "test r"): None,
    ("docs/configuration.md", "distribuuuu --help"): None,
    ("docs/configuration.md", "--dump-config"): None, ("docs/configuration.md", "--help-config"): None,
    ("docs/large_data.md", "pack packed/"): None, ("docs/large_data.md", "TRAIN.DATASET packed/jpeg256"): TINY,
    ("docs/training.md", "AUG.POLICY"): "", ("docs/MODEL_ZOO.md", "train --cfg configs/shapes"): "",
    ("docs/MODEL_ZOO.md", "table exp/"): None, ("docs/MODEL_ZOO.md", "tools/make_table.py"): None,
}  # fmt: skip


def script_of(page: str) -> str:
    """Return the commands of a page that are run, as a script: trainings take one epoch; the rest is left out."""
    lines = []
    for block in blocks_of(ROOT / page, "bash"):
        for line in re.sub(r"\.venv/bin/(python|pip|distribuuuu)", r"\1", block.replace("\\\n", " ")).splitlines():
            line = re.sub(r"^( *)distribuuuu\b", r"\1python -m distribuuuu", line.split("&& ")[-1])
            extra = next((more for (where, part), more in RUN.items() if where == page and part in line), "skip")
            if "://" in line or line.startswith("cd "):  # a download, or data that is not there
                continue
            if "tools/" not in line and not re.match(r"\.|python3|python benchmarks/|torchrun|.*-m distribuuuu", line):
                lines.append(line)  # a loop, a here-document, mkdir, cp
            elif extra != "skip":
                command = line.partition("  #")[0]
                lines.append(command if extra is None else f"{command} {SMALL} {extra}")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A folder like the root of the repository, for commands that write."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("tools", "configs"):
        (root / name).symlink_to(ROOT / name)
    (root / "benchmarks").mkdir()
    (root / "benchmarks" / "reported.yaml").symlink_to(ROOT / "benchmarks" / "reported.yaml")
    (root / "docs").mkdir()
    (root / "docs" / "MODEL_ZOO.md").write_text((ROOT / "docs" / "MODEL_ZOO.md").read_text())
    for split in ("train", "val"):
        draw_folder(root / "my_images", split, {"cat": 40, "dog": 40})
    return root


@pytest.mark.slow
@pytest.mark.parametrize("page", dict.fromkeys(page for page, _ in RUN))
def test_the_commands_of_a_page_run(page, checkout):
    environment = {
        **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(checkout / "cache"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    script = script_of(page)
    assert all(part in script for where, part in RUN if where == page and not is_deleted(part.partition(" ")[0]))
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=checkout, env=environment, timeout=600)
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    if page == "docs/MODEL_ZOO.md":
        assert "(n = 3)" in done.stdout
        assert "shapes/resnet14" in (checkout / "docs" / "MODEL_ZOO.md").read_text()


@pytest.mark.project
def test_the_log_of_fine_tuning_is_the_one_shown(tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "training.md"
    config, shown = page.read_text().partition("## Fine-tuning")[2].partition("<!-- sample:")[::2]
    folder = tmp_path / "weights" / "resnet18.a1_in1k"
    folder.mkdir(parents=True)
    save_file(timm.create_model("resnet18").state_dict(), folder / "model.safetensors")
    (tmp_path / "a.yaml").write_text(re.search(r"```yaml\n(.*?)```", config, re.DOTALL)[1])
    cfg = load_cfg("a.yaml", ["MODEL.NUM_CLASSES", "10"])
    with caplog.at_level("INFO"):
        freeze_parts(cfg, build_initial_model(cfg, tuple("abcdefghij"), True))
    expected = shown.partition("```\n")[2].partition("```")[0]
    logged = "".join(f"{message}\n" for message in caplog.messages)
    assert_same_sample(page, expected, logged)


@pytest.mark.project
def test_the_page_of_the_models_lists_the_registered_ones():
    page = ROOT / "docs" / "MODEL_ZOO.md"
    rows = ["| `MODEL.ARCH` | parameters (M) | `MODEL.KWARGS` |", "|---|---|---|"]
    # Other tests of this process register models too.
    names = [name for name in MODELS.names() if re.match(r"distribuuuu\.|torchvision", MODELS.get(name).__module__)]
    others = ("airbench", "lookahead", "imagenet")
    names += [name for entries in RECIPE_PLUGINS.values() for name in entries if name not in others]
    for name in sorted(names, key=lambda name: [int(part) if part.isdigit() else part
                                                        for part in re.split(r"(\d+)", name)]):  # fmt: skip
        with torch.device("meta"):
            millions = count_parameters(build_model(load_cfg(None, ["MODEL.ARCH", name]))) / 1e6
        arguments = inspect.signature(MODELS.get(name)).parameters
        shown = [f"`{key}: {argument.default}`" for key, argument in arguments.items()
                 if key not in ("num_classes", "im_size", "weights", "progress", "kwargs")]  # fmt: skip
        rows.append(f"| `{name}` | {millions:.3f} | {', '.join(shown)} |".replace("|  |", "| |"))
    shown = re.search(r"^<!-- models: .*\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE)[1]
    assert_same_sample(page, shown, "".join(f"{row}\n" for row in rows))


def test_the_page_of_the_commands_lists_all_of_them():
    names = re.findall(r"^\| `distribuuuu (\w+)` \|", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE)
    assert [name for name in names if not is_deleted(name)] == [*find_commands()]


def test_the_page_of_the_python_api_describes_its_functions():
    page = (ROOT / "docs" / "python_api.md").read_text()
    for name in distribuuuu.__all__:
        if is_deleted(name):
            continue
        value = getattr(distribuuuu, name)
        if inspect.isfunction(value):
            described = re.search(rf"^## {name}\((.*)\)$", page, re.MULTILINE)
            if not described and re.search(rf"^## .*\b{name}\b.*$", page, re.MULTILINE):
                continue  # of several commands, which are shown by examples
            known = inspect.signature(value).parameters
            assert described and set(described[1].split(", ")) <= set(known), name
        else:
            assert name == "__version__" or f"distribuuuu.{name}" in page, name


def names_that_stay() -> set[tuple[str, str]]:
    """Return (module, name) of each row of the stable API."""
    page = (ROOT / "docs" / "python_api.md").read_text().partition("## Stable API")[2]
    rows = re.findall(r"^\| `(distribuuuu[\w.]*)` \| (.+) \|$", page, re.MULTILINE)
    return {(module, name) for module, names in rows for name in re.findall(r"`(\w+)`", names)}


def test_the_names_that_stay_can_be_imported():
    gone = tuple(path.replace("/", ".") for path in list_deleted_paths()) or "-"
    assert len({module for module, _ in names_that_stay()}) >= 9
    for module, name in names_that_stay():  # a deleted command takes its registry's package with it
        is_gone = module.startswith(gone) or module == "distribuuuu" and is_deleted(name)
        assert is_gone or hasattr(importlib.import_module(module), name), f"{module}.{name}"


@pytest.mark.project
def test_the_docs_import_only_names_that_stay():
    stay = names_that_stay()
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    sources = [block for path in pages for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)]
    sources += [path.read_text() for path in (ROOT / "docs" / "examples").glob("*.py")]
    find = re.compile(r"^from (distribuuuu[\w.]*) import (.+)$", re.MULTILINE).findall
    imports = [name for text in sources for name in find(text)]
    assert len(imports) > 40
    for module, names in imports:
        for name in names.split(","):
            assert (module, name.split()[0]) in stay, f"from {module} import {names}"


@pytest.mark.project
def test_the_code_map_names_every_package():
    for path in (ROOT / "distribuuuu").iterdir():
        if path.suffix == ".py" and path.stem != "__init__" or (path / "__init__.py").exists():
            assert f"`{path.name}{'/' if path.is_dir() else ''}`" in CONTRIBUTING, f"the code map lacks {path.name}"
    lessons = re.findall(r"^\| \d+ \|", (ROOT / "tutorial" / "README.md").read_text(), re.MULTILINE)
    assert f"{len(lessons)} self-contained lessons" in README


@pytest.mark.project
@pytest.mark.skipif(bool(list_deleted_paths()), reason="fewer lines are loaded")
def test_the_code_map_counts_what_a_default_run_loads():
    output = subprocess.run([sys.executable, ROOT / "benchmarks" / "spine.py"], capture_output=True, text=True).stdout
    found = re.findall(r"^(\S+) +(\d+ +\d+ +\d+)", output, re.MULTILINE)
    rows = {name: [*map(int, row.split())] for name, row in found}
    shown = re.search(r"imports ([\d,]+) lines of this package; (\d+) % of them", CONTRIBUTING)
    lines, ran = rows["spine"][1:]
    expected = {shown[1]: f"{lines:,}", shown[2]: f"{100 * ran / lines:.0f}"}
    for names, number in re.findall(r"^\| \d+ \| (.+?) \| ([\d,]+) \|", CONTRIBUTING, re.MULTILINE):
        found = [rows.get(name.rstrip("/"), (0, 0, 0))[1] for name in re.findall(r"`(.+?)`", names)]
        expected[number] = f"{sum(found):,}"
    for number, value in expected.items():
        is_near = float(number.replace(",", "")) == pytest.approx(float(value.replace(",", "")), rel=0.05)
        assert is_near, f"CONTRIBUTING.md says {number}, benchmarks/spine.py counts {value}"


@pytest.mark.project
def test_the_measured_accuracies_of_the_readme_are_those_of_the_runs():
    rows = re.findall(r"^\| (\w+/\w+) \| ([\d.]+) \| ([\d.]*) ?\| ([\d.]+) \| (\d+) \|$", README, re.MULTILINE)
    reported = yaml.safe_load((ROOT / "benchmarks" / "reported.yaml").read_text())
    paths = sorted((ROOT / "benchmarks" / "results").rglob("*.json"), reverse=True)
    runs = {record["config"]: record for record in (json.loads(path.read_text()) for path in paths)}  # its first row
    assert {name for name, *_ in rows} == set(runs)
    zoo = (ROOT / "docs" / "MODEL_ZOO.md").read_text()
    for name, top1, published, epochs, seeds in rows:
        assert published == str(reported.get(name, {}).get("top1", ""))
        row = next(line for line in zoo.splitlines() if line.startswith((f"| {name} |", f"| {name}, ")))
        assert top1 in row and epochs in row and f"(n = {seeds}" in row, name
        assert math.ceil(float(epochs)) == runs[name]["training"]["epochs_done"]


@pytest.mark.project
def test_the_speeds_of_the_readme_are_in_the_output_of_the_benchmarks():
    output = "".join(path.read_text() for path in (ROOT / "benchmarks" / "results").glob("*.txt"))
    rows = re.search(r"- \*\*Exact resume.*?- \*\*Tools", README, re.DOTALL)[0]
    for figure in re.findall(r"(?<![\w.])\d\.\d+(?= times)", rows):
        assert figure in output, f"{figure} is not in benchmarks/results"
    for count, noun in re.findall(r"\[(\d+) (kills|events)\]", rows):
        assert f"{count} {noun}" in output or f"{count} {noun}" in (ROOT / "benchmarks" / "README.md").read_text()
