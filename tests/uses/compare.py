"""Run one use on a stock model and on an optimized copy, and say whether they did the same.

A use is a function `use(model, log)`. It does with the model what a user would do, and hands
everything that can be seen to `log`: answers, gradients, changed tensors, names of called hooks.
Values are copied when they are logged.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import oxytorch
from oxytorch.core.packed import PackedTensor
from oxytorch.optimize import DEFAULT, PASSES

Use = Callable[[Any, "Log"], None]

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
    torch.complex64: 1e-5,
    torch.complex128: 1e-12,
}
"""The largest difference allowed, relative to the largest value of the stock answer."""

WEIGHTS = {
    "int8": oxytorch.quantization.Int8Weight,
    "int4": functools.partial(oxytorch.quantization.Int4Weight, group_size=None),
}
"""Configurations of weights that `quantize_` rounds."""

_REMEDY = re.compile(
    r"\b(undo|call|use|pass|give|set|clone|copy|convert|load|make|write|first|instead|without)\b",
    re.IGNORECASE,
)
_PACKAGE = str(Path(oxytorch.__file__).parent)


def optimized(model: nn.Module, form: str, sample: Any = None) -> Any:
    """Return the optimized copy of a model in one of the forms in which users ask for it.

    form: "default", "sample" (with sample_input), "program", "join", "all" (every pass),
        "bfloat16", "converted" (`quantize`), "llm" (`llm.optimize` in the model's own dtype),
        "int8" and "int4" (`quantize_` of all but PEFT's adapters), "llm_int8" and "llm_int4"
        (`llm.optimize` after that).
    """
    if form.endswith(("int8", "int4")):
        oxytorch.quantize_(model, WEIGHTS[form[-4:]](), filter=_is_no_adapter)
    if form.startswith("llm"):
        return oxytorch.llm.optimize(model, dtype=None)
    if form in WEIGHTS:
        return model
    if form == "converted":
        settings = oxytorch.quantization.Int8StaticActivationInt8Weight(only_faster=False)
        return oxytorch.quantize(model, [sample], settings)
    if form == "default":
        return oxytorch.optimize(model)
    if form == "sample":
        return oxytorch.optimize(model, sample_input=sample)
    if form == "bfloat16":
        return oxytorch.optimize(model, sample_input=sample, dtype=torch.bfloat16)
    passes = [p for p in PASSES if p != "program"] if form == "all" else [*DEFAULT, form]
    return oxytorch.optimize(model, sample_input=sample, passes=passes)


def rounded(model: nn.Module, form: str) -> Any:
    """Return the plain model with the values that a form's weights are rounded to."""
    is_rounded = form.endswith(("int8", "int4"))
    return oxytorch.undo(optimized(model, form)) if is_rounded else model


def _is_no_adapter(path: str, module: nn.Module) -> bool:
    """As with `filter=None`, the head of a language model stays plain."""
    return not any(part in path for part in ("lora_", "ia3_", "lm_head", "modules_to_save"))


class Log:
    """What a use has shown so far."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.error: BaseException | None = None

    def __call__(self, *values: Any) -> None:
        self.seen.extend(noted(value) for value in values)


@dataclasses.dataclass
class Raised:
    """One error that a use has caught and logged."""

    kind: type
    message: str
    clear: bool
    ours: bool


@dataclasses.dataclass
class Note:
    """One tensor as it was: its type, what can be asked of it, and its values."""

    kind: type
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    layout: torch.layout
    values: torch.Tensor


def noted(value: Any) -> Any:
    """Return a copy of a value in which tensors are notes and containers keep their type."""
    if isinstance(value, torch.Tensor):
        kind = type(value)
        if issubclass(kind, PackedTensor):
            kind = nn.Parameter if isinstance(value, nn.Parameter) else torch.Tensor
        layout = value.layout
        with torch.no_grad():
            source = value.detach()
            source = source.to_dense() if layout != torch.strided else source
            plain = torch.zeros(source.shape, dtype=source.dtype, device="cpu")
            if source.device.type != "meta":
                plain.copy_(source)
        return Note(kind, value.dtype, tuple(value.shape), value.requires_grad, layout, plain)
    if isinstance(value, Mapping):
        return type(value), {key: noted(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [noted(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: noted(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return type(value), fields
    if isinstance(value, BaseException):
        return Raised(type(value), _line(value), is_clear(value), _is_raised_by_us(value))
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return value
    return type(value)


@dataclasses.dataclass
class Verdict:
    """state: "right", "refused" or "wrong"; detail says why in one line."""

    state: str
    detail: str = ""


def compare(
    build: Callable[[], nn.Module],
    use: Use,
    form: str = "default",
    sample: Any = None,
    tolerance: float | None = None,
) -> Verdict:
    """Run `use` on build() and on the optimized copy of build(), and compare all that they show.

    sample: what `sample_input` gets, for the forms that need it; a function without arguments makes
        it again.
    tolerance: allowed where it is larger than that for the dtype of the answer.
    """
    stock, ours = Log(), Log()
    _run(lambda: rounded(_built(build), form), use, stock)
    given = sample() if callable(sample) else sample
    _run(lambda: optimized(_built(build), form, given), use, ours)
    return judge(stock, ours, tolerance)


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def _run(make: Callable[[], Any], use: Use, log: Log) -> None:
    try:
        model = make()
        torch.manual_seed(1)
        use(model, log)
    except Exception as error:
        log.error = error


def judge(stock: Log, ours: Log, tolerance: float | None = None) -> Verdict:
    """Compare what two models showed."""
    for at, (expected, found) in enumerate(zip(stock.seen, ours.seen, strict=False)):
        if isinstance(found, Raised) and found.clear and not isinstance(expected, Raised):
            return Verdict("refused", found.message)
        reason = difference(expected, found, tolerance)
        if reason:
            return Verdict("wrong", f"value {at}: {reason}")
    if ours.error is not None:
        error = noted(ours.error)
        if stock.error is None:
            return Verdict("refused" if error.clear else "wrong", error.message)
        reason = difference(noted(stock.error), error)
        return Verdict("wrong", reason) if reason else Verdict("right", "both raise")
    if stock.error is not None:
        return Verdict("wrong", f"only stock raises {_line(stock.error)}")
    if len(stock.seen) != len(ours.seen):
        return Verdict("wrong", f"{len(ours.seen)} values logged, stock {len(stock.seen)}")
    return Verdict("right")


def is_clear(error: BaseException) -> bool:
    """Return whether an error was raised by oxytorch's own Python and says what to do."""
    return _is_raised_by_us(error) and _REMEDY.search(str(error)) is not None


def _is_raised_by_us(error: BaseException) -> bool:
    """Return whether the last Python frame of an error is oxytorch's."""
    where = traceback.extract_tb(error.__traceback__)
    return bool(where) and where[-1].filename.startswith(_PACKAGE)


def _line(error: BaseException) -> str:
    """Return an error in one line, with the place in oxytorch's code that it passed last."""
    text = " ".join(str(error).split())[:140]
    places = [
        f"{Path(f.filename).name}:{f.lineno}"
        for f in traceback.extract_tb(error.__traceback__)
        if f.filename.startswith(_PACKAGE)
    ]
    return f"{type(error).__name__}: {text}" + (f" [{places[-1]}]" if places else "")


def difference(
    expected: Any, found: Any, tolerance: float | None = None, floor: float = 1e-30
) -> str | None:
    """Return in words how two noted values differ, or None where they do not.

    floor: differences are relative to at least this value. Among the tensors of one container it is
        a tenth of the largest value, since some gradients are zero but for rounding.
    """
    if isinstance(expected, Raised) and isinstance(found, Raised):
        related = issubclass(expected.kind, found.kind) or issubclass(found.kind, expected.kind)
        same = expected.message.partition(" [")[0] == found.message.partition(" [")[0]
        if found.clear or (related and (same or not found.ours)):
            return None
        return f"raises {found.message}, stock {expected.message}"
    if isinstance(found, Raised):
        return f"raises {found.message}"
    if isinstance(expected, Note) and isinstance(found, Note):
        return _tensor_difference(expected, found, tolerance, floor)
    if isinstance(expected, tuple) and isinstance(found, tuple):
        return _container_difference(expected, found, tolerance, floor)
    if isinstance(expected, float) and isinstance(found, float):
        close = abs(expected - found) <= 1e-5 * abs(expected) or expected == found
        both_nan = expected != expected and found != found
        return None if close or both_nan else f"{found}, stock {expected}"
    if type(expected) is type(found) and expected == found:
        return None
    return f"{_short(found)}, stock {_short(expected)}"


def _largest(value: Any) -> float:
    """Return the largest finite value among the tensors directly in a container."""
    parts = value.values() if isinstance(value, dict) else value
    tensors = [part.values for part in parts if isinstance(part, Note)]
    finite = [t[t.isfinite()].abs() for t in tensors if t.is_floating_point()]
    return max([float(t.max()) for t in finite if t.numel()], default=0.0)


def _container_difference(
    expected: Any, found: Any, tolerance: float | None, floor: float
) -> str | None:
    kinds, parts = (expected[0], found[0]), (expected[1], found[1])
    if kinds[0] is not kinds[1]:
        return f"a {kinds[1].__name__}, stock a {kinds[0].__name__}"
    if isinstance(parts[0], dict):
        if [*parts[0]] != [*parts[1]]:
            return f"keys {[*parts[1]]}, stock {[*parts[0]]}"
        pairs = [(key, parts[0][key], parts[1][key]) for key in parts[0]]
    else:
        if len(parts[0]) != len(parts[1]):
            return f"{_short(parts[1])}, stock {_short(parts[0])}"
        pairs = [(at, *pair) for at, pair in enumerate(zip(*parts, strict=True))]
    floor = max(floor, _largest(parts[0]) / 10)
    for key, left, right in pairs:
        reason = difference(left, right, tolerance, floor)
        if reason:
            return f"[{key!r}] {reason}"
    return None


def _tensor_difference(
    stock: Note, ours: Note, tolerance: float | None, floor: float
) -> str | None:
    for name in ("kind", "dtype", "shape", "requires_grad", "layout"):
        expected, found = getattr(stock, name), getattr(ours, name)
        if expected != found:
            return f"{name} {found}, stock {expected}"
    if not (stock.dtype.is_floating_point or stock.dtype.is_complex):
        return None if torch.equal(stock.values, ours.values) else "other integers"
    limit = max(TOLERANCE.get(stock.dtype, 0.0), tolerance or 0.0)
    wide = torch.complex128 if stock.dtype.is_complex else torch.float64
    expected, found = stock.values.to(wide), ours.values.to(wide)
    finite = expected.isfinite()
    if not torch.equal(expected.isnan(), found.isnan()):
        return f"{int(found.isnan().sum())} NaN, stock {int(expected.isnan().sum())}"
    infinite = ~finite & ~expected.isnan()
    if not torch.equal(expected[infinite], found[infinite]):
        return "infinities differ"
    if not finite.any():
        return None
    largest = max(float(expected[finite].abs().max()), floor)
    error = float((expected[finite] - found[finite]).abs().max())
    if not error <= limit * largest:
        return f"differs by {error / largest:.2g} of the largest value"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
