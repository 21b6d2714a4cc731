"""JSON files from users and from others."""

import json
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
