"""Programs on disk: the format of files that hold one, and what is checked before it is read.

A file is one of `core.described_file`, whose tensors are the constants. Its format is
"oxytorch.program", its version "2". The description has

    program      the text of the program
    constants    the entry of each constant, and the same of `state`: buffers that a call writes to
    arguments    how (args, kwargs) are nested; inputs: of each leaf its kind, name and more
    results      how the result is nested; outputs: where each leaf comes from
    writes       what is written to inputs and state
    conditions   on sizes of inputs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..core.described_file import DescribedFile, Tensors, write_described
from ..core.tensor_file import DTYPES
from ..rewriting.copies import same_weights
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
)
from .program import Program
from .structure import Structure

FORMAT = "oxytorch.program"
VERSIONS = ("3", "2", "1")
"""The one that is written, and those that are read. The order of weights in panels belongs to it:
who changes `ops/panels/layout.py` needs another. Version 2 holds no plan of memory, version 1 no
panels."""

_Item = TypeVar("_Item")
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def save(model: object, path: Path, sample_input: Any = None, dynamic_shapes: Any = None) -> None:
    """Write a program to a file; see `oxytorch.save`."""
    if isinstance(model, nn.Module) and sample_input is not None:
        check_evaluation("save", model)
        model = _exported(model, sample_input, dynamic_shapes)
    elif not isinstance(model, ProgramModel):
        raise TypeError(
            f"save: expected a program, or a module with sample_input, got a "
            f"{type(model).__name__}; oxytorch.save(model, path, sample_input=x) exports a module, "
            "and what oxytorch.llm.optimize returned is saved as it is"
        )
    elif sample_input is not None:
        raise TypeError("save: expected no sample_input with a program")
    tensors = Tensors()
    try:
        model = model.storable()
        description = _described(model, tensors)
        check(model.program.text)
    except ValueError as error:
        raise ValueError(f"save: {error}") from error
    write_described(path, FORMAT, VERSIONS[0], description, tensors)


def _described(model: ProgramModel, sources: Tensors) -> dict[str, Any]:
    """The description of a program; add its tensors to `sources`."""
    own = model.interface
    tensors = [*model.program.constants, *model.state]
    entries = [
        sources.entry(tensor, name) for tensor, name in zip(tensors, model.names, strict=True)
    ]
    count = len(model.program.constants)
    _check_state(model)
    return {
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


def _input_data(each: Input) -> list[Any]:
    if isinstance(each, TensorInput):
        return ["tensor", each.name, str(each.dtype).removeprefix("torch."), [*each.shape]]
    if isinstance(each, SizeInput):
        return ["size", each.name]
    return ["fixed", each.name, each.value]


def _exported(model: nn.Module, sample_input: Any, dynamic_shapes: Any) -> ProgramModel:
    from .export import from_exported  # which who loads a file has no use for

    if isinstance(sample_input, (str, list)):
        raise TypeError(
            "save: expected sample_input as a tensor, a tuple or a mapping of tensors, got a "
            f"{type(sample_input).__name__}; of a model that takes texts, save the transformer "
            "inside (model[0].auto_model) with what its tokenizer makes"
        )
    args: tuple[Any, ...] = (sample_input,)
    kwargs: dict[str, Any] = {}
    if isinstance(sample_input, Mapping):
        args, kwargs = (), dict(sample_input)
    elif isinstance(sample_input, tuple):
        args = sample_input
    layers = getattr(model.__dict__.get("forward"), "layers", None)  # of a `Replay`
    with torch.no_grad():
        copy = same_weights(model)
        exported = torch.export.export(copy, args, kwargs, dynamic_shapes=dynamic_shapes)
        return from_exported(exported, storable=True, layers=layers)


def load(path: Path, verify: bool = False) -> ProgramModel:
    """Open a file that holds a program; see `oxytorch.load`."""
    return DescribedFile(path, (FORMAT,)).read(read, VERSIONS, verify)


def read(file: DescribedFile) -> ProgramModel:
    """The program of a file; raises ValueError or RuntimeError for what a file may not hold."""
    text = file.part("program", str)
    counts = check(text)
    entries = [file.part(key, list) for key in ("constants", "state")]
    constants, state = ([file.tensor(entry) for entry in each] for each in entries)
    interface = _interface(file, counts, len(state))
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


def _interface(file: DescribedFile, counts: Counts, state: int) -> Interface:
    arguments = Structure.read(file.part("arguments", list))
    is_call = arguments.kind == "tuple" and [p.kind for p in arguments.parts] == ["tuple", "dict"]
    inputs = _items(file, "inputs", _input)
    if not is_call or arguments.count() != len(inputs):
        raise ValueError(f"expected arguments with {len(inputs)} leaves, got other ones")
    results = Structure.read(file.part("results", (list, str)))
    limits = {
        "tensor": counts.tensor_results,
        "size": counts.size_results,
        "input": len(inputs),
        "state": state,
    }
    outputs = _items(file, "outputs", lambda data: _output(data, limits))
    if results.count() != len(outputs):
        raise ValueError(f"expected a result of {len(outputs)} leaves, got {results.count()}")
    writes = _items(file, "writes", lambda data: _write(data, limits))
    for each in writes:
        if each.kind == "input" and not isinstance(inputs[each.place], TensorInput):
            raise ValueError(f"expected a tensor to be written, got {inputs[each.place].name}")
    dims = [len(each.shape) if isinstance(each, TensorInput) else None for each in inputs]
    found = file.part("conditions", list)
    for condition in found:
        conditions.check(condition, dims)
    return Interface(arguments, inputs, results, outputs, writes, tuple(found))


def _items(file: DescribedFile, key: str, read: Callable[[Any], _Item]) -> tuple[_Item, ...]:
    found = []
    for data in file.part(key, list):
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
