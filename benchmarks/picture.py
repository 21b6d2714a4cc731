#!/usr/bin/env python3
"""Draw the README's picture: the output of a fine-tuning beside the page of its report, in light and dark.

    distribuuuu finetune clothes --minutes 1 > finetune.txt && distribuuuu report exp/clothes
    python benchmarks/picture.py exp/clothes finetune.txt

The picture shows the summary of the report and the mistakes, not the sections between them. Needs Chromium, which takes
the screenshots.
"""

import argparse
import html
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH, HEIGHT = 1500, 760
HIDDEN = "<style>#confusion, #classes, #confidence { display: none }</style></head>"
COLORS = {"light": ("#ffffff", "#f6f8fa", "#1f2328", "#d0d7de", "#57606a"),
          "dark": ("#0d1117", "#161b22", "#e6edf3", "#30363d", "#8b949e")}  # fmt: skip
PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: {back}; display: flex; gap: 20px; padding: 20px; width: 1460px; height: 720px; }}
section {{ border: 1px solid {edge}; border-radius: 10px; overflow: hidden; background: {panel}; color: {ink}; }}
header {{ font: 13px sans-serif; color: {faint}; padding: 8px 14px; border-bottom: 1px solid {edge}; }}
pre {{ font: 11.8px/1.7 "DejaVu Sans Mono", monospace; margin: 0; padding: 12px 14px; white-space: pre-wrap; }}
iframe {{ border: 0; width: 860px; height: 940px; transform: scale(0.75); transform-origin: 0 0; }}
</style>
<section style="flex: 1"><header>terminal</header><pre>{log}</pre></section>
<section style="width: 645px"><header>report.html</header><iframe src="{report}"></iframe></section>"""


def show_output(path: Path) -> str:
    """Return the commands with the standard output of the fine-tuning, without the log of its training."""
    output = re.sub(r"/\S+/(?=distribuuuu/clothes)", "~/.cache/", path.read_text(encoding="utf-8")).rstrip()
    return html.escape(f"$ distribuuuu finetune clothes --minutes 1\n{output}\n\n$ distribuuuu report exp/clothes")


def main() -> None:
    """Write docs/images/first_run_light.png and first_run_dark.png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a finished run with its report.html")
    parser.add_argument("output", type=Path, help="file with the standard output of the fine-tuning")
    args = parser.parse_args()
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not browser:
        sys.exit("Chromium is not installed")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for scheme, (back, panel, ink, edge, faint) in COLORS.items():
            report = (args.run / "report.html").read_text(encoding="utf-8")
            report = report.replace(f"{args.run.resolve().parents[1]}/", "").replace("</head>", HIDDEN)
            time = r'<div><span class="label">time</span>.*?</div>'  # depends on the load of the machine
            report = re.sub(time, "", report)
            if scheme == "dark":  # a screenshot has no dark mode of the system
                report = report.replace("@media screen and (prefers-color-scheme: dark)", "@media screen")
            (Path(folder) / "report.html").write_text(report, encoding="utf-8")
            page = PAGE.format(back=back, panel=panel, ink=ink, edge=edge, faint=faint,
                               log=show_output(args.output), report="report.html")  # fmt: skip
            (Path(folder) / "page.html").write_text(page, encoding="utf-8")
            command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                       f"--window-size={WIDTH},{HEIGHT}", "--allow-file-access-from-files",
                       f"--user-data-dir={folder}/profile",
                       f"--screenshot={IMAGES / f'first_run_{scheme}.png'}", f"file://{folder}/page.html"]  # fmt: skip
            subprocess.run(command, check=True, capture_output=True, timeout=300)


if __name__ == "__main__":
    main()
