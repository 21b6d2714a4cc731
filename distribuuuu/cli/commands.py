"""The console command: a table of its commands, and their start.

A command is a function (prog, args) -> exit status: `prog` is the name in the usage text, `args` are the arguments
after the name of the command. Its module is imported when it is started, so that the list appears at once.
To add a command, write such a function in a module of cli/ (`run_guarded` of main.py handles errors, signals and exit
statuses; `CommandParser` of flag_hints.py suggests the nearest flag), and add a line to `COMMANDS`.
"""

import importlib
import signal
import sys
from collections.abc import Sequence

from distribuuuu import __version__

# Name -> module of cli/, function in it, and one line for the list.
COMMANDS = {
    "train": ("tools", "train", "train a model, or resume the run in OUT_DIR"),
    "test": ("tools", "test", "evaluate a run, a checkpoint or published weights"),
    "predict": ("predict", "predict", "predict the classes of images with a trained model"),
    "export": ("export", "export", "write a model for timm, ONNX, torch.export; check it"),
    "report": ("report", "report", "make an HTML page about a run"),
    "probe": ("probe", "probe", "measure the features of a run: k-NN, linear probe"),
    "compare": ("compare", "compare", "compare runs on the same images: is one better?"),
    "table": ("tools", "table", "make a table of finished runs"),
    "doctor": ("doctor", "run", "check a data set: damage, duplicates, leakage, labels"),
    "split": ("split", "split", "split a folder of images into lists"),
    "sweep": ("sweep", "sweep", "search options by many runs, which survive any stop"),
    "plan": ("plan", "run", "predict the hours, memory and disk of a run"),
    "pack": ("tools", "pack", "pack a data set into a few large files, or verify them"),
    "time": ("tools", "time", "measure the parts of a step and name the bottleneck"),
}
# Names that other frameworks and the scripts in tools/ use.
SYNONYMS = {
    "bench": "time",
    "benchmark": "time",
    "check": "doctor",
    "eval": "test",
    "evaluate": "test",
    "finetune": "train",
    "fit": "train",
    "infer": "predict",
    "inference": "predict",
    "results": "table",
    "val": "test",
    "validate": "test",
}
USAGE_ERROR = 2


def main() -> int:
    """Start the command that the arguments of this process name; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for a Ctrl-C during imports
    prog = "python -m distribuuuu" if sys.argv[0].endswith("__main__.py") else "distribuuuu"
    return dispatch(prog, sys.argv[1:])


def dispatch(prog: str, args: Sequence[str]) -> int:
    """Start the command that the first argument names, or print the list of commands; return the exit status."""
    name, rest = (args[0], list(args[1:])) if args else ("--help", [])
    if name in COMMANDS:
        return start_command(name, f"{prog} {name}", rest)
    if name in ("-h", "--help", "help"):
        print(list_commands(prog))
    elif name in ("-V", "--version"):
        print(f"distribuuuu {__version__}")
    else:
        print(f"command line: {describe_unknown(prog, list(args))}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def start_command(name: str, prog: str, args: list[str]) -> int:
    """Import the module of a command and call its function; return the exit status."""
    module, function, _ = COMMANDS[name]
    return getattr(importlib.import_module(f"distribuuuu.cli.{module}"), function)(prog, args)


def list_commands(prog: str) -> str:
    """Return the usage text with one line for each command."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, _, summary) in COMMANDS.items()]
    usage = f"usage: {prog} COMMAND [ARGUMENT ...]"
    more = f"{prog} COMMAND --help describes a command."
    return "\n".join([usage, "", *lines, "", more])


def describe_unknown(prog: str, args: list[str]) -> str:
    """Return the message for arguments that do not begin with a command."""
    from distribuuuu.config.errors import near_matches

    name = args[0]
    if name.startswith("-"):
        near = near_matches(name, ["--help", "--version"])
        hint = near[0] if near else f"{prog} train {name} ..."
        return f"got {name} instead of a command; did you mean {hint}?"
    stem = name.lower().replace("-", "_").partition("_")[0]  # train_net, pack_dataset
    meant = [SYNONYMS.get(stem, stem)] if SYNONYMS.get(stem, stem) in COMMANDS else near_matches(name, COMMANDS)
    hint = f"did you mean {', '.join(meant)}?" if meant else f"expected one of {', '.join(COMMANDS)}"
    return f"no such command: {name}; {hint}"
