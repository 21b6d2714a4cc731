"""Parsing of flags: for unknown ones, such as those of other frameworks, the equivalent option is named."""

import argparse
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from distribuuuu.config import ConfigError, Problem, get_cfg
from distribuuuu.config.config_node import iter_options
from distribuuuu.config.errors import near_matches
from distribuuuu.config.locate import find_config
from distribuuuu.config.options import OPEN_SECTIONS, OPTIONS
from distribuuuu.config.reader import COMMAND_LINE
from distribuuuu.hints.options import BY_NAME, describe_missing, normalized

_FLAG = re.compile(r"--?[a-zA-Z]")
_KEY = re.compile(r"[A-Z][A-Z_]+(\.|=|$)")
_SECTIONS = {key.partition(".")[0] for key in (*OPTIONS, *OPEN_SECTIONS)}
# Flags of other frameworks that are taken as options.
COMMON_FLAGS = {"--lr": "OPTIM.BASE_LR", "--epochs": "OPTIM.MAX_EPOCH", "--batch-size": "TRAIN.BATCH_SIZE"}


class _WrappedLines(argparse.RawDescriptionHelpFormatter):
    """A format of help texts that fills the paragraphs of a description; indented lines are kept as far as they fit."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled: list[str] = []
        for paragraph in text.split("\n\n"):
            is_example = paragraph.startswith(" ")
            lines = paragraph.splitlines() if is_example else [" ".join(paragraph.split())]
            indented = (textwrap.wrap(line, width, subsequent_indent="      ") if is_example else
                        textwrap.wrap(line, width) for line in lines)  # fmt: skip
            filled.append("\n".join(indent + part for parts in indented for part in parts))
        return "\n\n".join(filled)


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are a ConfigError; for an unknown flag, the nearest one is suggested.

    Options of the config are given to every command in the same way, at any place: KEY VALUE, KEY=VALUE or --set KEY
    VALUE, and by the flags of COMMON_FLAGS. `overrides` of the parsed arguments has them as KEY VALUE words.

    Args:
        prog: the name in the usage text.
        removed: flags of earlier versions, and what replaces each.
        joined: whether KEY=VALUE is an option.
        options: those of ArgumentParser. Paragraphs of the description are filled, indented lines are kept.
    """

    def __init__(
        self, prog: str | None = None, removed: Mapping[str, str] | None = None, joined: bool = True, **options: Any
    ):
        super().__init__(prog=prog, allow_abbrev=False, formatter_class=_WrappedLines, **options)
        self.removed, self._joined = removed or {}, joined

    @property
    def flags(self) -> list[str]:
        """The names of the flags."""
        return [option for action in self._actions for option in action.option_strings]

    def parse_known_args(self, args=None, namespace=None):
        """Return the parsed and the remaining arguments; of `--cfg FILE FILE`, all files as a tuple.

        Raises:
            ConfigError: --cfg is repeated, of which argparse would use the last one only; or an invalid argument.
        """
        words, more = _split_files(args or ())
        words, overrides = self._split_options(words)
        parsed, rest = super().parse_known_args(words, namespace)
        given = [word for word in words if word.partition("=")[0] == "--cfg"]
        if len(given) > 1:
            fix = "fix: name all files after one --cfg, in the order in which they are merged: --cfg FILE FILE"
            raise ConfigError(Problem("--cfg", f"got it {len(given)} times; expected it once; {fix}"))
        if getattr(parsed, "cfg", None) == "":
            raise ConfigError(Problem("--cfg", "got an empty name; expected a file; fix: name one, or remove --cfg"))
        if more:
            parsed.cfg = (parsed.cfg, *more)
        parsed.overrides = overrides
        return parsed, rest

    def _split_options(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the words without the options of the config, and these as KEY VALUE words."""
        waiting, rest, overrides = list(words), list[str](), list[str]()
        while waiting:
            word = waiting.pop(0)
            name, sign, value = word.partition("=")
            key = COMMON_FLAGS[name] if name in COMMON_FLAGS and name not in self.flags else name
            if word == "--set" and word not in self.flags:
                continue
            is_option = key != name or (self._joined or not sign) and _is_key(name) and rest[-1:] != ["--help-config"]
            if is_option:  # an option without a value, at the end, is reported by the reader of the config
                overrides += [key, value] if sign else [key, *waiting[:1]]
                del waiting[: not sign]
            else:
                rest.append(word)
        return rest, overrides

    def parse_args(self, args=None, namespace=None):
        """Return the parsed arguments.

        Raises:
            ConfigError: with each unknown flag, or the first other error.
        """
        parsed, rest, problems = parse_flags(self, args)
        if rest := rest[: len(rest) - len(parsed.overrides)]:
            problems.append(Problem(COMMAND_LINE, f"too many arguments: {shlex.join(rest)}"))
        if problems:
            raise ConfigError(problems)
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError."""
        raise ConfigError(Problem(COMMAND_LINE, message.replace("cfg: expected one argument", "cfg: expected files")))


def _is_key(word: str) -> bool:
    """Tell whether a word is the key of an option, known or misspelled, and no file."""
    section = word.partition(".")[0]
    is_key = word in OPTIONS or re.fullmatch(r"[A-Z][A-Z_]+(\.\w+)+", word) and section in _SECTIONS
    return bool(is_key) and not os.path.exists(word)


def _split_files(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return arguments without the further files of --cfg, and these files."""
    words: list[str] = []
    more: list[str] = []
    for word in args:
        follows = words and (words[-1].startswith("--cfg=") or words[-2:-1] == ["--cfg"])
        is_name = not os.path.exists(word) and find_config(word).endswith(".yaml")
        is_file = not _FLAG.match(word) and (is_name or word.endswith((".yaml", ".yml")))
        (more if follows and is_file else words).append(word)
    return words, more


def parse_flags(
    parser: CommandParser, args: Sequence[str] | None, refused: Callable[[str], bool] = lambda words: False
) -> tuple[argparse.Namespace, list[str], list[Problem]]:
    """Return the parsed flags, the other arguments (options of the config last), and a problem for each unknown flag.

    `refused` tells whether the command would refuse a hint, e.g. "OPTIM.MAX_EPOCH 10", which is then not given.
    """
    flags, waiting = parser.parse_known_args(args)
    problems, rest = [], []
    while waiting:
        arg = waiting.pop(0)
        if not _FLAG.match(arg):
            rest.append(arg)
            continue
        joined = re.fullmatch(r"(-[a-zA-Z])(\d.*)", arg)  # -j8
        flag, has_value, value = (joined[1], "=", joined[2]) if joined else arg.partition("=")
        takes_next = waiting and not _FLAG.match(waiting[0]) and not _KEY.match(waiting[0])
        if not has_value and takes_next and "{}" in BY_NAME.get(normalized(flag), "{}"):
            value = waiting.pop(0)
        removed = parser.removed.get(flag)
        hint = f"; it was removed; fix: {removed}" if removed else _hint(flag, value, parser.flags, refused)
        problems.append(Problem(COMMAND_LINE, f"no such flag: {flag}{hint}"))
    return flags, [*rest, *flags.overrides], problems


def _hint(flag: str, value: str, known: Sequence[str], refused: Callable[[str], bool]) -> str:
    """Return '; did you mean ...?' for an unknown flag, a reference to --help-config, or nothing if all is refused."""
    name, value = normalized(flag), shlex.quote(value) if value else "VALUE"
    if missing := describe_missing(name):
        return f"; {missing}"
    same = [key for key, _ in iter_options(get_cfg()) if normalized(key.rpartition(".")[2]) == name]
    if name in BY_NAME:
        meant = [BY_NAME[name].format(value)]
    elif same:
        meant = [f"{key} {value}" for key in same]
    else:
        near = near_matches(name, [*(own.lstrip("-") for own in known if own.startswith("--")), *BY_NAME], cutoff=0.66)
        meant = [f"--{other}" if f"--{other}" in known else BY_NAME[other].format(value) for other in near]
    taken = [words for words in meant if words.split()[0] in known or words[0] != "-" and not refused(words)]
    if meant:
        return f"; did you mean {' or '.join(dict.fromkeys(taken))}?" if taken else ""
    command = "" if "--help-config" in known else "distribuuuu train "
    return f"; options are KEY VALUE arguments, which {command}--help-config lists"
