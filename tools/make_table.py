#!/usr/bin/env python3
"""Make a Markdown table of runs: python tools/make_table.py RUN... [--configs FILE ...] [--readme FILE --name NAME].

The same as `distribuuuu table`; with --readme, the table replaces the block from `<!-- table NAME -->` to
`<!-- /table -->` of a file, which names the command that made it.
"""

import contextlib
import io
import re
import shlex
import signal
import sys
from pathlib import Path


def update(words: list[str]) -> int:
    """Write the table of a command line with --readme and --name into the file; return the exit status."""
    from distribuuuu.commands.main import start_command
    from distribuuuu.files.atomic_file import replacing

    at, name_at = words.index("--readme"), words.index("--name")
    path, name = Path(words[at + 1]), words[name_at + 1]
    rest = [word for place, word in enumerate(words) if place not in (at, at + 1, name_at, name_at + 1)]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = start_command("table", "make_table.py", [*rest, "--format", "markdown"])
    text = path.read_bytes().decode("utf-8")
    old = r"(?:<!-- made by: .*\n)?(?:(?!<!-- )[^\n]*\n)*"
    pattern = rf"(?<=<!-- table {re.escape(name)} -->)(\r?\n){old}(?=<!-- /table -->)"
    block = f"\n<!-- made by: python tools/make_table.py {shlex.join(words)} -->\n\n{output.getvalue()}\n"
    changed, num = re.subn(pattern, lambda match: match[1] + block[1:], text)
    if status or num != 1:
        print(f"{path}: not updated: {num} blocks <!-- table {name} -->, status {status}", file=sys.stderr)
        return status or 2
    if changed != text:
        with replacing(path.resolve(), "wb") as file:
            file.write(changed.encode("utf-8"))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for a Ctrl-C during imports
    from distribuuuu.commands.main import start_command

    if "--readme" in sys.argv:
        sys.exit(update(sys.argv[1:]))
    sys.exit(start_command("table", "make_table.py", sys.argv[1:]))
