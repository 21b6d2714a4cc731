"""The console command: its table of commands, their list, and the start of one."""

import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from distribuuuu import __version__

USAGE_ERROR = 2


class Command(NamedTuple):
    """A command: the module with its function, which has the name of the command, and its line in the list."""

    module: str
    summary: str


# The list of commands, by group. A command whose module has been deleted is left out.
GROUPS = {
    "Run": {
        "train": Command("train", "train a model, or resume a run that was stopped"),
        "test": Command("train", "evaluate a trained model"),
        "finetune": Command("finetune.finetune", "make the best model of your photographs in some minutes"),
        "sweep": Command("sweep.sweep", "search the best options by many runs, resumable"),
    },
    "Before a run": {"plan": Command("plan.plan", "measure the time and memory that a run needs")},
    "After a run": {
        "report": Command("report.report", "make a page about a run: curves, classes, mistakes"),
        "compare": Command("report.compare", "compare runs on the same images: is one better?"),
        "predict": Command("predict.predict", "classify your images with a trained model"),
        "calibrate": Command("predict.calibrate", "fit the confidence of a model to validation images"),
        "export": Command("export.export", "convert a model to ONNX, timm or safetensors"),
        "probe": Command("probe.probe", "measure how good the features of a model are"),
        "embed": Command("finetune.embed", "write the features of images to a file"),
        "table": Command("table.table", "make a table of finished runs"),
        "track": Command("track.track", "send a run to MLflow or W&B"),
    },
    "Data": {
        "doctor": Command("doctor.doctor", "find damaged images, duplicates and contradicting labels"),
        "split": Command("split.split", "divide images into training and validation lists"),
        "pack": Command("pack.pack", "store a data set in a few large files, which load faster"),
    },
}


def main() -> int:
    """Start the command that the arguments of this process name; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for a Ctrl-C during imports
    prog = "python -m distribuuuu" if sys.argv[0].endswith("__main__.py") else "distribuuuu"
    return dispatch(prog, sys.argv[1:])


def find_commands() -> dict[str, Command]:
    """Return the commands by name, in the order of the list, with the full names of their modules."""
    folder = Path(__file__).parent
    found = {name: command for group in GROUPS.values() for name, command in group.items()}
    return {
        name: command._replace(module=f"{__package__}.{command.module}")
        for name, command in found.items()
        if folder.joinpath(*command.module.split(".")).with_suffix(".py").is_file()
    }


def dispatch(prog: str, args: Sequence[str]) -> int:
    """Start the command that the first argument names, or print the list of commands; return the exit status."""
    name, *rest = args or ["--help"]
    if name == "help" and rest:
        name, *rest = [rest[0], "--help"]
    if name in find_commands():
        return start_command(name, f"{prog} {name}", rest)
    if name in ("-h", "--help", "help"):
        print(list_commands(prog))
    elif name in ("-V", "--version"):
        print(f"distribuuuu {__version__}")
    elif "PLUGINS" in rest[:-1]:
        return start_plugged_in(name, f"{prog} {name}", rest)
    else:
        from distribuuuu.hints.options import describe_unknown_command

        print(f"command line: {describe_unknown_command(name, find_commands(), prog)}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def start_command(name: str, prog: str, args: list[str]) -> int:
    """Call the function of a command, (prog, args) -> exit status, within `run_guarded`; return the exit status."""
    module = importlib.import_module(find_commands()[name].module)
    guard = importlib.import_module(f"{__package__}.guard")
    return guard.run_guarded(lambda: getattr(module, name)(prog, args))


def start_plugged_in(name: str, prog: str, args: list[str]) -> int:
    """Start a command that the plug-in after PLUGINS registers in COMMANDS, like `start_command`."""
    from distribuuuu.config import ConfigError, load_cfg
    from distribuuuu.config.registry import COMMANDS
    from distribuuuu.hints.options import describe_unknown_command

    def start() -> int:
        at = args.index("PLUGINS")
        load_cfg(None, args[at : at + 2])
        if name not in COMMANDS.names():
            known = [*find_commands(), *COMMANDS.names()]
            raise ConfigError(f"command line: {describe_unknown_command(name, known, prog.removesuffix(f' {name}'))}")
        return COMMANDS.get(name)(prog, args[:at] + args[at + 2 :])

    return importlib.import_module(f"{__package__}.guard").run_guarded(start)


def list_commands(prog: str) -> str:
    """Return the usage text with one line for each command."""
    commands = find_commands()
    width, lines = max(map(len, commands)), [f"usage: {prog} COMMAND [ARGUMENT ...]"]
    for title, group in GROUPS.items():
        if names := [name for name in group if name in commands]:
            lines += ["", f"{title}:", *(f"  {name:<{width}}  {group[name].summary}" for name in names)]
    return "\n".join([*lines, "", f"{prog} help COMMAND describes a command."])
