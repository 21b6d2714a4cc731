"""Rules of this project (marker `project`: a fork need not keep them), what imports what, dependencies, the wheel."""

import ast
import functools
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from support.runs import ROOT, run_python, small_options

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
    ("checkpoint",),
    ("data", "optim", "records"),
    ("models", "mirror"),
    ("tasks",),
    ("engine",),
    ("trainer",),
    ("inference",),
    ("api",),
    ("testing",),
    # What several commands share, then the commands, each of which is a layer entry of its own.
    ("commands.main", "commands.guard", "commands.flag_hints", "commands.output"),
    ("commands.arguments", "commands.html", "commands.scan", "commands.stats"),
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


@pytest.mark.project
def test_every_package_has_its_layer():
    packages = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert packages <= {name for name in LAYER_OF if "." not in name} | {"__init__"}


@pytest.mark.project
def test_imports_go_down_only():
    for path in MODULES:
        own = module_of(path)
        for name in imports_of(path) if own != "distribuuuu" else ():
            if package_of(name) == "hints" and name not in imports_of(path, in_functions=False):
                continue  # the branch that raises an error imports its text
            if package_of(name) != package_of(own):
                is_below = layer_of(package_of(name)) < layer_of(package_of(own))
                assert is_below, f"{own} imports {name}, which is not below it"


@pytest.mark.project
def test_only_one_package_knows_torch_distributed():
    users = [path for path in MODULES if re.search(r"torch\.distributed|DistributedDataParallel", path.read_text())]
    assert {package_of(module_of(path)) for path in users} <= {"distributed", "launch"}


def test_the_lowest_packages_import_without_torch():
    lowest = ("files", "config", "hints", "launch")
    modules = [module_of(path) for path in MODULES if path.relative_to(PACKAGE).parts[0] in lowest]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.project
def test_the_config_stops_at_the_builders():
    packages = ("distributed", "checkpoint", "files", "launch")
    paths = [path for package in packages for path in (PACKAGE / package).rglob("*.py")]
    leaf = ("records/run_log", "records/metric_writers", "engine/state", "data/seeding")
    for path in paths + [path for name in leaf if (path := PACKAGE / f"{name}.py").exists()]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith(("build_", "parallelize_")):
                assert "cfg" not in [argument.arg for argument in node.args.args], f"{path.stem}.{node.name} takes cfg"


@pytest.mark.project
def test_modules_import_at_their_top_only_what_an_installation_without_extras_has():
    declared = re.search(r"install_requires=\[(.*?)\]", (ROOT / "setup.py").read_text(), re.DOTALL)[1]
    names = {*re.findall(r'"([\w-]+)[>=]', declared), "PIL"} | {"yaml", "markupsafe"}  # required by those
    assert "torch" in names
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            aliases = node.names if isinstance(node, ast.Import) else []
            modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in aliases]
            found = {module.partition(".")[0] for module in modules}
            assert found <= names | {*sys.stdlib_module_names, "distribuuuu"}, f"{path}: {found}"


def test_a_default_run_imports_no_optional_package(image_folder, tmp_path):
    names = {*("captum", "obstore", "onnx", "onnxruntime", "onnxscript", "optuna", "mlflow", "pyarrow", "scipy"),
             *("sklearn", "tifffile", "wandb")}  # fmt: skip
    args = ["train", *small_options(image_folder, tmp_path / "out", "LOG.TENSORBOARD", True)]
    code = (f"import sys; from distribuuuu.commands.main import dispatch; status = dispatch('distribuuuu', {args})\n"
            f"assert (status, {names} & {{*sys.modules}}) == (0, set()), sys.modules")  # fmt: skip
    done = run_python("-c", code)
    assert done.returncode == 0 and "evaluat" in done.stderr, done.stderr[-2000:]


@pytest.mark.project
def test_each_dependency_is_explained(monkeypatch):
    declared, setuptools = {}, pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", lambda **options: declared.update(options))
    runpy.run_path(str(ROOT / "setup.py"))
    sources = {"always": declared["install_requires"], **declared["extras_require"]}
    needed = {(re.match(r"[\w-]+", one)[0], source) for source, every in sources.items() for one in every}
    text = (ROOT / "docs" / "dependencies.md").read_text().partition("\n\n| written by hand")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")][2:]
    assert all(purpose and license and re.match(r"\d", size) for *_, purpose, license, size, _ in rows)
    listed = [(name, source) for names, by, *_ in rows for name in names.split(", ")
              for source in re.findall(r"always|(?<=\[)\w+", by)]  # fmt: skip
    assert sorted(listed) == sorted(needed)


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


def test_help_and_mistakes_are_answered_without_torch():
    commands = {"--help": 0, "--help-config": 0, "--dump-config": 0, "NO.SUCH 1": 2, "TRAIN.DATASET /no/such": 2}
    code = (
        "import runpy, sys\n"
        f"for words, status in {commands!r}.items():\n"
        "    sys.argv, found = ['train_net.py', *words.split()], 0\n"
        "    try:\n        runpy.run_path('tools/train_net.py', run_name='__main__')\n"
        "    except SystemExit as error:\n        found = error.code or 0\n"
        "    assert (found, {'torch', 'numpy'} & {*sys.modules}) == (status, set()), words\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done


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


@pytest.mark.slow
def test_the_wheel_contains_the_shipped_files_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {name.removeprefix("distribuuuu/shipped/") for name in names if name.startswith("distribuuuu/shipped/")}
    configs = [path for path in (ROOT / "configs").rglob("*.*") if path.suffix in (".yaml", ".py")]
    expected = [*configs, *(ROOT / "tools" / "slurm").iterdir(), *(ROOT / "tools").glob("*/*.yaml")]
    assert shipped == {str(path.relative_to(ROOT)) for path in expected}
    code = {name for name in names if name.startswith("distribuuuu/") and not name.startswith("distribuuuu/shipped/")}
    found = [path for pattern in ("*.py", "templates/*", "*.zip") for path in (ROOT / "distribuuuu").rglob(pattern)]
    assert code == {str(path.relative_to(ROOT)) for path in found}
    assert all(name.startswith(("distribuuuu/", "distribuuuu-")) for name in names)


@pytest.mark.slow
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
    assert "| shapes/resnet14" in run(command, "table", "r", cwd=tmp_path).stdout


@pytest.mark.project
def test_the_scripts_import_names_that_exist():
    for path in (one for folder in ("benchmarks", "configs", "docs", "tools") for one in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distribuuuu"):
                _, *parts = node.module.split(".")[:3]
                if parts[:1] in (["commands"], ["mirror"]) and not (PACKAGE / "/".join(parts)).exists():
                    continue  # an optional package that has been deleted
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    is_there = hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}")
                    assert is_there, f"{path.name} imports {name} of {node.module}"
