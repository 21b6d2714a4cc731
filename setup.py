"""Package metadata; `pip install -e .` is all there is to installing."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "distribuuuu" / "__init__.py").read_text())[1]

setup(
    name="distribuuuu",
    version=VERSION,
    description="Config-driven, distributed training of image classifiers in PyTorch",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages(include=["distribuuuu", "distribuuuu.*"]),
    entry_points={"console_scripts": ["distribuuuu = distribuuuu.cli.commands:main"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.6",
        "torchvision>=0.21",
        "yacs>=0.1.8",
        "timm>=1.0",
        "tensorboard>=2.10",
        "tqdm>=4.60",
        "pillow>=10.2",
        "numpy>=1.23",
    ],
    extras_require={
        "simplejpeg": ["simplejpeg>=1.7"],
        "figures": ["matplotlib>=3.8"],  # draws the tutorial's pictures
        "dev": [
            *("pytest>=8", "pytest-xdist>=3.7", "pytest-randomly>=3.15", "ruff>=0.6", "simplejpeg>=1.7"),
            *("mypy>=1.10", "types-PyYAML", "types-tqdm"),
            # The references that our metrics and statistics are tested against.
            *("torchmetrics>=1.4", "scipy>=1.10", "scikit-learn>=1.3", "statsmodels>=0.14"),
        ],
    },
)
