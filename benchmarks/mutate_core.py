"""The power of the tests: changes one expression of the core at a time, in a copy, and runs the tests of its package.

    python benchmarks/mutate_core.py --places PLACES --results RESULTS
    python benchmarks/mutate_core.py --table BEFORE AFTER

The first command draws the places by `--seed` if PLACES does not exist. It appends one JSON line per place to RESULTS
and skips places that RESULTS has, so it can be stopped and rerun. The second prints results side by side. A place is
found by the name of its function, the source of its expression and its occurrence, in any file of the package: results
from before and after a move of files can be compared.

Default tests run until the first failure: those of the file, of its package, and of the trainer. The verdict is
`caught` if a test fails that passes without the mutation, or if no test ends for `--silence` seconds; `survived`; or
`gone`: the place does not exist.
"""

import argparse
import ast
import collections
import contextlib
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest
import timm  # noqa: F401
import torchvision  # noqa: F401  # imported once for the forked runs of pytest

ROOT = Path(__file__).parents[1]
KINDS = ("sign", "comparison", "off by one", "dropped call")
SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div}
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
# Packages in which a file with this text is part of the core, because it registers an entry.
REGISTERING = (".register", ("models", "data", "optim", "tasks"))
# Tests of whole runs; those that a tree does not have are left out.
TRAINER_TESTS = ("test_trainer.py", "test_resume.py", "test_all_features.py")
# Calls whose results are texts for people.
LOGGING = ("logger.", "logging.", "warnings.", "print(")


class Place(NamedTuple):
    """A mutation: the expression `source`, the n-th of its function, becomes `mutated`."""

    kind: str
    function: str
    source: str
    occurrence: int
    mutated: str


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below a node in order, without those of messages: raised errors, logged texts, f-strings."""
    for child in ast.iter_child_nodes(node):
        is_logging = isinstance(child, ast.Expr) and ast.unparse(child).startswith(LOGGING)
        if not is_logging and not isinstance(child, (ast.Raise, ast.JoinedStr)):
            yield child
            yield from walk(child)


def find_mutations(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the kinds and the replacements of an expression or statement."""
    match node:
        case ast.BinOp(op=op) if type(op) in SIGNS and not any(is_sequence(side) for side in (node.left, node.right)):
            yield "sign", replaced(node, op=SIGNS[type(op)]())
        case ast.UnaryOp(op=ast.USub()):
            yield "sign", node.operand
        case ast.Compare(ops=[op]):
            yield "comparison", replaced(node, ops=[COMPARISONS[type(op)]()])
        case ast.Expr(value=ast.Call()):
            yield "dropped call", ast.Pass()
    match node:
        case ast.BinOp() | ast.Compare() | ast.Slice() | ast.Subscript():
            yield from increments(node)
        case ast.Call(func=ast.Name(id="range" | "max" | "min")):
            yield from increments(node)


def is_sequence(node: ast.expr) -> bool:
    """Return whether an operand is visibly a text, list or tuple, whose sum has no difference to it."""
    if isinstance(node, ast.BinOp):
        return is_sequence(node.left) or is_sequence(node.right)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    return is_text or isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp))


def replaced(node: ast.AST, **fields: object) -> ast.AST:
    """Return a copy of a node with other fields."""
    changed = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def increments(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield copies of a node, each with one of the integers that it consists of increased by one."""
    changed = copy.deepcopy(node)
    for child in ast.iter_child_nodes(changed):
        if isinstance(child, ast.Constant) and type(child.value) is int:
            child.value += 1
            yield "off by one", copy.deepcopy(changed)
            child.value -= 1


def functions_of(source: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the qualified names and nodes of the functions and methods of a file; inner functions are part of them."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{item.name}", item) for item in node.body if isinstance(item, ast.FunctionDef))


def places_of(function: str, definition: ast.FunctionDef) -> Iterator[Place]:
    """Yield the possible mutations of a function."""
    seen: collections.Counter[str] = collections.Counter()
    for statement in definition.body:
        for node in (statement, *walk(statement)):
            source = ast.unparse(node) if isinstance(node, (ast.expr, ast.stmt, ast.Slice)) else ""
            for kind, mutated in find_mutations(node) if source else ():
                yield Place(kind, function, source, seen[source], ast.unparse(mutated))
            seen[source] += 1


def find_place(tree: Path, place: Place) -> list[tuple[Path, ast.AST]]:
    """Return the files and nodes of the package at which a place is found."""
    found = []
    for path in sorted((tree / "distribuuuu").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for function, definition in (
            functions_of(source) if f"def {place.function.rpartition('.')[2]}(" in source else ()
        ):
            nodes = [node for body in definition.body for node in (body, *walk(body))] * (function == place.function)
            same = [node for node in nodes if hasattr(node, "lineno") and ast.unparse(node) == place.source]
            found += [(path, node) for node in same[place.occurrence : place.occurrence + 1]]
    return found


def core_files(tree: Path) -> list[Path]:
    """Return the files that the trainer and the registering files of the package import, lazy imports included."""
    files = {".".join(path.relative_to(tree).with_suffix("").parts).removesuffix(".__init__"): path
             for path in (tree / "distribuuuu").rglob("*.py")}  # fmt: skip
    text, packages = REGISTERING
    todo = ["distribuuuu.trainer"]
    todo += [name for name, path in files.items() if name.split(".")[1:2] in [[package] for package in packages]
             and text in path.read_text(encoding="utf-8")]  # fmt: skip
    core: set[str] = set()
    while todo:
        core.add(name := todo.pop())
        for node in ast.walk(ast.parse(files[name].read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
                todo += [other for other in names if other in files and other not in core]
    return sorted(files[name] for name in core)


def draw_places(tree: Path, seed: int, num: int) -> list[Place]:
    """Return mutations of the core, at most one per function, with the kinds equally often, in random order."""
    by_kind: dict[str, list[Place]] = {kind: [] for kind in KINDS}
    for path in core_files(tree):
        for function, definition in functions_of(path.read_text(encoding="utf-8")):
            for place in places_of(function, definition):
                by_kind[place.kind].append(place)
    rng, drawn = random.Random(seed), []
    for index in range(num):
        known = {place.function for place in drawn}
        candidates = [place for place in by_kind[KINDS[index % len(KINDS)]] if place.function not in known]
        while len(find_place(tree, place := rng.choice(candidates))) != 1:
            candidates.remove(place)
        drawn.append(place)
    return drawn


def replace_node(path: Path, node: ast.AST, text: str) -> None:
    """Replace the source of a node in its file."""
    lines = path.read_bytes().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    content = b"".join(lines)
    path.write_bytes(content[:start] + text.encode() + content[end:])


def tests_of(tree: Path, path: Path) -> list[str]:
    """Return the test files and folders of a file of the package: its own, its package's, and the trainer's."""
    parts = path.relative_to(tree).parts
    package = tree / "tests" / parts[1]
    own = sorted(package.rglob(f"test_{path.stem}.py")) if len(parts) > 2 and package.is_dir() else []
    trainer = [path for name in TRAINER_TESTS if (path := tree / "tests" / name).exists()]
    paths = [*own, *([package] if len(parts) > 2 and package.is_dir() else []), *trainer]
    return [str(path.relative_to(tree)) for path in paths]


def run_tests(tree: Path, arguments: list[str], silence: float) -> tuple[bool, str]:
    """Run tests until the first failure; return whether all passed, and the name of the failed or hanging test."""
    (tree / "tmp").mkdir(exist_ok=True)
    shutil.rmtree(tree / ".pytest_cache", ignore_errors=True)
    output = tree / "tmp" / "output"
    output.write_bytes(b"")
    pid = os.fork()  # with torch and timm imported, which takes longer than most tests
    if pid == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        run_pytest(tree, arguments, output)
    size, last, status = 0, time.monotonic(), None
    try:
        while status is None and time.monotonic() - last < silence:
            time.sleep(0.2)
            ended, code = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if ended else None
            if output.stat().st_size != size:
                size, last = output.stat().st_size, time.monotonic()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # and what the tests have left running
        if status is None:
            os.waitpid(pid, 0)
    if status is None:
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
        return False, next((line.partition(" ")[0] for line in reversed(lines) if "::" in line), "")
    failed = tree / ".pytest_cache" / "v" / "cache" / "lastfailed"
    names = list(json.loads(failed.read_text(encoding="utf-8"))) if failed.exists() else []
    return status in (0, 5), names[0] if names else ""  # 5: no test was selected


def run_pytest(tree: Path, arguments: list[str], output: Path) -> NoReturn:
    """Run the tests of a copy in this process, which it ends."""
    with open(output, "wb") as file, open(os.devnull) as nothing:
        for stream, target in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(stream.fileno(), target)
    os.chdir(tree)
    os.environ.update(PYTHONPATH=str(tree), TMPDIR=str(tree / "tmp"), OMP_NUM_THREADS="1")
    tempfile.tempdir = None
    sys.path[0] = str(tree)
    try:
        status = int(pytest.main(["-n", "0", "-x", "-vv", "--tb=no", *arguments]))
    except BaseException:
        status = 1  # a failure like those that pytest catches
    os._exit(status)


def try_place(tree: Path, place: Place, silence: float) -> dict:
    """Return the result of the mutation of one place, made and tested in a copy of the checkout."""
    start, skipped = time.monotonic(), []
    result = {"verdict": "gone", "test": "", "file": "", **place._asdict()}
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout.splitlines()
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        for name in names:
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, Path(folder) / name)
        found = find_place(Path(folder), place)
        if len(found) != 1:
            return result
        path, node = found[0]
        result["file"] = str(path.relative_to(folder))
        while True:
            original = path.read_bytes()
            replace_node(path, node, place.mutated)
            tests = [*tests_of(Path(folder), path), *(f"--deselect={test}" for test in skipped)]
            passed, test = run_tests(Path(folder), tests, silence)
            path.write_bytes(original)
            if passed or run_tests(Path(folder), [test] if test else ["--collect-only", *tests], silence)[0]:
                break
            if not test:
                output = (Path(folder) / "tmp" / "output").read_text(encoding="utf-8", errors="replace")
                raise SystemExit(f"pytest fails without a mutation too: {' '.join(tests)}\n{output}")
            skipped.append(test)  # it fails without the mutation too
    result.update(verdict="survived" if passed else "caught", test=test or ("" if passed else "import"))
    return {**result, "seconds": round(time.monotonic() - start), "failing_anyway": skipped}


def read_lines(path: Path) -> list[dict]:
    """Return the objects of a file of JSON lines; none if it does not exist."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def place_of(record: dict) -> Place:
    """Return the place of a record of a file of places or of results."""
    return Place(*(record[name] for name in Place._fields))


def print_table(paths: list[Path]) -> None:
    """Print the verdicts of results files side by side, and their totals."""
    results = [{place_of(record): record for record in read_lines(path)} for path in paths]
    for place in dict.fromkeys(place for records in results for place in records):
        first = next(records[place] for records in results if place in records)
        print(f"\n{first['file']}: {place.function}\n    {place.source}  ->  {place.mutated}")
        for path, records in zip(paths, results, strict=True):
            record = records.get(place, {"verdict": "not run", "test": ""})
            print(f"    {path.stem}: {record['verdict']} {record['test']}")
    print()
    for path, records in zip(paths, results, strict=True):
        counts = collections.Counter(record["verdict"] for record in records.values())
        print(f"{path.stem}: {', '.join(f'{num} {verdict}' for verdict, num in counts.items())}")


def main() -> None:
    """Draw places, run the tests on each mutation, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", type=Path, help="JSON lines: the places, or the results of another run")
    parser.add_argument("--results", type=Path, help="JSON lines to which the results are appended")
    parser.add_argument("--table", type=Path, nargs="+", help="print the results of these files, run nothing")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=40, help="number of places to draw")
    parser.add_argument("--silence", type=float, default=300, help="seconds after which a test counts as hanging")
    args = parser.parse_args()
    if args.table:
        print_table(args.table)
        return
    if not args.places or not args.results:
        parser.error("--places and --results are required")
    if not args.places.exists():
        places = draw_places(args.tree, args.seed, args.num)
        args.places.write_text("".join(json.dumps(place._asdict()) + "\n" for place in places), encoding="utf-8")
    os.nice(15)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    known = {place_of(record) for record in read_lines(args.results)}
    places = [place for place in map(place_of, read_lines(args.places)) if place not in known]
    for place in places:
        result = try_place(args.tree.resolve(), place, args.silence)
        with open(args.results, "a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{result['verdict']:9} {result.get('seconds', 0):5} s  {result['file']} {result['function']}: "
              f"{result['source'][:60]}  {result['test']}", flush=True)  # fmt: skip
    print_table([args.results])


if __name__ == "__main__":
    main()
