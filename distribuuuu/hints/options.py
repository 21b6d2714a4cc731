"""Unknown options, flags and commands: similar names."""

from collections.abc import Collection, Sequence

from distribuuuu.config.errors import near_matches
from distribuuuu.config.options import OPEN_SECTIONS, OPTIONS


def normalized(name: str) -> str:
    """Return a flag or a part of a key in lower case, with dashes between its words only."""
    return name.lower().replace("_", "-").strip("-")


def describe_unknown_command(name: str, commands: Collection[str], prog: str) -> str:
    """Return the message for a first argument that is no command."""
    if name.startswith("-"):
        return f"got {name} instead of a command; did you mean {prog} train {name} ...?"
    meant = near_matches(name, commands)
    hint = f"did you mean {', '.join(meant)}?" if meant else f"expected one of {', '.join(commands)}"
    return f"no such command: {name}; {hint}"


def describe_unknown_flag(flag: str, known: Sequence[str]) -> str:
    """Return the message for a flag that a command does not have; `known` are those that it has."""
    meant = {normalized(key.rpartition(".")[2]): key for key in reversed(OPTIONS)}
    meant |= {normalized(own): own for own in known if own.startswith("--")}
    near = near_matches(normalized(flag), meant, cutoff=0.66)
    hint = "options are KEY VALUE arguments; train --help-config lists them"
    hint = f"did you mean {meant[near[0]]}?" if near else hint
    return f"no such flag: {flag}; {hint}"


def suggest_keys(key: str, known: list[str]) -> list[str]:
    """Return the options that an unknown key may mean: of the same name, or similar ones."""
    section, _, name = key.lower().rpartition(".")
    if same := [other for other in known if other.rpartition(".")[2].lower() == name]:
        return same
    near = near_matches(name, {other.rpartition(".")[2] for other in known}, cutoff=0.75)
    similar = [other for match in near for other in known if other.rpartition(".")[2] == match]
    similar.sort(key=lambda other: other.lower().rpartition(".")[0] != section)
    return similar[:3] or near_matches(key, known, cutoff=0.85)


def describe_unknown_key(key: str) -> str:
    """Return the message for a key that is no option."""
    known = [other for other in OPTIONS if other not in OPEN_SECTIONS]
    if key in OPEN_SECTIONS:
        return f"is a section, not an option; set {key}.NAME, or {{NAME: VALUE}}"
    if names := [other.removeprefix(f"{key}.") for other in known if other.startswith(f"{key}.")]:
        return f"is a section, not an option; it contains {', '.join(names)}"
    near = suggest_keys(key, known)
    return "no such key" + (f"; did you mean {', '.join(near)}?" if near else "; --help-config lists all")
