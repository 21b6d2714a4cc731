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
    run(root, "sweep", *SWEEP, "OUT_DIR", folder / "sweep")
    runs = sorted(path.parent for path in (folder / "sweep").rglob("predictions.npz"))
    first, last = runs[0], runs[-1]
    run(root, "report", first)
    shutil.copyfile(first / "report.html", pages["report.html"])
    run(root, "compare", first, last, "--out", pages["compare.html"])
    shutil.copyfile(folder / "sweep" / "sweep.html", pages["sweep.html"])
    return pages


def run(root: Path, *words) -> None:
    """Run a command of the package."""
    subprocess.run([sys.executable, "-m", "distribuuuu", *map(str, words)], cwd=root, check=True)
