"""distribuuuu: config-driven image-classification training.

The Python API: `train`, `evaluate`, `open_evaluation`, `predict`, `load_run`, the commands `finetune`, `export`,
`probe`, `report`, `doctor` and `split`, and the exceptions `ConfigError` and `RunStopped`.
"""

import importlib
import sys
from typing import Any

__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError("distribuuuu needs Linux or macOS; on Windows, install it in WSL: https://aka.ms/wsl")

# Imported on first use, because they import torch.
_MODULE_OF = {
    "train": "distribuuuu.api",
    "finetune": "distribuuuu.commands.finetune.api",
    "evaluate": "distribuuuu.api",
    "open_evaluation": "distribuuuu.api",
    "predict": "distribuuuu.api",
    "load_run": "distribuuuu.inference.load_run",
    **dict.fromkeys(("export", "probe", "report", "doctor", "split"), "distribuuuu.commands.python_api"),
    "ConfigError": "distribuuuu.config",
    "RunStopped": "distribuuuu.launch.signals",
}
__all__ = [*_MODULE_OF, "__version__"]


def __getattr__(name: str) -> Any:
    """Return a member of the API."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    """Return the members of the API."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
