"""Commands that a plug-in registers with `@COMMANDS.register`."""

from distribuuuu.commands.guard import run_guarded
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.registry import COMMANDS


def start_plugged_in(name: str, prog: str, args: list[str]) -> int:
    """Start a command of the plug-in that `args` name with PLUGINS, like `start_command`; return the exit status."""

    def start() -> int:
        at = args.index("PLUGINS")
        load_cfg(None, args[at : at + 2])
        try:
            command = COMMANDS.get(name)
        except LookupError as error:
            raise ConfigError(f"command line: {error}") from error
        return command(prog, args[:at] + args[at + 2 :])

    return run_guarded(start)
