"""Use of trained models outside a training run; nothing in the core imports this package.

- runs.py: `load_run`, from a run, a checkpoint, an exported folder or a timm name to a `LoadedRun` (loaded_run.py).
- images.py, chunks.py: the image files of a command, and their division into forward passes.
- predict.py, journal.py: predictions of many files, and the partial output from which a killed job resumes.
- export.py, onnx_file.py: file formats; model_card.py, card_code.py: README.md and its Python code.
- export_check.py, card_runner.py: comparison of that code, in a process of its own, with `predict`.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return `load_run`, imported on first use, because it imports torch."""
    if name != "load_run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from distribuuuu.deploy.runs import load_run

    return load_run
