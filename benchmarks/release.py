"""Check of a release: the source distribution and the wheel, each installed and used in a bare environment.

    pip install build twine
    python benchmarks/release.py --torch lowest newest

Both files are built and checked by twine. For each file and each torch, a virtual environment outside of the checkout
trains an epoch, evaluates it, and prints the help; the core must need no extra. Nothing is uploaded.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMANDS = (
    ("--version",),
    ("--help",),
    ("train", "--cfg", "shapes/resnet14", "OPTIM.MAX_EPOCH", "1", "OPTIM.WARMUP_EPOCHS", "0", "OUT_DIR", "run"),
    ("test", "run"),
    ("report", "run"),
    ("predict", "run", "run/photo.jpg"),
)


def run(*words, cwd: Path, **variables: str) -> str:
    """Run a command outside of the checkout; return its standard output. Its output is printed if it fails."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    result = subprocess.run([*map(str, words)], cwd=cwd, env=env | variables, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, words))}: exit status {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


def build(folder: Path) -> list[Path]:
    """Build the source distribution, and the wheel from it; return both."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    files = sorted(folder.glob("distribuuuu-*"))
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=folder)
    assert len(files) == 2, files
    return files


def lowest_requirements() -> list[str]:
    """Return the lowest torch and torchvision that setup.py allows."""
    setup = (ROOT / "setup.py").read_text()
    found = dict(re.findall(r'"(torch|torchvision)>=([\d.]+)"', setup))
    return [f"{name}=={version}.*" for name, version in found.items()]


def check(file: Path, torch: str, folder: Path) -> None:
    """Install a built file in a new environment below a folder, and use it there."""
    folder.mkdir()
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    program = folder / "venv" / "bin"
    extra = lowest_requirements() if torch == "lowest" else []
    run(program / "pip", "install", "-q", file, *extra, cwd=folder)
    run(program / "pip", "check", cwd=folder)
    for words in COMMANDS:
        if "run/photo.jpg" in words:
            photo = "from PIL import Image; Image.new('RGB', (64, 64)).save('run/photo.jpg')"
            run(program / "python", "-c", photo, cwd=folder)
        run(program / "distribuuuu", *words, cwd=folder, XDG_CACHE_HOME=str(folder / "cache"))
    versions = "import torch, torchvision; print('torch', torch.__version__, 'torchvision', torchvision.__version__)"
    print(f"{file.name}: {run(program / 'python', '-c', versions, cwd=folder).strip()}: good", flush=True)


def main() -> None:
    """Build and check a release."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", nargs="+", choices=("lowest", "newest"), default=["lowest", "newest"])
    parser.add_argument("--out", type=Path, help="keep the built files in this folder")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = (flags.out or Path(scratch) / "dist").resolve()
        out.mkdir(parents=True, exist_ok=True)
        for file in build(out):
            for torch in flags.torch:
                with tempfile.TemporaryDirectory() as folder:  # an environment has several GB
                    check(file, torch, Path(folder) / "bare")


if __name__ == "__main__":
    main()
