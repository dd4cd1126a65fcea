"""Programs behind HTTP, in the Open Inference Protocol (KServe's version 2) with JSON alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from ..graph.agreement import JOINED, difference
from ..program.model import FixedInput, ProgramModel, SizeInput, TensorInput
from .errors import ApiError
from .logs import log
from .requests import Body

DTYPES = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "FP32": torch.float32,
    "FP64": torch.float64,
    "BF16": torch.bfloat16,
}
"""The protocol's names of dtypes."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Size = Annotated[int, Field(ge=0, le=1 << 40)]


class Given(Body):
    """One input: numbers in `data`, nested or flat, row by row."""

    name: str
    shape: list[Size] = Field(max_length=64)
    datatype: str
    data: list[Any]


class Wanted(Body):
    """An output to return."""

    name: str


class Inference(Body):
    """POST /v2/models/NAME/infer."""

    id: str | None = None
    inputs: list[Given]
    outputs: list[Wanted] | None = None


Call = tuple[Tensor | int, ...]
"""What a call gives for the inputs that vary, in their order."""


class ProgramCalls:
    """Calls of a program: by name, one by one or with the rows of several joined.

    Rows are joined where `is_joined` says so: then each row of a result has to depend on the same
    row of the inputs alone. The first joined call is compared with single ones, and where they
    differ nothing is joined any more.
    """

    def __init__(self, model: ProgramModel, is_joined: bool) -> None:
        self.model = model
        self.inputs = model.interface.inputs
        self._is_joined = is_joined
        self._is_compared = False

    @property
    def varying(self) -> list[TensorInput | SizeInput]:
        """The inputs that a call gives."""
        return [each for each in self.inputs if not isinstance(each, FixedInput)]

    def can_join(self) -> bool:
        """Whether every input is a tensor whose first size may be any."""
        return bool(self.varying) and all(
            isinstance(each, TensorInput) and each.shape and each.shape[0] is None
            for each in self.varying
        )

    def __call__(self, calls: Sequence[Call]) -> list[list[Tensor]]:
        """The results of calls. A call that the program refuses gives an ApiError in place."""
        if not self._is_joined or len(calls) == 1 or len({_form(call) for call in calls}) != 1:
            return [self.one(call) for call in calls]
        joined = self._joined(calls)
        if joined is None:
            return [self.one(call) for call in calls]
        if not self._is_compared:
            singles = [self.one(call) for call in calls]
            self._is_compared = True
            if not all(map(_alike, joined, singles)):
                self._is_joined = False
                log.warning("rows of this program depend on each other: calls are not joined")
                return singles
        return joined

    def one(self, call: Call) -> list[Tensor]:
        """The tensors of a call's result. Raises ApiError where the program refuses the inputs."""
        given = iter(call)
        leaves = [
            each.value if isinstance(each, FixedInput) else next(given) for each in self.inputs
        ]
        args, kwargs = self.model.interface.arguments.build(iter(leaves))
        try:
            result = self.model(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise ApiError(400, str(error), param="inputs") from error
        found = self.model.interface.results.take_apart(result, "the result")
        numbers = (bool, int, float, Tensor)
        return [torch.as_tensor(each, device="cpu") for each in found if isinstance(each, numbers)]

    def _joined(self, calls: Sequence[Call]) -> list[list[Tensor]] | None:
        """The results of calls as one; None where a result has other rows than the inputs."""
        columns = [
            [part for part in parts if isinstance(part, Tensor)]
            for parts in zip(*calls, strict=True)
        ]
        rows = [len(part) for part in columns[0]]
        whole = self.one(tuple(torch.cat(parts) for parts in columns))
        if any(result.dim() == 0 or len(result) != sum(rows) for result in whole):
            self._is_joined = False
            log.warning("a result of this program has other rows than its inputs: not joined")
            return None
        parts = [torch.split(result, rows) for result in whole]
        return [[part[index] for part in parts] for index in range(len(calls))]


def _form(call: Call) -> tuple[Any, ...]:
    """What calls need alike to be joined: all sizes but the first, and one number of rows each."""
    tensors = [part for part in call if isinstance(part, Tensor)]
    alike = len({len(part) for part in tensors if part.dim()}) == 1
    return (*(tuple(part.shape[1:]) for part in tensors), None if alike else id(call))


def _alike(joined: Sequence[Tensor], single: Sequence[Tensor]) -> bool:
    for one, other in zip(joined, single, strict=True):
        if one.is_floating_point():
            if not difference(other, one) <= JOINED.get(one.dtype, JOINED[torch.float32]):
                return False
        elif not torch.equal(one, other):
            return False
    return True


def call_of(inputs: Sequence[Given], varying: Sequence[TensorInput | SizeInput]) -> Call:
    """The tensors and sizes of a request. Raises ApiError for others than the program takes."""
    given = {each.name: each for each in inputs}
    names = [each.name for each in varying]
    if sorted(given) != sorted(names) or len(given) != len(inputs):
        raise ApiError(
            400,
            f"expected the inputs {names}, got {[each.name for each in inputs]}",
            param="inputs",
        )
    return tuple(_value(given[each.name], each) for each in varying)


def _value(given: Given, expected: TensorInput | SizeInput) -> Tensor | int:
    dtype = expected.dtype if isinstance(expected, TensorInput) else torch.int64
    if given.datatype != NAMES.get(dtype):
        raise ApiError(
            400,
            f"expected {given.name} of datatype {NAMES.get(dtype)}, got {given.datatype}",
            param="inputs",
        )
    flat = given.data
    while flat and isinstance(flat[0], list):
        if not all(isinstance(row, list) for row in flat):
            raise ApiError(400, f"{given.name}: data is nested unevenly", param="inputs")
        flat = [number for row in flat for number in row]
    if len(flat) != math.prod(given.shape):
        raise ApiError(
            400,
            f"{given.name}: expected {math.prod(given.shape)} values for the shape "
            f"{given.shape}, got {len(flat)}",
            param="inputs",
        )
    wanted: tuple[type, ...] = (int, float) if dtype.is_floating_point else (int,)
    if dtype == torch.bool:
        wanted = (bool,)
    wrong = next((each for each in flat if type(each) not in wanted), None)
    if wrong is not None:
        raise ApiError(400, f"{given.name}: {wrong!r} is no {given.datatype}", param="inputs")
    try:
        tensor = torch.tensor(flat, dtype=dtype, device="cpu").view(given.shape)
    except (RuntimeError, OverflowError) as error:
        raise ApiError(400, f"{given.name}: {error}", param="inputs") from error
    if isinstance(expected, SizeInput):
        if tensor.numel() != 1:
            raise ApiError(400, f"expected {given.name} to be one number", param="inputs")
        return int(tensor)
    return tensor


def shown(number: int, result: Tensor) -> dict[str, Any]:
    """A result as the protocol writes it. Numbers that JSON does not have are refused."""
    data = result.detach().flatten()
    if data.is_complex() or result.dtype not in NAMES:
        raise ApiError(500, f"output_{number} is of {result.dtype}, which the protocol lacks")
    if data.is_floating_point() and not bool(data.isfinite().all()):
        raise ApiError(
            500,
            f"output_{number} is not finite, which JSON cannot write; look at the inputs",
            kind="server_error",
            code="not_finite",
        )
    numbers = data.float() if data.dtype == torch.bfloat16 else data
    return {
        "name": f"output_{number}",
        "datatype": NAMES[result.dtype],
        "shape": list(result.shape),
        "data": numbers.tolist(),
    }
