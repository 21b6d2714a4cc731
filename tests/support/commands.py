"""The optional commands of the project: each can be deleted with its tests and its page."""

from types import ModuleType

import pytest

from distribuuuu.commands.main import find_commands, start_command

# Name -> what is deleted with it, relative to the root of the project.
OPTIONAL_COMMANDS = {
    "finetune": ("distribuuuu/commands/finetune", "tests/commands/finetune", "docs/photographs.md"),
    "embed": ("distribuuuu/commands/finetune", "tests/commands/finetune", "docs/photographs.md"),
    "doctor": ("distribuuuu/commands/doctor", "tests/commands/doctor", "docs/doctor.md"),
    "export": ("distribuuuu/commands/export", "tests/commands/export"),
    "pack": ("distribuuuu/commands/pack", "tests/commands/pack", "tools/pack_dataset.py"),
    "plan": ("distribuuuu/commands/plan", "tests/commands/plan", "docs/plan.md"),
    "predict": ("distribuuuu/commands/predict", "tests/commands/predict"),
    "calibrate": ("distribuuuu/commands/predict", "tests/commands/predict"),
    "probe": ("distribuuuu/commands/probe", "tests/commands/probe"),
    "report": ("distribuuuu/commands/report", "tests/commands/report", "docs/report.md"),
    "compare": ("distribuuuu/commands/report", "tests/commands/report", "docs/report.md"),
    "split": ("distribuuuu/commands/split", "tests/commands/split"),
    "sweep": ("distribuuuu/commands/sweep", "tests/commands/sweep", "docs/sweep.md"),
    "table": ("distribuuuu/commands/table", "tests/commands/table", "tools/make_table.py"),
    "track": ("distribuuuu/commands/track", "distribuuuu/records/trackers", "tests/records/trackers",
              "docs/trackers.md"),
}  # fmt: skip


def list_deleted_paths() -> list[str]:
    """Return the paths of the commands that have been deleted, relative to the root of the project."""
    return [path for name, paths in OPTIONAL_COMMANDS.items() if name not in find_commands() for path in paths]


def is_deleted(name: str) -> bool:
    """Tell whether a name is that of a command of the project that has been deleted."""
    return name in OPTIONAL_COMMANDS and name not in find_commands()


def command_module(name: str) -> ModuleType:
    """Return a module of an optional command, e.g. "pack.packer"; skip the test where the command has been deleted."""
    return pytest.importorskip(f"distribuuuu.commands.{name}")


def run_command(name: str, *words: object) -> int:
    """Run an optional command and return its exit status; skip the test where the command has been deleted."""
    if is_deleted(name):
        pytest.skip(f"{name} has been deleted")
    return start_command(name, f"distribuuuu {name}", [str(word) for word in words])


def requires(*names: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test where one of the commands has been deleted."""
    missing = [name for name in names if name not in find_commands()]
    return pytest.mark.skipif(bool(missing), reason=f"deleted: {', '.join(missing)}")
