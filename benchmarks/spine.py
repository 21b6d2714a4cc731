#!/usr/bin/env python3
"""The spine: the modules of the package that a default run loads, counted by running one.

Trains and evaluates `shapes/resnet14` for one epoch in this process, without loader workers. Prints the modules, their
lines (with docstrings and comments), and how many of them are in functions that ran, for each package and in all.
"""

import ast
import collections
import contextlib
import io
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "distribuuuu"
OPTIONS = "TRAIN.WORKERS 0 OPTIM.MAX_EPOCH 1 OPTIM.WARMUP_EPOCHS 0 OUT_DIR"
called: set[tuple[str, int]] = set()  # file and first line of each function that ran


def note_call(frame, event: str, arg) -> None:
    """Remember a function that is called."""
    if event == "call":
        called.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))


def run_default(folder: str) -> None:
    """Train and evaluate the quick start."""
    from distribuuuu.commands.main import main

    for words in (f"train --cfg shapes/resnet14 {OPTIONS} {folder}", f"test {folder}"):
        sys.argv = ["distribuuuu", *words.split()]
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise


def count(path: Path) -> tuple[int, int]:
    """Return the lines of a file, and those in functions that ran."""
    source, ran = path.read_text(encoding="utf-8"), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if (str(path), first) in called:
                ran.update(range(first, node.end_lineno + 1))
    return source.count("\n"), len(ran)


def main() -> None:
    """Run, count and print."""
    sys.path.insert(0, str(PACKAGE.parent))
    output = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        # The first run on a machine draws the images, and caches the names of all models; the index of images that were
        # just drawn is not trusted yet, that of the second run is.
        words = [sys.executable, "-m", "distribuuuu", "train", "--cfg", "shapes/resnet14", *OPTIONS.split()]
        for name in ("first", "second"):
            subprocess.run([*words, f"{folder}/{name}"], check=True, cwd=PACKAGE.parent, stderr=subprocess.DEVNULL)
        sys.setprofile(note_call)
        threading.setprofile(note_call)
        try:
            run_default(f"{folder}/run")
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    rows = collections.defaultdict(lambda: [0, 0, 0])
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "distribuuuu" and getattr(module, "__file__", None):
            path = Path(module.__file__).resolve()
            for place, number in enumerate((1, *count(path))):
                rows[path.relative_to(PACKAGE).parts[0]][place] += number
    print(f"{'package':16}{'modules':>8}{'lines':>8}{'ran':>8}")
    for name, numbers in sorted(rows.items(), key=lambda row: -row[1][1]):
        print(f"{name:16}{numbers[0]:8}{numbers[1]:8}{numbers[2]:8}")
    modules, lines, ran = (sum(row[place] for row in rows.values()) for place in range(3))
    print(f"{'spine':16}{modules:8}{lines:8}{ran:8}   {ran / lines:.0%}")
    print(f"{'whole package':24}{sum(path.read_text().count(chr(10)) for path in PACKAGE.rglob('*.py')):8}")


if __name__ == "__main__":
    main()
