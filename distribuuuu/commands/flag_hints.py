"""Parsing of flags and of the options of the config among them."""

import argparse
import os
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.locate import find_config
from distribuuuu.config.options import OPEN_SECTIONS, OPTIONS
from distribuuuu.config.reader import COMMAND_LINE

_FLAG = re.compile(r"--?[a-zA-Z]")
_OPEN = tuple(f"{key}." for key in OPEN_SECTIONS)
_SECTIONS = {key.partition(".")[0] for key in (*OPTIONS, *OPEN_SECTIONS)}
# Flags of other frameworks that are taken as options.
COMMON_FLAGS = {"--lr": "OPTIM.BASE_LR", "--epochs": "OPTIM.MAX_EPOCH", "--batch-size": "TRAIN.BATCH_SIZE"}


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are a ConfigError.

    Options of the config are given to every command in the same way, at any place: KEY VALUE, KEY=VALUE or --set KEY
    VALUE, and by the flags of COMMON_FLAGS. `overrides` of the parsed arguments has them as KEY VALUE words.
    Without `joined`, KEY=VALUE is no option; without a `usage`, which mentions them, options are an error.
    """

    def __init__(self, prog: str | None = None, joined: bool = True, **options: Any):
        super().__init__(prog=prog, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self._joined = joined

    @property
    def flags(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]

    def parse_known_args(self, args=None, namespace=None):
        """Return the parsed and the remaining arguments; of `--cfg FILE FILE`, all files as a tuple.

        A repeated --cfg is an error: argparse would use the last one only.
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
        taking = {name for one in self._actions if one.nargs in (None, "?") for name in one.option_strings}
        while waiting:
            word = waiting.pop(0)
            name, sign, value = word.partition("=")
            key = COMMON_FLAGS[name] if name in COMMON_FLAGS and name not in self.flags else name
            if word == "--set" and word not in self.flags:
                continue
            is_option = key != name or (self._joined or not sign) and _is_key(name) and not taking & {*rest[-1:]}
            if is_option:  # an option without a value, at the end, is reported by the reader of the config
                overrides += [key, value] if sign else [key, *waiting[:1]]
                del waiting[: not sign]
            else:
                rest.append(word)
        return rest, overrides

    def parse_args(self, args=None, namespace=None):
        """Return the parsed arguments; raise ConfigError with each unknown flag, or the first other error."""
        parsed, rest, problems = parse_flags(self, args)
        if rest := rest[: len(rest) - len(parsed.overrides)]:
            problems.append(Problem(COMMAND_LINE, f"too many arguments: {shlex.join(rest)}"))
        if parsed.overrides and self.usage is None:
            problems.append(Problem(parsed.overrides[0], "has no effect on this command; fix: remove it"))
        if problems:
            raise ConfigError(problems)
        return parsed

    def error(self, message: str) -> NoReturn:
        raise ConfigError(Problem(COMMAND_LINE, message))


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of a flag whose value is a whole number from `least` on."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"got {value}; expected {least} or more")
        return value

    return number


def _is_key(word: str) -> bool:
    """Tell whether a word is the key of an option, known or misspelled, and no file."""
    section = word.partition(".")[0]
    is_key = word in OPTIONS or re.fullmatch(r"[A-Z][A-Z_]+(\.\w+)+", word) and section in _SECTIONS
    return bool(is_key or word.startswith(_OPEN)) and not os.path.exists(word)


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
    parser: CommandParser, args: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str], list[Problem]]:
    """Return the flags, the other arguments (options of the config last), and a problem for each unknown flag."""
    flags, words = parser.parse_known_args(args)
    problems, rest = [], []
    for word, before in zip(words, ["", *words], strict=False):
        if _FLAG.match(word):
            from distribuuuu.hints.options import describe_unknown_flag

            problems.append(Problem(COMMAND_LINE, describe_unknown_flag(word.partition("=")[0], parser.flags)))
        elif "=" in before or not _FLAG.match(before):  # else it is the value of an unknown flag
            rest.append(word)
    return flags, [*rest, *flags.overrides], problems
