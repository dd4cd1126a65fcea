"""Compiled kernels on disk: a manifest and a pack of compressed images for each device.

`<folder>/<device>.json` is the manifest: what is in the pack, entry by entry. It names the pack,
`<folder>/<device>-<digest>.pack`, so that replacing the manifest replaces both in one step; the
pack is nothing but zlib streams one after another. An image is found by one look into the manifest
and one read from the pack; its sha256, over the bytes and their entry in the manifest, is compared
before it is decompressed.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from .. import config
from .errors import ImageError

SCHEMA = 1
PACKAGE = Path(__file__).parents[1]
SHIPPED = Path(__file__).parent / "images"
# No kernel comes near it; a damaged manifest must not make us allocate what it says.
LARGEST_IMAGE = 64 * 2**20
LARGEST_PACK = 2**40
REBUILD = "run `oxytorch aot build`"
_NUMBERS = frozenset({"threads", "shared", "scratch", "offset", "length", "size"})
_ELEMENTS = {"arguments": str, "aligned": int}


class Image(NamedTuple):
    """One compiled kernel. (No dataclass: making that class takes a millisecond at start.)

    entry: the function's name in the image.
    threads: of one program.
    shared: bytes of dynamic shared memory.
    arguments: types in Triton's words, in order.
    aligned: positions of arguments that must be multiples of 16.
    scratch: null pointers that follow the arguments.
    offset, length: place of the compressed bytes in the pack.
    size: bytes of the image itself.
    sha256: `digest`.
    key: what the image was compiled from (`compilers.key`).
    source: a name of the source files in the manifest, empty where none are recorded.
    """

    kernel: str
    signature: str
    entry: str
    threads: int
    shared: int
    arguments: tuple[str, ...]
    aligned: tuple[int, ...]
    scratch: int
    offset: int
    length: int
    size: int
    sha256: str
    key: str
    compiler: str
    source: str

    @classmethod
    def from_record(cls, record: Any, manifest: Path) -> Image:
        """An entry of a manifest; raises ImageError where a field is absent or of another type."""
        if not isinstance(record, dict):
            raise ImageError(f"{manifest}: an entry is no object; {REBUILD}")
        values: dict[str, Any] = {}
        for name in cls._fields:
            value: Any = record.get(name)
            element = _ELEMENTS.get(name)
            if element is not None:
                good = isinstance(value, list) and all(type(item) is element for item in value)
                value = tuple(value) if good else value
            elif name in _NUMBERS:
                good = type(value) is int and value >= 0
            else:
                good = isinstance(value, str)
            if not good:
                raise ImageError(f"{manifest}: {name} of an entry is {value!r}; {REBUILD}")
            values[name] = value
        image = cls(**values)
        if max(image.size, image.length) > LARGEST_IMAGE or image.offset > LARGEST_PACK:
            raise ImageError(f"{manifest}: an image of {image.size} bytes cannot be; {REBUILD}")
        return image

    def digest(self, compressed: bytes) -> str:
        """The sha256 of the compressed bytes and of all that is said of them but their place."""
        words = json.dumps(self._replace(offset=0, sha256="")).encode()
        return hashlib.sha256(words + b"\0" + compressed).hexdigest()


def load_manifest(path: Path) -> dict[str, Any]:
    """Reads a manifest and checks what does not depend on its entries."""
    try:
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ImageError(f"{path} is damaged ({error}); {REBUILD}") from error
    if not isinstance(manifest, dict) or "schema" not in manifest:
        raise ImageError(f"{path} is not a manifest of oxytorch; {REBUILD}")
    if manifest["schema"] != SCHEMA:
        raise ImageError(
            f"{path}: expected schema {SCHEMA}, got {manifest['schema']!r}; {REBUILD} with this "
            "version of oxytorch"
        )
    expected = {"device": str, "pack": str, "sources": dict, "images": list}
    for name, kind in expected.items():
        if not isinstance(manifest.get(name), kind):
            raise ImageError(f"{path}: {name} is {manifest.get(name)!r}; {REBUILD}")
    if manifest["device"] != path.stem:
        raise ImageError(f"{path} holds images for {manifest['device']}; {REBUILD}")
    if Path(manifest["pack"]).name != manifest["pack"] or not manifest["pack"].endswith(".pack"):
        raise ImageError(f"{path}: pack is {manifest['pack']!r}, expected a file's name; {REBUILD}")
    return manifest


class Collection:
    """The images of one device in one folder. Raises ImageError where the manifest is damaged."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        self.path = folder / f"{device}.json"
        for _ in range(3):
            self.manifest = load_manifest(self.path)
            pack = folder / self.manifest["pack"]
            try:
                self._file = os.open(pack, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                weakref.finalize(self, os.close, self._file)
                break
            except FileNotFoundError:
                # Another process has just replaced both.
                continue
            except OSError as error:
                raise ImageError(f"cannot open {pack}: {error}") from error
        else:
            absent = self.manifest["pack"]
            raise ImageError(f"{self.path} names {absent}, which is absent; {REBUILD}")
        self._records: dict[tuple[Any, Any], Any] = {}
        for record in self.manifest["images"]:
            if not isinstance(record, dict):
                raise ImageError(f"{self.path}: an entry is no object; {REBUILD}")
            name = record.get("kernel"), record.get("signature")
            if not all(isinstance(part, str) for part in name):
                raise ImageError(f"{self.path}: an entry has no kernel or signature; {REBUILD}")
            self._records[name] = record

    def __iter__(self) -> Iterator[Image]:
        return (Image.from_record(record, self.path) for record in self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def get(self, kernel: str, signature: str) -> Image | None:
        """The image of a kernel's signature; None if it was not built."""
        record = self._records.get((kernel, signature))
        return None if record is None else Image.from_record(record, self.path)

    def stale(self, image: Image) -> str:
        """The source files that have changed since the image was compiled; "" if none has."""
        return _changed(tuple(self.sources(image).items()))

    def sources(self, image: Image) -> dict[str, str]:
        """The source files that the image was made of, as `file_digests`."""
        if not image.source:
            return {}
        files = self.manifest["sources"].get(image.source)
        good = isinstance(files, dict) and all(isinstance(one, str) for one in files.values())
        if not good or source_digest(files) != image.source:
            raise ImageError(f"{self.path}: the sources of {image.source} are damaged; {REBUILD}")
        return dict(files)

    def compressed(self, image: Image) -> bytes:
        """The image as it lies in the pack, compared with its sha256."""
        try:
            data = os.pread(self._file, image.length, image.offset)
        except OSError as error:
            raise ImageError(f"cannot read the pack of {self.path}: {error}") from error
        if len(data) != image.length or image.digest(data) != image.sha256:
            pack = self.folder / self.manifest["pack"]
            raise ImageError(
                f"{pack}: the image of {image.kernel}/{image.signature} is damaged; {REBUILD}"
            )
        return data

    def read(self, image: Image) -> bytes:
        """The image itself."""
        stream = zlib.decompressobj()
        try:
            data = stream.decompress(self.compressed(image), image.size + 1)
        except zlib.error as error:
            raise ImageError(f"{image.kernel}/{image.signature}: {error}; {REBUILD}") from error
        if len(data) != image.size:
            raise ImageError(
                f"{self.path}: expected {image.size} bytes of {image.kernel}/{image.signature}, "
                f"got {len(data)}; {REBUILD}"
            )
        return data


def source_digest(files: Mapping[str, str]) -> str:
    """A name for the contents of source files, given as `file_digests`."""
    return hashlib.sha256(json.dumps(dict(sorted(files.items()))).encode()).hexdigest()[:16]


def file_digests(names: Iterable[str], root: Path = PACKAGE) -> dict[str, str]:
    """A short sha256 of each file; they are given relative to the package."""
    return {
        name: hashlib.sha256((root / name).read_bytes()).hexdigest()[:16] for name in sorted(names)
    }


@lru_cache(maxsize=256)
def _changed(files: tuple[tuple[str, str], ...]) -> str:
    changed = []
    for name, digest in files:
        try:
            same = file_digests([name])[name] == digest
        except (OSError, ValueError):
            same = False
        if not same:
            changed.append(name)
    return ", ".join(changed)


def user_folder() -> Path | None:
    """Where images lie that this user built; None where there is no home."""
    if config.current.data_home:
        return Path(config.current.data_home) / "oxytorch" / "images"
    try:
        return Path.home() / ".local" / "share" / "oxytorch" / "images"
    except RuntimeError:
        return None


def folders() -> list[Path]:
    """Where images are looked for, in this order."""
    user = user_folder()
    return [SHIPPED] if user is None else [SHIPPED, user]


@lru_cache(maxsize=64)
def collection(folder: Path, device: str) -> Collection | None:
    """The images of a device in a folder, read once per process; None if there are none.

    Raises ImageError, at each call, where the manifest or the pack is damaged.
    """
    try:
        return Collection(folder, device)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ImageError(f"cannot read the images of {device} in {folder}: {error}") from error


def collections(places: list[Path] | None = None) -> Iterator[Collection]:
    """Everything that is built, folder by folder."""
    for folder in folders() if places is None else places:
        for path in sorted(folder.glob("*.json")):
            found = collection(folder, path.stem)
            if found is not None:
                yield found


def built(places: list[Path] | None = None) -> Mapping[str, int]:
    """How many images there are for each device, damaged manifests left out."""
    count: dict[str, int] = {}
    for folder in folders() if places is None else places:
        for path in sorted(folder.glob("*.json")):
            try:
                found = collection(folder, path.stem)
            except ImageError:
                continue
            count[path.stem] = count.get(path.stem, 0) + len(found or ())
    return count
