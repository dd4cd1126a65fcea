"""Files of tensors with a description of what they are: what `oxytorch.save` writes.

A file is a safetensors file. Its metadata: format, version, description (JSON) and sha256 (of the
description). The description is a dictionary, whose `sha256` has that of each tensor's bytes, and
`made_by` the versions of oxytorch and torch; the rest belongs to the format. An entry of a tensor
has `tensor` (its name in the file), dtype, shape and order (in which its dimensions lie in memory).

A file holds no code. All of it is checked before it is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import CheckpointError
from .placement import empty_bytes
from .tensor_file import DTYPES, Source, TensorFile, bytes_of, write

_Read = TypeVar("_Read")


class Tensors:
    """The tensors that go into a file, each once.

    sources: by the name that each has there.
    """

    def __init__(self) -> None:
        self.sources: dict[str, Tensor] = {}
        self._placed: dict[Any, dict[str, Any]] = {}

    def entry(self, tensor: Tensor, name: str) -> dict[str, Any]:
        """What the description says of a tensor. name: what it is called if it is new and free."""
        if tensor.dtype not in DTYPES.values():
            raise ValueError(f"a file holds no {tensor.dtype}, got tensor {name!r} of this dtype")
        key = identity(tensor)
        if key not in self._placed:
            strides = tensor.stride()
            order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
            if not tensor.permute(order).is_contiguous():
                order = [*range(tensor.dim())]
            # The last ones may be many numbers that have no name.
            own = name if name not in self.sources else f"{name}.{len(self.sources)}"
            kept = tensor.detach().permute(order).contiguous().resolve_conj().resolve_neg()
            self.sources[own] = kept
            self._placed[key] = {
                "tensor": own,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": [*tensor.shape],
                "order": order,
            }
        return self._placed[key]

    def tensor(self, entry: Mapping[str, Any]) -> Tensor:
        """The tensor of an entry, as `DescribedFile.tensor` gives it."""
        return _as_it_lies(self.sources[entry["tensor"]], entry["order"])


def _as_it_lies(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """A tensor whose dimensions were put into this order, with its own dimensions again."""
    return tensor.permute(sorted(range(len(order)), key=lambda dim: order[dim]))


def _copied(tensor: Tensor) -> Tensor:
    """A copy of a contiguous tensor, on huge pages where these pay."""
    return empty_bytes(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def identity(tensor: Tensor) -> Any:
    """Equal for tensors that are the same memory seen in the same way."""
    if tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def write_described(
    path: Path, format: str, version: str, description: Mapping[str, Any], tensors: Tensors
) -> None:
    """Write a file. description: all but `sha256` and `made_by`."""
    from .. import __version__

    sources = tensors.sources
    hashes = {name: hashlib.sha256(bytes_of(each)).hexdigest() for name, each in sources.items()}
    made_by = {"oxytorch": __version__, "torch": torch.__version__}
    content = json.dumps({"made_by": made_by, **description, "sha256": hashes})
    metadata = {
        "format": format,
        "version": version,
        "sha256": _hash(content),
        "description": content,
    }
    write(path, {name: Source.of(tensor) for name, tensor in sources.items()}, metadata)


def _hash(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


class DescribedFile:
    """A file, mapped into memory.

    path: of the file.
    formats: those that are known.
    shared: whether tensors are the file's memory and not copies.
    format: its own.
    description: what it says, while it is read.

    Raises CheckpointError if it is damaged or has none of these formats.
    """

    def __init__(self, path: Path, formats: Collection[str], shared: bool = True) -> None:
        self.path = path
        self.shared = shared
        self.description: dict[str, Any] = {}
        self._file = TensorFile(path)
        self._made: dict[str, Tensor] = {}
        self.format = str(self._file.metadata.get("format"))
        if self.format not in formats:
            raise CheckpointError(
                f"{path}: expected a file that oxytorch.save wrote, got a safetensors file of "
                f"format {self.format[:50]!r}"
            )

    def read(
        self, reader: Callable[[DescribedFile], _Read], versions: Sequence[str], verify: bool
    ) -> _Read:
        """What `reader` makes of this file; its errors become a CheckpointError of the file.

        versions: that are read.
        verify: compare the tensors with their checksums, which reads all.
        """
        self.description = self._described(versions)
        try:
            if verify:
                self._verify()
            return reader(self)
        except (ValueError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.path}: {error}") from error

    def _described(self, versions: Sequence[str]) -> dict[str, Any]:
        found = self._file.metadata
        if found.get("version") not in versions:
            raise CheckpointError(
                f"{self.path}: expected version {' or '.join(versions)}, got "
                f"{str(found.get('version'))[:50]!r}; a newer oxytorch may read it"
            )
        content = found.get("description")
        if not isinstance(content, str) or _hash(content) != found.get("sha256"):
            raise CheckpointError(
                f"{self.path}: expected a description that has its sha256, got another; the file "
                "was altered"
            )
        try:
            description = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self.path}: expected a description in JSON: {error}"
            ) from error
        if not isinstance(description, dict):
            raise CheckpointError(f"{self.path}: expected a description, got {content[:50]!r}")
        return description

    def part(self, key: str, kind: Any) -> Any:
        """An entry of the description; raises ValueError if it is missing or of another kind."""
        if not isinstance(self.description.get(key), kind):
            raise ValueError(
                f"expected {key} in its description, got {str(self.description.get(key))[:50]!r}"
            )
        return self.description[key]

    def tensor(self, entry: Any) -> Tensor:
        """The tensor of an entry. What was shared is one tensor again.

        Raises ValueError if the entry is none, or does not fit the file.
        """
        shown = f"expected an entry of a tensor, got {str(entry)[:100]}"
        if not isinstance(entry, dict) or not isinstance(entry.get("tensor"), str):
            raise ValueError(shown)
        name = entry["tensor"]
        place = self._file.places.get(name)
        order, shape = entry.get("order"), entry.get("shape")
        if not isinstance(order, list) or not isinstance(shape, list) or len(order) != len(shape):
            raise ValueError(shown)
        if not all(type(dim) is int for dim in order) or sorted(order) != [*range(len(shape))]:
            raise ValueError(shown)
        if place is None:
            raise ValueError(f"expected a tensor {name!r} in the file, got none")
        dtype = str(place.dtype).removeprefix("torch.")
        if [dtype, [*place.shape]] != [entry.get("dtype"), [shape[dim] for dim in order]]:
            raise ValueError(
                f"expected tensor {name!r} to be {entry.get('dtype')} of {shape}, got {dtype} of "
                f"{[*place.shape]} in the order {order}"
            )
        if name not in self._made:
            own = self._file.tensor(name)
            self._made[name] = _as_it_lies(own if self.shared else _copied(own), order)
        return self._made[name]

    def _verify(self) -> None:
        """Raise ValueError that names the first tensor whose bytes are not those written."""
        hashes = self.part("sha256", dict)

        def is_altered(name: str) -> bool:
            content = bytes_of(self._file.tensor(name))
            return bool(hashlib.sha256(content).hexdigest() != hashes.get(name))

        names: Sequence[str] = [*self._file.places]
        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
            for name, altered in zip(names, pool.map(is_altered, names), strict=True):
                if altered:
                    raise ValueError(
                        f"expected tensor {name!r} to have the sha256 that was written, got "
                        "another; the file was altered"
                    )
