"""Programs on disk: `oxytorch.save` and `oxytorch.load`.

A file is a safetensors file, whose tensors are the constants. Its metadata: format
("oxytorch.program"), version ("2"), description (JSON) and sha256 (of the description). The
description has

    program      the text of the program
    constants    of each constant: tensor (its name in the file), dtype, shape, order (in which its
                 dimensions lie in memory), and the same of `state`: buffers that a call writes to
    arguments    how (args, kwargs) are nested; inputs: of each leaf its kind, name and more
    results      how the result is nested; outputs: where each leaf comes from
    writes       what is written to inputs and state
    conditions   on sizes of inputs
    sha256       of each tensor's bytes
    made_by      versions of oxytorch and torch

A file holds no code. Nothing of it is believed: all is checked before the library reads it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..core.errors import CheckpointError
from ..core.tensor_file import DTYPES, Source, TensorFile, bytes_of, write
from ..rewriting.refusals import check_evaluation
from . import conditions
from .check import Counts, check
from .model import (
    FixedInput,
    Input,
    Interface,
    Output,
    ProgramModel,
    SizeInput,
    TensorInput,
    Write,
    identity,
)
from .program import Program
from .structure import Structure

FORMAT = "oxytorch.program"
VERSIONS = ("2", "1")
"""The one that is written, and those that are read. The order of weights in panels belongs to it:
who changes `ops/panels/layout.py` needs another. Version 1 holds no panels."""

_Item = TypeVar("_Item")
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def save(model: ProgramModel | nn.Module, path: str | Path, sample_input: Any = None) -> None:
    """Write a program and its tensors to one file, which `load` opens in any process.

    model: what `oxytorch.optimize` returns for an exported program; or a module, which
    `torch.export` exports with `sample_input`. path: a file that exists is replaced; a process that
    has loaded it keeps the old one.
    sample_input: for a module: a tensor (the only argument), a tuple (positional arguments) or a
    mapping (keyword arguments). The program takes inputs of these sizes; export the module yourself
    with `dynamic_shapes` for others.

    Raises TypeError if `model` is neither or the sample is missing or not wanted, ValueError if the
    module is in training mode or the file cannot hold it, and torch's errors where a module cannot
    be exported.
    """
    if isinstance(model, nn.Module) and sample_input is not None:
        check_evaluation("save", model)
        model = _exported(model, sample_input)
    elif not isinstance(model, ProgramModel):
        raise TypeError(
            f"save: expected a program, or a module with sample_input, got a "
            f"{type(model).__name__}; oxytorch.save(model, path, sample_input=x) exports a module"
        )
    elif sample_input is not None:
        raise TypeError("save: expected no sample_input with a program")
    sources: dict[str, Tensor] = {}
    try:
        model = model.storable()
        description = _described(model, sources)
        check(model.program.text)
    except ValueError as error:
        raise ValueError(f"save: {error}") from error
    description["sha256"] = {
        name: hashlib.sha256(bytes_of(tensor)).hexdigest() for name, tensor in sources.items()
    }
    content = json.dumps(description)
    metadata = {
        "format": FORMAT,
        "version": VERSIONS[0],
        "sha256": _hash(content),
        "description": content,
    }
    write(Path(path), {name: Source.of(tensor) for name, tensor in sources.items()}, metadata)


def _hash(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def _described(model: ProgramModel, sources: dict[str, Tensor]) -> dict[str, Any]:
    """The description of a program; add its tensors to `sources`, each once."""
    own = model.interface
    placed: dict[Any, dict[str, Any]] = {}
    tensors = [*model.program.constants, *model.state]
    entries = [
        _entry(tensor, name, placed, sources)
        for tensor, name in zip(tensors, model.names, strict=True)
    ]
    count = len(model.program.constants)
    _check_state(model)
    return {
        "made_by": {"oxytorch": _version(), "torch": torch.__version__},
        "program": model.program.text,
        "constants": entries[:count],
        "state": entries[count:],
        "arguments": own.arguments.data(),
        "inputs": [_input_data(each) for each in own.inputs],
        "results": own.results.data(),
        "outputs": [[each.kind, each.value] for each in own.outputs],
        "writes": [[each.kind, each.place, each.tensor] for each in own.writes],
        "conditions": [*own.conditions],
    }


def _version() -> str:
    from .. import __version__

    return __version__


def _check_state(model: ProgramModel) -> None:
    """Raise ValueError if a tensor that is written shares memory with others."""
    count = len(model.program.constants)
    spans = [_span(tensor) for tensor in (*model.program.constants, *model.state)]
    for place, own in enumerate(spans[count:], count):
        others = [span for at, span in enumerate(spans) if at != place]
        if any(own[0] < other[1] and other[0] < own[1] for other in others):
            raise ValueError(
                f"the model writes to {model.names[place]!r}, which shares its memory with another "
                "tensor; give it a copy before the export"
            )


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where the bytes of a tensor begin and end."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _entry(
    tensor: Tensor, name: str, placed: dict[Any, dict[str, Any]], sources: dict[str, Tensor]
) -> dict[str, Any]:
    """What the description says of a tensor."""
    if tensor.dtype not in DTYPES.values():
        raise ValueError(f"a file holds no {tensor.dtype}, got tensor {name!r} of this dtype")
    key = identity(tensor)
    if key not in placed:
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
        if not tensor.permute(order).is_contiguous():
            order = [*range(tensor.dim())]
        # The last ones may be many numbers that have no name.
        own = name if name not in sources else f"{name}.{len(sources)}"
        sources[own] = tensor.detach().permute(order).contiguous().resolve_conj().resolve_neg()
        placed[key] = {
            "tensor": own,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": [*tensor.shape],
            "order": order,
        }
    return placed[key]


def _input_data(each: Input) -> list[Any]:
    if isinstance(each, TensorInput):
        return ["tensor", each.name, str(each.dtype).removeprefix("torch."), [*each.shape]]
    if isinstance(each, SizeInput):
        return ["size", each.name]
    return ["fixed", each.name, each.value]


def _exported(model: nn.Module, sample_input: Any) -> ProgramModel:
    from .export import from_exported  # which who loads a file has no use for

    args: tuple[Any, ...] = (sample_input,)
    kwargs: dict[str, Any] = {}
    if isinstance(sample_input, Mapping):
        args, kwargs = (), dict(sample_input)
    elif isinstance(sample_input, tuple):
        args = sample_input
    with torch.no_grad():
        return from_exported(torch.export.export(model, args, kwargs), storable=True)


def load(path: str | Path, *, verify: bool = False) -> ProgramModel:
    """Open a file that `save` wrote. Its tensors are mapped into memory, not read.

    path: must not be written to as long as the program is used; replacing it is no harm. verify:
    compare the tensors with their checksums, which reads all of them. The rest is always compared.

    Results with named fields come back as `Fields`, whatever class they had.

    Raises CheckpointError, a ValueError, if the file is damaged, of another kind or of a newer
    version, or asks for what a file may not do.
    """
    file = TensorFile(Path(path))
    description = _description(file)
    try:
        if verify:
            _verify(file, _part(description, "sha256", dict))
        return _read(file, description)
    except (ValueError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: {error}") from error


def _description(file: TensorFile) -> dict[str, Any]:
    found = file.metadata
    if found.get("format") != FORMAT:
        raise CheckpointError(
            f"{file.path}: expected a file that oxytorch.save wrote, got a safetensors file of "
            f"format {str(found.get('format'))[:50]!r}"
        )
    if found.get("version") not in VERSIONS:
        raise CheckpointError(
            f"{file.path}: expected version {' or '.join(VERSIONS)}, got "
            f"{str(found.get('version'))[:50]!r}; a newer oxytorch may read it"
        )
    content = found.get("description")
    if not isinstance(content, str) or _hash(content) != found.get("sha256"):
        raise CheckpointError(
            f"{file.path}: expected a description with the sha256 beside it, got another; the file "
            "was altered"
        )
    try:
        description = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.path}: expected a description in JSON: {error}") from error
    if not isinstance(description, dict):
        raise CheckpointError(f"{file.path}: expected a description, got {content[:50]!r}")
    return description


def _read(file: TensorFile, description: dict[str, Any]) -> ProgramModel:
    text = _part(description, "program", str)
    counts = check(text)
    made: dict[str, Tensor] = {}
    entries = [_part(description, key, list) for key in ("constants", "state")]
    constants, state = ([_tensor(file, entry, made) for entry in each] for each in entries)
    interface = _interface(description, counts, len(state))
    tensors = sum(isinstance(each, TensorInput) for each in interface.inputs) + len(state)
    sizes = sum(isinstance(each, SizeInput) for each in interface.inputs)
    wanted = (counts.tensors, counts.sizes, counts.constants)
    if (tensors, sizes, len(constants)) != wanted:
        raise ValueError(
            f"expected a program of {tensors} tensors, {sizes} sizes and {len(constants)} "
            f"constants, got one of {wanted[0]}, {wanted[1]} and {wanted[2]}"
        )
    names = [entry["tensor"] for each in entries for entry in each]
    return ProgramModel(Program(text, constants), interface, state, tuple(names))


def _interface(description: dict[str, Any], counts: Counts, state: int) -> Interface:
    arguments = Structure.read(_part(description, "arguments", list))
    is_call = arguments.kind == "tuple" and [p.kind for p in arguments.parts] == ["tuple", "dict"]
    inputs = _items(description, "inputs", _input)
    if not is_call or arguments.count() != len(inputs):
        raise ValueError(f"expected arguments with {len(inputs)} leaves, got other ones")
    results = Structure.read(_part(description, "results", (list, str)))
    limits = {
        "tensor": counts.tensor_results,
        "size": counts.size_results,
        "input": len(inputs),
        "state": state,
    }
    outputs = _items(description, "outputs", lambda data: _output(data, limits))
    if results.count() != len(outputs):
        raise ValueError(f"expected a result of {len(outputs)} leaves, got {results.count()}")
    writes = _items(description, "writes", lambda data: _write(data, limits))
    for each in writes:
        if each.kind == "input" and not isinstance(inputs[each.place], TensorInput):
            raise ValueError(f"expected a tensor to be written, got {inputs[each.place].name}")
    dims = [len(each.shape) if isinstance(each, TensorInput) else None for each in inputs]
    found = _part(description, "conditions", list)
    for condition in found:
        conditions.check(condition, dims)
    return Interface(arguments, inputs, results, outputs, writes, tuple(found))


def _part(data: dict[str, Any], key: str, kind: Any) -> Any:
    if not isinstance(data.get(key), kind):
        raise ValueError(f"expected {key} in its description, got {str(data.get(key))[:50]!r}")
    return data[key]


def _items(
    description: dict[str, Any], key: str, read: Callable[[Any], _Item]
) -> tuple[_Item, ...]:
    found = []
    for data in _part(description, key, list):
        try:
            found.append(read(data))
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise ValueError(f"expected an entry of {key}, got {str(data)[:100]}") from error
    return tuple(found)


def _whole(value: Any, limit: int) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"expected a number below {limit}, got {value}")
    return value


def _input(data: Any) -> Input:
    kind, name, *rest = data
    if not isinstance(name, str):
        raise ValueError("expected a name")
    if kind == "tensor":
        dtype, shape = rest
        sizes = tuple(None if size is None else _whole(size, 1 << 62) for size in shape)
        return TensorInput(name, _NAMES[dtype], sizes)
    if kind == "size" and not rest:
        return SizeInput(name)
    if kind != "fixed":
        raise ValueError("expected tensor, size or fixed")
    return FixedInput(name, _plain(*rest))


def _plain(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str | None):
        raise ValueError("expected a number, text or None")
    return value


def _output(data: Any, limits: dict[str, int]) -> Output:
    kind, value = data
    return Output(kind, _plain(value) if kind == "fixed" else _whole(value, limits[kind]))


def _write(data: Any, limits: dict[str, int]) -> Write:
    kind, place, tensor = data
    if kind not in ("input", "state"):
        raise ValueError("expected input or state")
    return Write(kind, _whole(place, limits[kind]), _whole(tensor, limits["tensor"]))


def _tensor(file: TensorFile, entry: Any, made: dict[str, Tensor]) -> Tensor:
    """A tensor of the file, over its memory. What was shared is one tensor again."""
    shown = f"expected an entry of a tensor, got {str(entry)[:100]}"
    if not isinstance(entry, dict) or not isinstance(entry.get("tensor"), str):
        raise ValueError(shown)
    name = entry["tensor"]
    place = file.places.get(name)
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
    if name not in made:
        inverse = sorted(range(len(order)), key=lambda dim: order[dim])
        made[name] = file.tensor(name).permute(inverse)
    return made[name]


def _verify(file: TensorFile, hashes: dict[str, str]) -> None:
    """Raise ValueError that names the first tensor whose bytes are not those written."""

    def is_altered(name: str) -> bool:
        return hashlib.sha256(bytes_of(file.tensor(name))).hexdigest() != hashes.get(name)

    names: Sequence[str] = [*file.places]
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        for name, altered in zip(names, pool.map(is_altered, names), strict=True):
            if altered:
                raise ValueError(
                    f"expected tensor {name!r} to have the sha256 that was written, got another; "
                    "the file was altered"
                )
