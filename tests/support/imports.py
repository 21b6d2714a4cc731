"""The modules of the package, and what each imports."""

import ast
import functools
from pathlib import Path

from support.runs import ROOT

PACKAGE = ROOT / "distribuuuu"


def module_of(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def list_modules() -> dict[str, Path]:
    """Return the files of the package by dotted name."""
    return {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def imports_of(path: Path, in_functions: bool = True) -> set[str]:
    """Return the modules of this package that a file imports, as dotted names."""
    names, found, tree = list_modules().keys(), set(), ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if in_functions else tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("distribuuuu"):
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= parts & names | ({node.module} if parts - names else set())
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("distribuuuu")}
    return found - {"distribuuuu"}
