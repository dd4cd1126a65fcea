"""Files of tensors in the safetensors format, mapped into memory instead of read.

A file is the length of a header (8 bytes, little-endian), the header (JSON: for each tensor its
dtype, shape and place) and the tensors' bytes without gaps. Source: the format's description in
the safetensors repository, version 0.4.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import CheckpointError
from .whole_file import replacing

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

ALIGNMENT = 64
"""Bytes at which every tensor that `write` writes begins, counted from the file's start."""

_LARGEST_HEADER = 100 << 20


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: its bytes are begin to end of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """The tensors of one file. Their memory is the file's: processes share it until they write.

    The file may be replaced while it is mapped, but must not be written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise CheckpointError(f"{path}: expected a file, found none")
        size = path.stat().st_size
        self.places, self.metadata = _read_header(path, size)
        self._bytes = _mapped(path, size)

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name, over the file's memory."""
        place = self.places[name]
        raw = self._bytes[place.begin : place.end]
        if place.begin % place.dtype.itemsize:
            # Other writers may leave a tensor at an address that its dtype cannot be read at.
            raw = raw.clone()
        return raw.view(place.dtype).reshape(place.shape)


def _mapped(path: Path, size: int) -> Tensor:
    """The bytes of a file, uint8 [size], shared with other processes until they are written."""
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _read_header(path: Path, size: int) -> tuple[dict[str, Place], dict[str, str]]:
    """Return the places of all tensors and the file's metadata; every place is checked."""
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(_LARGEST_HEADER, size - 8):
            raise CheckpointError(
                f"{path}: expected a safetensors file, got {size} bytes whose first 8 announce a "
                f"header of {length} bytes; the file is truncated or of another kind"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: expected a header in JSON, got text that is none ({error}); "
            "the file was altered or is of another kind"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: expected a header of names, got a {type(header).__name__}")
    metadata = header.pop("__metadata__", {})
    data = 8 + length
    places = {name: _place(path, name, entry, data, size) for name, entry in header.items()}
    end = data
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
        if place.begin != end:
            raise CheckpointError(
                f"{path}: expected tensor {name!r} to begin at byte {end}, got {place.begin}; "
                "the header was altered"
            )
        end = place.end
    if end != size:
        raise CheckpointError(
            f"{path}: expected {end} bytes, the end of the last tensor, got {size}; the file was "
            "altered"
        )
    return places, metadata if isinstance(metadata, dict) else {}


def _place(path: Path, name: str, entry: Any, data: int, size: int) -> Place:
    """Return the place that a header's entry describes."""

    def whole(values: Any, count: int | None) -> bool:
        return (
            isinstance(values, list)
            and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
            and (count is None or len(values) == count)
        )

    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not whole(shape, None) or not whole(offsets, 2):
        raise CheckpointError(
            f"{path}: expected a shape and two offsets of tensor {name!r}, got {str(entry)[:200]}"
        )
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: expected tensor {name!r} to have a dtype of {', '.join(DTYPES)}, got {dtype}"
        )
    begin, end = data + offsets[0], data + offsets[1]
    wanted = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != wanted:
        raise CheckpointError(
            f"{path}: expected tensor {name!r} of shape {shape} and dtype {dtype} to have {wanted} "
            f"bytes, got {end - begin}"
        )
    if end > size:
        raise CheckpointError(
            f"{path}: expected tensor {name!r} to end at byte {end}, got a file of {size} bytes: "
            "it is truncated"
        )
    return Place(DTYPES[dtype], tuple(shape), begin, end)


@dataclass(frozen=True)
class Source:
    """A tensor to be written, which is made when its turn has come."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Source:
        """A tensor that is there already."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(
    path: Path, sources: Mapping[str, Source], metadata: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Write a file in the safetensors format; return the sha256 of each tensor's bytes.

    sources: tensors on the CPU; those whose bytes are a multiple of `ALIGNMENT` come first, so that
    they begin at one. An existing file is replaced at the end, not written to: who has mapped it
    keeps the old one.
    """
    ordered = sorted(sources.items(), key=_rank)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, source in ordered:
        header[name] = {
            "dtype": _NAMES[source.dtype],
            "shape": list(source.shape),
            "data_offsets": [offset, offset + source.nbytes],
        }
        offset += source.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    hashes = {}
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, source in ordered:
            flat = source.make().detach().contiguous()
            content = bytes_of(flat)
            hashes[name] = hashlib.sha256(content).hexdigest()
            file.write(content)
    return hashes


def _rank(item: tuple[str, Source]) -> int:
    """Aligned tensors first, then wider elements before narrower: each can be read in place."""
    source = item[1]
    return 0 if source.nbytes % ALIGNMENT == 0 else 16 - source.dtype.itemsize


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, valid as long as it is."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of a checkpoint, in one file or several, by name."""

    def __init__(self, files: list[TensorFile]) -> None:
        self._files: dict[str, TensorFile] = {}
        for file in files:
            for name in file.places:
                if name in self._files:
                    raise CheckpointError(
                        f"{file.path}: expected each tensor once, got {name!r} here and in "
                        f"{self._files[name].path}"
                    )
                self._files[name] = file

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def place(self, name: str) -> Place:
        """Where a tensor lies, with its dtype and shape, without touching its bytes."""
        return self._files[name].places[name]

    def path(self, name: str) -> Path:
        """The file of a tensor."""
        return self._files[name].path

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(place.end - place.begin for place in map(self.place, self))
