"""Completion of command lines in a shell, by argcomplete: `eval "$(register-python-argcomplete distribuuuu)"`.

Completed are commands, flags, shipped configs and local files after --cfg, formats after --to, option names, and their
values: words, and the names of models and optimizers that an earlier command has cached.
"""

import argparse
import functools
import importlib
import os
import shlex
from collections.abc import Mapping

from distribuuuu.commands.arguments import build_parser
from distribuuuu.config.locate import shipped_file
from distribuuuu.config.model_names import SOURCES, load_table
from distribuuuu.config.options import OPTIONS


def complete(modules: Mapping[str, str]) -> None:
    """Write the completions of the line in COMP_LINE, and exit the process. `modules`: command -> module.

    Raises:
        ModuleNotFoundError: argcomplete is not installed.
    """
    import argcomplete

    argcomplete.autocomplete(parser_of_line(os.environ.get("COMP_LINE", ""), modules))


def parser_of_line(line: str, modules: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return a parser of all commands, with the arguments of the one that a line names."""
    parser = argparse.ArgumentParser("distribuuuu")
    commands = parser.add_subparsers()
    for name, module in modules.items():
        if name not in split_line(line):
            commands.add_parser(name)
            continue
        default = functools.partial(build_parser, train=name == "train")
        build = getattr(importlib.import_module(module), "build_parser", default)
        own = commands.add_parser(name, parents=[build("distribuuuu")], conflict_handler="resolve")
        for action in own._actions:
            if action.dest == "cfg":
                action.completer = list_configs  # type: ignore[attr-defined]
            elif action.dest == "to" and "|" in str(action.metavar):
                action.completer = lambda metavar=action.metavar, **_: metavar.split("|")  # type: ignore[attr-defined]
        own.add_argument("words", nargs="*").completer = list_words  # type: ignore[attr-defined]
    return parser


def split_line(line: str) -> list[str]:
    """Return the words of a command line, whose last one may have an open quote."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def list_configs(prefix: str, **_) -> list[str]:
    """Return the names of the shipped configs, as --cfg takes them, and local YAML files."""
    from argcomplete.completers import FilesCompleter

    folder = shipped_file("configs")
    shipped = [str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml")]
    return [*shipped, *FilesCompleter(("yaml",))(prefix)]


def list_words(prefix: str, parsed_args: argparse.Namespace, **_) -> list[str]:
    """Return option names; after an option name, its words."""
    words = split_line(os.environ.get("COMP_LINE", "").removesuffix(prefix))
    option = OPTIONS.get(words[-1]) if words else None
    if option is None:
        return list(OPTIONS)
    values = [*(option.choices or ()), *(option.names.names() if option.names else ())]
    for source in {"MODEL.ARCH": SOURCES, "OPTIM.NAME": ("optimizers",)}.get(words[-1], ()):
        table = load_table(source)
        values += table.names if table else ()
    return [str(value) for value in values] or (["True", "False"] if isinstance(option.default, bool) else [])
