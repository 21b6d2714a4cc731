"""The number of lines of the core: what a fork reads."""

import ast
import functools
from pathlib import Path

from support.runs import ROOT

PACKAGE = ROOT / "distribuuuu"
# The core is what these modules and the registered entries import, directly or not, in functions too.
ENTRY_POINTS = ("trainer", "commands.main", "commands.train", "commands.test")
ROOMS_WITH_ENTRIES = ("models", "data", "optim", "tasks")


def module_of(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def list_modules() -> dict[str, Path]:
    """Return the files of the package by dotted name."""
    return {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Return the modules of this package that a file imports anywhere in it, as dotted names."""
    names, found = list_modules().keys(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("distribuuuu"):
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= parts & names | ({node.module} if parts - names else set())
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("distribuuuu")}
    return found - {"distribuuuu"}


def list_core() -> set[str]:
    """Return the modules of the core."""
    modules = list_modules()
    waiting = [f"distribuuuu.{name}" for name in ENTRY_POINTS]
    rooms = [name for name in modules if name.split(".")[1:2] and name.split(".")[1] in ROOMS_WITH_ENTRIES]
    waiting += [name for name in rooms if ".register" in modules[name].read_text(encoding="utf-8")]
    core: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in core:
            core.add(name)
            waiting += imports_of(modules[name])
    return core


@functools.cache
def list_entries() -> set[str]:
    """Return the modules that register entries and that no other file imports: a fork may add any number of them."""
    modules = list_modules()
    imported = set().union(*(imports_of(path) for path in modules.values()))
    rooms = [name for name in modules if name.split(".")[1:2] and name.split(".")[1] in ROOMS_WITH_ENTRIES]
    entries = {name for name in rooms if ".register" in modules[name].read_text(encoding="utf-8")}
    return {name for name in entries - imported if modules[name].stem != "__init__"}


def count_core_lines(with_entries: bool = False) -> int:
    """Return the number of lines of the files of the core, with or without those of `list_entries`."""
    counted = list_core() if with_entries else list_core() - list_entries()
    return sum(len(list_modules()[name].read_text(encoding="utf-8").splitlines()) for name in counted)
