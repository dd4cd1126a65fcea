"""Files that oxytorch keeps per user: what a driver compiled, and times of layers.

Each kind has a folder of its own. A cache that cannot be read or written costs time, never an
answer.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from .. import config
from .whole_file import replacing

log = logging.getLogger("oxytorch.cache")
_DIGEST = hashlib.sha256().digest_size


def folder(kind: str) -> Path | None:
    """Where files of a kind lie; None where this user has no home."""
    return config.cache_folder(kind)


def read(kind: str, key: str) -> bytes | None:
    """What was written as `key`; None if it is absent or damaged."""
    place = folder(kind)
    if place is None:
        return None
    try:
        content = (place / key).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("cannot read the cache: %s", error)
        return None
    digest, data = content[:_DIGEST], content[_DIGEST:]
    if hashlib.sha256(data).digest() != digest:
        log.warning("the cache's file %s is damaged; it is written again", place / key)
        return None
    return data


def write(kind: str, key: str, data: bytes) -> bool:
    """Keeps `data` as `key`, in one step for other processes; returns whether it is kept."""
    place = folder(kind)
    if place is None:
        return False
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(place / key) as file:
            file.write_bytes(hashlib.sha256(data).digest() + data)
    except OSError as error:
        log.warning("cannot write the cache, the next process makes it again: %s", error)
        return False
    return True
