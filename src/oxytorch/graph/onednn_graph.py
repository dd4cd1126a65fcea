"""Runs a recorded module through oneDNN's graph compiler, which TorchScript can hand graphs to.

The compiler keeps activations in blocked layouts from one convolution to the next, and calls of a
compiled graph have no fixed cost per layer. Weights become constants of the graph, in an order of
its own, so a program holds a second copy of them, for one form of call.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .agreement import TOLERANCE, difference
from .errors import CaptureError
from .onednn_script import scripted
from .onednn_steps import Rewriting
from .outputs import output_tensors
from .replay import Seen, input_tensors
from .tape import Recording, Step, Value, recorded

_NARROW = (torch.bfloat16, torch.float16)
WARM_UP = 3
"""Runs after which TorchScript has settled how it executes a graph."""
_lock = threading.Lock()


class OneDnnProgram:
    """A recorded call whose graph oneDNN has compiled.

    parts: number of subgraphs that oneDNN computes.
    nbytes: bytes of the weights that it holds beside the module's own: those with a normalization
    folded in, and oneDNN's copy of all in its own order.
    """

    def __init__(self, recording: Recording, tensors: list[Tensor]) -> None:
        self._forms = [_form(t) for t in tensors]
        # Whoever calls watches the parameters.
        self._constants = [
            (t, t._version) for t in recording.externals if not isinstance(t, nn.Parameter)
        ]
        rewriting = Rewriting(recording.steps, recording.externals, recording.outputs)
        steps = rewriting.run()
        weights = rewriting.weights(steps)
        self.nbytes = rewriting.nbytes + sum(weight.nbytes for weight in weights)
        constants = _protected(rewriting.externals, weights)
        self._run = scripted(steps, len(tensors), constants, recording.outputs)
        with _fusing():
            self.parts = self._compile(tensors)
        if not self.parts:
            raise CaptureError("oneDNN's graph compiler takes no part of it")

    def _compile(self, tensors: list[Tensor]) -> int:
        for _ in range(WARM_UP):
            self._run(*tensors)
        graph = str(torch._C._last_executed_optimized_graph())
        return graph.count("= prim::oneDNNFusionGroup_")

    def __call__(self, tensors: list[Tensor]) -> list[Tensor] | None:
        """Run on the tensors of a call; None for tensors of another form, once a tensor that was a
        constant is written to, and for inputs with NaN or infinity."""
        # A compiled graph takes any memory for that of the form it was compiled for.
        if [_form(t) for t in tensors] != self._forms or not all(map(_is_finite, tensors)):
            return None
        if any(t._version != version for t, version in self._constants):
            return None
        return self._run(*tensors)


def _form(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _copied(tensor: Tensor, by: int = 0) -> Tensor:
    """A copy with the very same strides, its values rolled by so many along the last dimension."""
    own = tensor.detach()
    for dim, stride in enumerate(own.stride()):
        if stride == 0:
            own = own.narrow(dim, 0, min(own.shape[dim], 1))
    made = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype)
    made.copy_(own.roll(by, -1) if by and own.dim() else own)
    return made.expand(tensor.shape)


def _overlaps(tensor: Tensor) -> bool:
    """Whether places of a tensor may share memory, but for those along an expanded dimension."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 or size == 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _is_finite(tensor: Tensor) -> bool:
    """Whether a tensor surely holds neither NaN nor infinity.

    ReLU, clipping and maxima in oneDNN's graphs return numbers where they are given NaN.
    """
    if not tensor.is_floating_point():
        return True
    return math.isfinite(float(tensor.detach().sum()))


def available() -> bool:
    """Whether this torch can hand graphs to oneDNN."""
    return hasattr(torch._C, "_jit_set_llga_enabled") and torch._C._has_mkldnn


class Graphs:
    """Compiles calls of one module, each form for itself (see `graph.replay.Builder`)."""

    follows_writes = False  # weights are constants of oneDNN's

    def build(
        self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Seen
    ) -> tuple[OneDnnProgram, Any]:
        """A program for calls like this one, and its output. Raises CaptureError."""
        return build(forward, args, kwargs)

    def served(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """No program serves calls of several forms."""


def build(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[OneDnnProgram, Any]:
    """Compile a call of `forward`: the program and the call's output.

    Raises CaptureError where the code reads values of tensors, keeps a state, where this torch or
    oneDNN cannot compile it, and where the compiled graph's answers are other ones.
    """
    tensors = input_tensors(args, kwargs)
    if any(map(_overlaps, tensors)):
        raise CaptureError("places of an input share memory")
    if not all(map(_is_finite, tensors)):
        raise CaptureError("an input holds NaN or infinity")
    if any(t.is_inference() for t in tensors):
        with torch.inference_mode(False):
            own = [*map(_copied, tensors)]
        args, kwargs = _with_tensors(args, kwargs, tensors, own)
        tensors = own
    forward(*args, **kwargs)  # what is made at the first call is not recorded

    def run_once() -> tuple[Any, list[Tensor]]:
        output = forward(*args, **kwargs)
        return output, output_tensors(output)

    recording = recorded(run_once, tensors)
    if any(t.is_inference() for t in recording.externals):
        raise CaptureError("a weight was made in inference mode, where writes are not counted")
    if not all(map(_is_finite, recording.externals)):
        raise CaptureError("one of its tensors holds NaN or infinity")
    if any(t.dtype == torch.float16 for t in (*tensors, *recording.externals)):
        raise CaptureError("sums may overflow in float16, and oneDNN's graphs lose NaN")
    if any(step.read is not None for step in recording.steps):
        raise CaptureError("its code reads values of tensors")
    rolled = [_copied(t, by=1) for t in tensors]
    others = _with_tensors(args, kwargs, tensors, rolled)
    expected = output_tensors(forward(*others[0], **others[1]))
    try:
        program = OneDnnProgram(recording, tensors)
        _check(program, recording, tensors, recording.tensors)
        _check(program, recording, rolled, expected)
    except RuntimeError as error:
        reason = [type(error).__name__, *str(error).strip().splitlines()][-1]
        raise CaptureError(f"oneDNN's graph compiler fails: {reason}") from error
    return program, recording.output


@contextmanager
def _fusing() -> Iterator[None]:
    """Let TorchScript hand graphs to oneDNN; the switch is one for the whole process."""
    with _lock:
        before = torch._C._jit_llga_enabled()
        torch._C._jit_set_llga_enabled(True)
        try:
            yield
        finally:
            torch._C._jit_set_llga_enabled(before)


def _protected(externals: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """The constants of a graph: copies, but for weights, since oneDNN may write a sum in place of
    one of its terms."""
    kept = {id(weight) for weight in weights}
    return [t if id(t) in kept else t.detach().clone() for t in externals]


def _with_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], others: list[Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with other tensors in place of its own."""
    other_of = {id(t): other for t, other in zip(tensors, others, strict=True)}

    def other(leaf: Any) -> Any:
        return other_of[id(leaf)] if isinstance(leaf, Tensor) else leaf

    changed: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(other, (args, kwargs))
    return changed


def _check(
    program: OneDnnProgram, recording: Recording, tensors: list[Tensor], expected: list[Tensor]
) -> None:
    """Raise CaptureError where the program's answers are not as close as the module's own ones.

    expected: the module's own output. In a narrow dtype both are measured against the recorded
    steps in float32; twice the module's own error is allowed, and at least the tolerance.
    """
    given = [*map(_copied, tensors)]
    found = program(given)
    assert found is not None
    if not all(map(torch.equal, given, tensors)):
        raise CaptureError("oneDNN's graph compiler writes to the input")
    for ours, theirs in zip(found, expected, strict=True):
        if (ours.shape, ours.dtype, ours.stride()) != (theirs.shape, theirs.dtype, theirs.stride()):
            raise CaptureError("oneDNN's graph compiler gives tensors of another form")
    dtypes = {t.dtype for t in (*recording.externals, *tensors)}
    narrow = [dtype for dtype in _NARROW if dtype in dtypes]
    allowed = TOLERANCE[narrow[0] if narrow else torch.float32]
    reference = expected
    if narrow:
        reference = _in_float32(recording, tensors)
        allowed = max(allowed, 2 * difference(reference, expected))
    gap = difference(reference, found)
    if not gap <= allowed:
        raise CaptureError(
            f"oneDNN's graph compiler gives other answers: they differ by {gap:.2e} of the "
            f"largest, allowed {allowed:.2e}"
        )


def _in_float32(recording: Recording, tensors: list[Tensor]) -> list[Tensor]:
    """Run recorded steps with every floating tensor in float32."""
    values = {Value("input", i): _widened(t) for i, t in enumerate(tensors)}
    values |= {Value("external", i): _widened(t) for i, t in enumerate(recording.externals)}
    for step in recording.steps:
        arguments = _arguments(step, values)
        result = step.operator(*arguments[0], **arguments[1])
        results = result if len(step.results) != 1 else (result,)
        for names, made in zip(step.results, results, strict=True):
            if isinstance(names, list):
                values.update(zip(names, made, strict=True))
            elif names is not None:
                values[names] = made
    return [values[value] for value in recording.outputs]


def _arguments(step: Step, values: dict[Value, Tensor]) -> tuple[list[Any], dict[str, Any]]:
    def actual(value: Any) -> Any:
        if isinstance(value, Value):
            return values[value]
        if isinstance(value, tuple):
            return [actual(item) for item in value]
        return torch.float32 if value in _NARROW else value

    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for argument, value in zip(step.operator._schema.arguments, step.arguments, strict=True):
        if argument.kwarg_only:
            keywords[argument.name] = actual(value)
        else:
            positional.append(actual(value))
    return positional, keywords


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _NARROW else tensor
