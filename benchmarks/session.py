#!/usr/bin/env python3
"""Record the README's animation: a training that is stopped by Ctrl-C and resumed beside one that never stops.

    python benchmarks/session.py FOLDER

Runs the commands in a new FOLDER and writes docs/images/resume.svg. It shows what the commands print, without the start
of the log and without times, which depend on the load of the machine; the pace of the animation is made up.
"""

import html
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

SVG = Path(__file__).resolve().parents[1] / "docs" / "images" / "resume.svg"
SHOWN = re.compile(r"\S+ ((?:model|resumed|SIGINT|validation, epoch|best top1:).*)")
TRAIN = "distribuuuu train --cfg shapes/resnet14 OPTIM.MAX_EPOCH 5 OUT_DIR"
COLUMNS, LINE, WIDTH = 92, 19, 8.43


def run(command: str, folder: Path, stop_in: str = "") -> list[str]:
    """Run a command, press Ctrl-C one row after the line with `stop_in`, and return the lines to show."""
    lines, is_near = [f"$ {command}"], False
    with subprocess.Popen(command.split(), stderr=subprocess.PIPE, text=True, cwd=folder) as process:
        for line in process.stderr:
            if is_near and re.search(r" \d+/62 ", line):
                process.send_signal(signal.SIGINT)
                lines, is_near = [*lines, "^C"], False
            is_near = is_near or bool(stop_in and stop_in in line)
            if shown := SHOWN.match(line):
                lines.append(shown[1].partition(";")[0])
    return lines


def draw(lines: list[str]) -> str:
    """Return an SVG in which the lines appear one after another, for ever; a reader without animations sees all."""
    delays, time = [], 0.0
    for line in lines:
        time += 1.2 if line.startswith(("$", "^C")) else 0.45
        delays.append(time)
    total, rows = time + 6, []
    for index, (line, delay) in enumerate(zip(lines, delays, strict=True)):
        kind = "c" if line.startswith(("$", "^C")) else "o"
        share = 100 * delay / total
        shown = f"@keyframes k{index}{{0%,{share:.2f}%{{opacity:0}}{share + 0.01:.2f}%,100%{{opacity:1}}}}"
        rows.append(f'<style>{shown}</style><text class="{kind}" x="14" y="{LINE * index + 30}" '
                    f'style="animation:k{index} {total:.1f}s infinite">{html.escape(line)}</text>')  # fmt: skip
    width, height = round(COLUMNS * WIDTH + 28), LINE * len(lines) + 30
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<title>A training that was stopped and resumed has the same weights as one that was not</title>
<style>text{{font:14px "DejaVu Sans Mono",Menlo,Consolas,monospace;white-space:pre}}.c{{fill:#7ee787}}.o{{fill:#e6edf3}}
@media (prefers-reduced-motion:reduce){{text{{animation:none!important}}}}</style>
<rect width="100%" height="100%" rx="10" fill="#0d1117"/>
{chr(10).join(rows)}
</svg>
"""


def main() -> None:
    """Train, stop, resume, train without a stop, and compare the hashes of the weights."""
    folder = Path(sys.argv[1])
    folder.mkdir()
    lines = run(f"{TRAIN} exp/a", folder, stop_in="validation, epoch 2:")
    lines += run(f"{TRAIN} exp/a", folder) + run(f"{TRAIN} exp/b", folder)
    command = """grep -h '"raw": "' exp/a/results.json exp/b/results.json"""
    hashes = subprocess.run(shlex.split(command), capture_output=True, text=True, cwd=folder, check=True).stdout.split(
        "\n"
    )
    SVG.write_text(draw([*lines, f"$ {command}", *(line.strip() for line in hashes if line)]), encoding="utf-8")


if __name__ == "__main__":
    main()
