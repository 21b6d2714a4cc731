"""JSON files from users and from others."""

import json
import math
import os
from typing import Any

from distribuuuu.config.errors import ConfigError
from distribuuuu.files.untrusted import MAX_JSON, parse_json, read_regular


def load_json(path: str | os.PathLike) -> Any:
    """Return the value in a JSON file; ConfigError: it cannot be read, is too large, or is not JSON, e.g. with NaN."""
    try:
        value = parse_json(read_regular(path, MAX_JSON))
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # raises for NaN and lone surrogates
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: invalid JSON: {' '.join(str(error).split())}") from error
    return value


def replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON cannot represent, by None."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
