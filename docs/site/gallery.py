"""Make the pages of the gallery, docs/gallery/: `python docs/site/gallery.py` trains two short runs and renews them."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

GALLERY = Path(__file__).parents[1] / "gallery"
SWEEP = ("--cfg", "shapes/resnet14", "OPTIM.BASE_LR=0.0002,0.002", "OPTIM.MAX_EPOCH", "4", "OUT_DIR", "sweep")


def main() -> None:
    """Train a sweep, and store the pages of `report` and `sweep` without the paths of this machine."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def run(*words: object) -> None:
            command = [sys.executable, "-m", "distribuuuu", *map(str, words)]
            subprocess.run(command, cwd=folder, check=True)

        run("sweep", *SWEEP)
        *_, last = sorted(path.parent.relative_to(folder) for path in folder.rglob("predictions.npz"))
        run("report", last)
        shutil.copyfile(folder / last / "report.html", folder / "report.html")
        shutil.copyfile(folder / "sweep" / "sweep.html", folder / "sweep.html")
        GALLERY.mkdir(exist_ok=True)
        for name in ("report.html", "sweep.html"):
            text = (folder / name).read_text(encoding="utf-8").replace(f"{folder}/", "")
            text = text.replace(f"{Path.home()}/", "~/") if Path.home() != Path("/") else text
            (GALLERY / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
