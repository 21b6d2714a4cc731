"""The rules of this project for its own code: what imports what, and that nothing is dead or undocumented.

Tests with the marker `house` are about the code of this project, `pytest -m house`; a fork need not pass them.
"""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import ROOT

from distribuuuu.config import get_cfg
from distribuuuu.config.config_node import iter_options
from distribuuuu.config.explain import read_comments

PACKAGE = ROOT / "distribuuuu"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A package imports packages of strictly lower layers, in functions too; inside a package, files import without a cycle.
LAYERS = (
    ("files",),
    ("config",),
    ("hints",),
    ("launch",),
    ("distributed",),
    ("data", "optim", "checkpoint", "records"),
    ("models", "mirror"),
    ("tasks",),
    ("engine",),
    ("trainer",),
    ("inference",),
    ("api",),
    ("testing",),
    # What several commands share, then the commands, each of which is a layer entry of its own.
    ("commands.main", "commands.guard", "commands.flag_hints", "commands.html", "commands.scan", "commands.stats"),
    ("commands.arguments", "commands.output"),
    ("commands",),
    ("__main__",),
)
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}


def module_of(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imports_of(path: Path, in_functions: bool = True) -> set[str]:
    """Return the modules of this package that a file imports, as dotted names."""
    names, found, tree = {module_of(path) for path in MODULES}, set(), ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if in_functions else tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("distribuuuu"):
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= parts & names | ({node.module} if parts - names else set())
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("distribuuuu")}
    return found - {"distribuuuu"}


def package_of(module: str) -> str:
    """Return the package, the file or the command that a dotted name belongs to."""
    parts = module.split(".")
    return ".".join(parts[1:3]) if parts[1] == "commands" and parts[2:] else parts[1]


def layer_of(package: str) -> int:
    return LAYER_OF.get(package, LAYER_OF["commands"])


@pytest.mark.house
def test_every_package_has_its_layer():
    packages = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert packages <= {name for name in LAYER_OF if "." not in name} | {"__init__"}


@pytest.mark.house
def test_imports_go_down_only():
    for path in MODULES:
        own = module_of(path)
        for name in imports_of(path) if own != "distribuuuu" else ():
            if package_of(name) == "hints" and name not in imports_of(path, in_functions=False):
                continue  # the branch that raises an error imports its text
            if package_of(name) != package_of(own):
                is_below = layer_of(package_of(name)) < layer_of(package_of(own))
                assert is_below, f"{own} imports {name}, which is not below it"


@pytest.mark.house
def test_no_file_imports_itself_by_way_of_others():
    graph = {module_of(path): imports_of(path) for path in MODULES}
    # A package's own __init__ offers names of its files; a file that uses them would be a cycle with it.
    done: set[str] = set()
    while ready := {name for name, needs in graph.items() if name not in done and needs <= done}:
        done |= ready
    assert not graph.keys() - done, f"these files import each other: {sorted(graph.keys() - done)}"


@pytest.mark.house
def test_only_one_package_knows_torch_distributed():
    users = [path for path in MODULES if re.search(r"torch\.distributed|DistributedDataParallel", path.read_text())]
    assert {package_of(module_of(path)) for path in users} <= {"distributed", "launch"}


def test_the_lowest_packages_import_without_torch():
    lowest = ("files", "config", "hints", "launch")
    modules = [module_of(path) for path in MODULES if path.relative_to(PACKAGE).parts[0] in lowest]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.house
def test_the_config_stops_at_the_builders():
    paths = [
        path
        for package in ("distributed", "checkpoint", "files", "launch")
        for path in (PACKAGE / package).rglob("*.py")
    ]
    leaf = ("records/run_log", "records/metric_writers", "engine/state", "data/seeding")
    for path in paths + [path for name in leaf if (path := PACKAGE / f"{name}.py").exists()]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith(("build_", "parallelize_")):
                assert "cfg" not in [argument.arg for argument in node.args.args], f"{path.stem}.{node.name} takes cfg"


def test_modules_import_at_their_top_only_what_an_installation_without_extras_has():
    declared = re.search(r"install_requires=\[(.*?)\]", (ROOT / "setup.py").read_text(), re.DOTALL)[1]
    names = {*re.findall(r'"([\w-]+)[>=]', declared), "PIL"} | {"yaml", "fsspec", "markupsafe"}  # required by those
    assert "torch" in names
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            aliases = node.names if isinstance(node, ast.Import) else []
            modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in aliases]
            found = {module.partition(".")[0] for module in modules}
            assert found <= names | {*sys.stdlib_module_names, "distribuuuu"}, f"{path}: {found}"


def keys_read_in(source: str) -> set[str]:
    """Return the SECTION.KEY that a file reads, directly or through a name such as `optim = cfg.OPTIM`."""
    direct = set(re.findall(r"cfg\.([A-Z_]+(?:\.[A-Z_]+)?)", source))
    aliases = dict(re.findall(r"^ +(\w+) = cfg\.([A-Z]+)$", source, re.MULTILINE))
    named = {f"{aliases[name]}.{key}" for name, key in re.findall(r"\b(\w+)\.([A-Z_]+)", source) if name in aliases}
    return direct | named


def test_every_key_is_read_somewhere_and_documented():
    config = PACKAGE / "config"
    readers = {*MODULES} - {*config.glob("*.py")} | {config / "derived.py", config / "registry.py"}
    read = set().union(*(keys_read_in(path.read_text()) for path in readers))
    assert {key for key, _ in iter_options(get_cfg())} - read == set()
    assert all(len(comment) > 10 for comment in read_comments().values())


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
