"""Pages for the gallery: a report, a comparison and a sweep page, from a sweep of two short runs."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

logger = logging.getLogger("mkdocs")
SWEEP = ("--cfg", "shapes/resnet14", "OPTIM.BASE_LR=0.02,0.1", "OPTIM.MAX_EPOCH", "4", "OPTIM.WARMUP_EPOCHS", "1")


def build_gallery(root: Path) -> dict[str, Path]:
    """Return the pages, file name -> path; train first if they do not exist.

    They are kept in the folder that the environment variable GALLERY names, by default exp/gallery; delete it to renew
    them.
    """
    folder = Path(os.environ.get("GALLERY", root / "exp" / "gallery")).resolve()
    pages = {name: folder / name for name in ("report.html", "compare.html", "sweep.html")}
    if all(page.exists() for page in pages.values()):
        return pages
    logger.info("Training two short runs for the gallery, in %s", folder)
    folder.mkdir(parents=True, exist_ok=True)

    def run(*words) -> None:
        """Run a command of the package in the folder: the pages show relative paths."""
        env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root.resolve()), os.environ.get("PYTHONPATH", "")))}
        subprocess.run([sys.executable, "-m", "distribuuuu", *map(str, words)], cwd=folder, env=env, check=True)

    run("sweep", *SWEEP, "OUT_DIR", "sweep")
    runs = sorted(path.parent.relative_to(folder) for path in (folder / "sweep").rglob("predictions.npz"))
    first, last = runs[0], runs[-1]
    run("report", first)
    shutil.copyfile(folder / first / "report.html", pages["report.html"])
    run("compare", first, last, "--out", "compare.html")
    shutil.copyfile(folder / "sweep" / "sweep.html", pages["sweep.html"])
    for page in pages.values():  # where the data is, is absolute
        text = page.read_text(encoding="utf-8").replace(f"{folder}/", "")
        text = text.replace(f"{Path.home()}/", "~/") if Path.home() != Path("/") else text
        page.write_text(text, encoding="utf-8")
    return pages
