"""The console command: it finds its commands in this folder, lists them and starts one."""

import functools
import importlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from distribuuuu import __version__

USAGE_ERROR = 2
# Listed first; the others follow in alphabetical order.
_FIRST = ("train", "test")


class Command(NamedTuple):
    """A command: its module, its line in the list, and names of other frameworks for it."""

    module: str
    summary: str
    synonyms: tuple[str, ...]


def main() -> int:
    """Start the command that the arguments of this process name; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for a Ctrl-C during imports
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for the completions of a line
        modules = {name: command.module for name, command in find_commands().items()}
        importlib.import_module(f"{__package__}.completion").complete(modules)
    prog = "python -m distribuuuu" if sys.argv[0].endswith("__main__.py") else "distribuuuu"
    return dispatch(prog, sys.argv[1:])


@functools.cache
def find_commands(name: str = "*") -> dict[str, Command]:
    """Return the commands by name: the files of this folder and of its sub-folders that have a `SUMMARY`.

    The files are read, not imported, so that the list appears at once. With a name, only files of this name are read.
    """
    folder, found = Path(__file__).parent, {}
    for path in [*folder.glob(f"{name}.py"), *folder.glob(f"*/{name}.py")]:
        source = path.read_text(encoding="utf-8")
        if summary := re.search(r'^SUMMARY = "(.+)"$', source, re.MULTILINE):
            synonyms = re.search(r"^SYNONYMS = \((.+)\)$", source, re.MULTILINE)
            module = ".".join(path.relative_to(folder).with_suffix("").parts)
            names = re.findall(r'"([\w-]+)"', synonyms[1]) if synonyms else ()
            found[path.stem] = Command(f"{__package__}.{module}", summary[1], tuple(names))
    return {name: found[name] for name in (*_FIRST, *sorted(found.keys() - {*_FIRST})) if name in found}


def dispatch(prog: str, args: Sequence[str]) -> int:
    """Start the command that the first argument names, or print the list of commands; return the exit status."""
    name, rest = (args[0], list(args[1:])) if args else ("--help", [])
    if name.isidentifier() and name in find_commands(name):
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
    return getattr(importlib.import_module(find_commands(name)[name].module), name)(prog, args)


def list_commands(prog: str) -> str:
    """Return the usage text with one line for each command."""
    commands = find_commands()
    width = max(map(len, commands))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in commands.items()]
    usage = f"usage: {prog} COMMAND [ARGUMENT ...]"
    more = f"{prog} COMMAND --help describes a command."
    return "\n".join([usage, "", *lines, "", more])


def describe_unknown(prog: str, args: list[str]) -> str:
    """Return the message for arguments that do not begin with a command."""
    from distribuuuu.config.errors import near_matches

    name, commands = args[0], find_commands()
    if name.startswith("-"):
        near = near_matches(name, ["--help", "--version"])
        hint = near[0] if near else f"{prog} train {name} ..."
        return f"got {name} instead of a command; did you mean {hint}?"
    stem = name.lower().replace("-", "_").partition("_")[0]  # train_net, pack_dataset
    meant = [own for own, command in commands.items() if stem in (own, *command.synonyms)]
    meant = meant or near_matches(name, commands)
    hint = f"did you mean {', '.join(meant)}?" if meant else f"expected one of {', '.join(commands)}"
    return f"no such command: {name}; {hint}"
