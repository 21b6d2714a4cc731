"""The rules of the house: what imports what, how long things are, and that nothing is dead or undocumented."""

import ast
import re
import statistics
import subprocess
import sys

import pytest
from conftest import ROOT

from distribuuuu.cli import documented_options
from distribuuuu.config import get_cfg, leaves

PACKAGE = ROOT / "distribuuuu"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A module imports strictly lower layers; inside datasets/ and models/ the files of the package may import each other.
LAYERS = {
    0: (
        "__init__",
        "defaults",
        "bounded_yaml",
        "memory",
        "atomic_file",
        "blocks",
        "registry",
        "schedule",
        "seeding",
        "signals",
        "ports",
        "result_shape",
        "plural",
        "ema",
        "precision",
        "watch_hub",
    ),
    1: ("limits", "watch", "contradictions", "config_files", "model_names", "records", "verdict"),
    2: ("config",),
    3: (
        "act_checkpoint",
        "launch",
        "batching",
        "param_groups",
        "weights_file",
        "results",
        "flag_hints",
        "unused_options",
    ),
    4: ("rendezvous", "checkpoint_file", "nproc"),
    5: ("distributed",),
    6: ("sharding", "metrics", "provenance", "run_lock", "out_of_memory"),
    7: (
        "parallel",
        "log",
        "optim",
        "loss",
        "sync_batchnorm",
        "checkpoint_writer",
        "state",
        "models",
        "datasets",
        "preflight",
        "stop",
        "precise_bn",
        "mixing",
    ),
    8: ("checkpoint", "evaluator", "cli", "finetune", "distill", "rehearsal", "tables"),
    9: ("run", "pack_words", "recipe", "table_words"),
    10: ("trainer", "packing"),
    11: ("timing",),
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}


def room_of(module: str) -> str:
    """Return the file or folder of the package that a dotted name belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(path) -> set[str]:
    """Return the modules of this package that a file imports, as dotted names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("distribuuuu"):
            names = [alias.name for alias in node.names]
            found |= {f"{node.module}.{name}" for name in names} if node.module == "distribuuuu" else {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("distribuuuu")}
    return {name for name in found if name != "distribuuuu.__version__"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    own = room_of(".".join(("distribuuuu", *path.relative_to(PACKAGE).with_suffix("").parts)))
    for name in imports_of(path):
        other = room_of(name)
        assert other == own or LAYER_OF[other] < LAYER_OF[own], f"{own} imports {other}, which is not below it"


def test_only_four_files_know_torch_distributed():
    users = [path for path in MODULES if re.search(r"torch\.distributed|DistributedDataParallel", path.read_text())]
    assert [path.name for path in users if path.name != "launch.py"] == [
        "distributed.py",
        "parallel.py",
        "rendezvous.py",
        "sharding.py",
    ]
    assert not re.search(r"^(import|from) torch", (PACKAGE / "launch.py").read_text(), re.MULTILINE)


def test_the_config_stops_at_the_builders():
    for name in ("metrics", "checkpoint", "checkpoint_file", "checkpoint_writer", "distributed", "log", "parallel",
                 "records", "seeding", "sharding", "signals", "state", "stop", "sync_batchnorm", "watch",
                 "watch_hub"):  # fmt: skip
        tree = ast.parse((PACKAGE / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("build_"):
                assert "cfg" not in [argument.arg for argument in node.args.args], f"{name}.{node.name} takes cfg"


def functions(path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


def length(node: ast.FunctionDef) -> int:
    return node.end_lineno - node.lineno + 1


def test_files_and_functions_are_short():
    for path in [*MODULES, *(ROOT / "tools").glob("*.py")]:
        most = 40 if path.parent.name == "tools" else 450
        assert len(path.read_text().splitlines()) <= most, path
    lengths = {f"{path.name}:{node.name}": length(node) for path in MODULES for node in functions(path)}
    assert max(lengths.values()) <= 50, max(lengths, key=lengths.get)
    assert statistics.median(lengths.values()) <= 12


def test_no_room_for_leftovers():
    names = {path.stem for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    assert not names & {"utils", "helpers", "common", "misc"}


def test_public_functions_and_classes_have_docstrings():
    for path in MODULES:
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path
        for node in ast.walk(tree):
            public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if public and (isinstance(node, ast.ClassDef) or node in tree.body or node.col_offset == 4):
                nested = node.col_offset == 4 and node not in [item for c in classes(tree) for item in c.body]
                assert nested or ast.get_docstring(node), f"{path.name}: {node.name}"


def classes(tree) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def keys_read_in(source: str) -> set[str]:
    """Return the SECTION.KEY that a file reads, directly or through a name such as `optim = cfg.OPTIM`."""
    direct = set(re.findall(r"cfg\.([A-Z_]+(?:\.[A-Z_]+)?)", source))
    aliases = dict(re.findall(r"^ +(\w+) = cfg\.([A-Z]+)$", source, re.MULTILINE))
    named = {f"{aliases[name]}.{key}" for name, key in re.findall(r"\b(\w+)\.([A-Z_]+)", source) if name in aliases}
    return direct | named


def test_every_key_is_read_somewhere_and_documented():
    checks = ("defaults.py", "config.py", "contradictions.py", "unused_options.py")
    readers = [path for path in MODULES if path.name not in checks]
    read = set().union(*(keys_read_in(path.read_text()) for path in readers))
    documented = {key: comment for key, _, comment in documented_options()}
    assert {key for key, _ in leaves(get_cfg())} - read == set()
    assert all(len(comment) > 10 for comment in documented.values())


def test_imports_do_nothing_and_importing_the_package_imports_nothing():
    code = "import sys; import distribuuuu; sys.exit(len([m for m in sys.modules if m.startswith('distribuuuu.')]))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    "words", [["--help"], ["--help-config"], ["--dump-config"], ["NO.SUCH", "1"], ["TRAIN.DATASET", "/no/such"]]
)
def test_help_and_mistakes_are_answered_without_torch(words):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['train_net.py', *{words!r}]\n"
        "try:\n    runpy.run_path('tools/train_net.py', run_name='__main__')\n"
        "except SystemExit as status:\n    print('status', status.code)\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    expected = "0" if words[0].startswith("--") else "2"
    assert done.stdout.splitlines()[-2:] in ([f"status {expected}", "False"], ["status None", "False"]), done
    assert "Traceback" not in done.stderr


def test_the_project_speaks_of_itself_alone():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode or not tracked.stdout:
        pytest.skip("not a git checkout")
    stubs = re.compile(r"NotImplementedError|\bTODO\b|\bFIXME\b|\bXXX\b")
    for name in tracked.stdout.split():
        path = ROOT / name
        if path.suffix == ".py" and path.name != "test_repo.py" and path.exists():
            assert not stubs.search(path.read_text()), f"{name} has a stub"
