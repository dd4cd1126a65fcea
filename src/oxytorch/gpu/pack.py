"""Writes packs and manifests (`images` describes their form), safe against other writers.

A folder has one lock for all who write into it; who reads needs none. New contents become visible
by the replacement of the manifest, so an interrupted writer leaves the former ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from ..core.whole_file import replacing
from .compilers import Compiled
from .errors import ImageError
from .images import PACKAGE, SCHEMA, Collection, Image, file_digests, source_digest

_log = logging.getLogger("oxytorch.gpu")
_LEVEL = 9


@dataclasses.dataclass(frozen=True)
class Entry:
    """An image for a pack: its record, of which the place is filled in, and its bytes there."""

    image: Image
    compressed: bytes
    sources: dict[str, str]


def entry(compiled: Compiled, sources: Iterable[str]) -> Entry:
    """Compresses what a compiler made of source files, which are given relative to the package."""
    compressed = zlib.compress(compiled.code, _LEVEL)
    image = compiled.image._replace(length=len(compressed))
    return with_sources(Entry(image, compressed, {}), sources)


def with_sources(entry: Entry, sources: Iterable[str]) -> Entry:
    """The same image, known to be what these source files say now."""
    files = _digests(tuple(sources))
    image = entry.image._replace(source=source_digest(files) if files else "")
    image = image._replace(sha256=image.digest(entry.compressed))
    return Entry(image, entry.compressed, files)


_before: dict[str, str] = {}


def remember_sources() -> None:
    """Takes the source files' contents down; to be called before kernels are imported.

    So an edit while kernels compile makes their images stale, and not what they were made of.
    """
    paths = [path for kind in ("*.py", "*.cl") for path in PACKAGE.rglob(kind)]
    _before.update(file_digests(path.relative_to(PACKAGE).as_posix() for path in paths))
    _digests.cache_clear()


@lru_cache
def _digests(sources: tuple[str, ...]) -> dict[str, str]:
    return {name: _before.get(name) or file_digests([name])[name] for name in sources}


def entries(folder: Path, device: str) -> list[Entry]:
    """What a folder holds for a device; damaged images are reported and left out."""
    try:
        found = Collection(folder, device)
    except FileNotFoundError:
        return []
    except ImageError as error:
        _log.warning("%s", error)
        return []
    kept = []
    for record in found.manifest["images"]:
        try:
            image = Image.from_record(record, found.path)
            kept.append(Entry(image, found.compressed(image), found.sources(image)))
        except ImageError as error:
            _log.warning("%s", error)
    return kept


def merge(
    folder: Path,
    device: str,
    new: Sequence[Entry],
    keep: Callable[[Image], bool] = lambda image: True,
) -> None:
    """Adds images of a device to a folder; those of the same kernel and signature are replaced.

    keep: which of the images stay that were there before. Raises OSError where the folder cannot
    be written; then what was there before is whole.
    """
    present = {entry.image for entry in entries(folder, device)}
    same = {one.image._replace(offset=0) for one in new}
    if same <= {one._replace(offset=0) for one in present} and all(map(keep, present)):
        return
    with _locked(folder):
        before = [entry for entry in entries(folder, device) if keep(entry.image)]
        together = {(one.image.kernel, one.image.signature): one for one in [*before, *new]}
        _write(folder, device, [together[name] for name in sorted(together)])


def remove(folder: Path, device: str) -> None:
    """Takes a device's images out of a folder."""
    with _locked(folder):
        (folder / f"{device}.json").unlink(missing_ok=True)
        for path in folder.glob(f"{device}-*.pack"):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(folder: Path, device: str, content: Sequence[Entry]) -> None:
    pack = bytearray()
    places: dict[bytes, int] = {}
    records = []
    sources: dict[str, dict[str, str]] = {}
    for one in content:
        image = one.image
        if one.compressed not in places:
            places[one.compressed] = len(pack)
            pack += one.compressed
        records.append(image._replace(offset=places[one.compressed])._asdict())
        if image.source:
            sources[image.source] = one.sources
    name = f"{device}-{hashlib.sha256(pack).hexdigest()[:16]}.pack"
    manifest = {
        "schema": SCHEMA,
        "device": device,
        "pack": name,
        "sources": sources,
        "images": records,
    }
    if not (folder / name).exists() or (folder / name).read_bytes() != pack:
        _replace(folder / name, bytes(pack))
    lines = ",\n".join(json.dumps(record) for record in records)
    head = json.dumps({**manifest, "images": []}, indent=1)
    text = head.replace('"images": []', f'"images": [\n{lines}\n]')
    _replace(folder / f"{device}.json", text.encode())
    for other in folder.glob(f"{device}-*.pack"):
        if other.name != name:
            other.unlink(missing_ok=True)


def _replace(path: Path, data: bytes) -> None:
    """Puts a whole file in the place of another, in one step."""
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
