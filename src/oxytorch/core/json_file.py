"""Files of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises CheckpointError for a file that cannot be read, is not JSON or is no object.
    """
    found = _content(path)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected an object in JSON, got a {type(found).__name__}")
    return found


def read_json_list(path: Path) -> list[Any]:
    """Return the list in a JSON file; the errors are those of `read_json`."""
    found = _content(path)
    if not isinstance(found, list):
        raise CheckpointError(f"{path}: expected a list in JSON, got a {type(found).__name__}")
    return found


def _content(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a file in JSON, got {error}") from error
