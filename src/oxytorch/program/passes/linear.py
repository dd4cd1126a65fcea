"""Passes over linear layers: one spelling, packed weights, and what follows in the same sweep."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ops.linear import supports
from ...ops.panels.formats import PLAIN_NAMES
from ...rewriting import measure
from ...rewriting.measure import (
    GAIN,
    NO_LOSS,
    Product,
    about,
    input_of,
    numbers,
    rows_of,
    seconds_of,
)
from ..program import Argument, Some, Step, Steps, Value
from .editor import VIEWS, Editor, are_same, is_contiguous, is_same, known
from .post_ops import activation, is_activation, other_of_sum, words
from .simplify import join_views

LINEAR, PACK, PACKED = "aten::linear", "mkldnn::_reorder_linear_weight", "mkldnn::_linear_pointwise"
PANELS = "oxytorch::linear_panels"
SMALLEST = 32 << 10
"""Elements of a float32 weight below which a call of oneDNN costs more than it saves."""
EPSILON = "1e-05"
"""Of the kernel between products that are timed."""
OF_ONE_CACHE, OF_CACHES = 4 << 20, 64 << 20
"""Bytes after which the second cache of a thread's processor, and those of all, hold others."""
MOST_LOSS = 1.1
"""And at most this part of it with many rows, where a product of inputs of any size is asked for:
what is gained with few of them is little beside that."""
MOST_TURNS = 16
"""Products of a call that is timed. Weights so small stay in the caches inside a model too."""


def as_linear(editor: Editor) -> None:
    """Write x @ weight.t() as a linear layer, and take it past views before and after it."""
    for step in editor.steps.steps:
        if step.target != "aten::mm":
            continue
        x, second = step.arguments
        turned = editor.made_by(second, "aten::t", "aten::transpose.int", "aten::permute")
        if turned is not None:
            editor.replace(step, Step(LINEAR, [x, turned.arguments[0], "none"], step.results))
    editor.apply()
    for step in editor.steps.steps:
        if step.target == LINEAR:
            _take_past_views(editor, step)
    editor.apply()


def _take_past_views(editor: Editor, step: Step) -> None:
    """linear(x.view(rows, n)).view(..., m) is linear(x)."""
    (result,) = step.results
    before = editor.made_by(step.arguments[0], *VIEWS)
    if before is None or result is None or result in editor.outputs:
        return
    x = before.arguments[0]
    after = editor.takers.get(result, [])
    is_known = isinstance(x, Value) and x.meta is not None and result.meta is not None
    if not is_known or not after or any(taker.target not in VIEWS for taker in after):
        return
    meta: Any = x.meta
    flat = before.results[0].meta if before.results[0] is not None else None
    if flat is None or meta.dim() < 3 or not is_same(meta.shape[-1], flat.shape[-1]):
        return
    width = result.meta.shape[-1]  # type: ignore[union-attr]
    full = Value(meta=result.meta.new_empty((*meta.shape[:-1], width)))  # type: ignore[union-attr]
    editor.replace(step, Step(LINEAR, [x, *step.arguments[1:]], [full]))
    for taker in after:
        made = taker.results[0]
        if made is not None and made not in editor.outputs and _is_shaped_as(made, full):
            editor.redirect(made, full)
        else:
            editor.replace(taker, taker.with_arguments([full, *taker.arguments[1:]]))


def activations_before_views(editor: Editor) -> None:
    """Have what is computed of each element of a layer's result computed before a view of it, so
    that the layer can compute it in its sweep: 1 x 1 convolutions of single pixels are linear
    layers between views."""
    found = False
    for step in editor.steps.steps:
        if step.target in VIEWS:
            found |= _activation_before(editor, step)
    editor.apply()
    if found:
        join_views(editor)


def _activation_before(editor: Editor, view: Step) -> bool:
    source, (result,) = view.arguments[0], view.results
    taker = None if result is None else editor.only_taker(result)
    if taker is None or not is_activation(taker) or editor.made_by(source, LINEAR) is None:
        return False
    made = taker.results[0]
    if made is None or made.meta is None or source.meta is None:
        return False
    is_alone = editor.only_taker(source) is view and taker.taken == (result,)
    if not is_alone or len(taker.results) != 1 or made.meta.dtype != source.meta.dtype:
        return False
    own = Value(meta=source.meta)
    activated = replace(taker, arguments=[source, *taker.arguments[1:]], results=[own])
    viewed = replace(view, arguments=[own, *view.arguments[1:]], results=[made])
    editor.replace(view)
    editor.replace(taker, activated, viewed)
    return True


def _is_shaped_as(a: Value, b: Value) -> bool:
    return a.meta is not None and b.meta is not None and are_same(a.meta.shape, b.meta.shape)


def pack(editor: Editor) -> None:
    """Have linear layers whose weights last take packed ones, where that is faster."""
    packed_of: dict[Value, Value] = {}
    for step in editor.steps.steps:
        if step.target != LINEAR:
            continue
        x, weight, bias = step.arguments
        why = _why_plain(editor, x, weight, bias)
        if not why and not is_contiguous(step.results[0]):
            why = "its result does not lie in torch's order"
        if not why and not pays(x.meta, weight.meta):
            why = "a packed weight was timed and is not faster"
        if why:
            editor.leave(step, why)
            continue
        makes: list[Step] = []
        if weight not in packed_of:
            packed_of[weight] = Value()
            makes = _packing(weight, packed_of[weight])
        call = Step(PACKED, [x, packed_of[weight], bias, *words("none", "")], step.results)
        editor.replace(step, *makes, call)
    editor.apply()


def _packing(weight: Value, packed: Value) -> list[Step]:
    meta = weight.meta
    assert meta is not None
    if meta.is_contiguous():
        return [Step(PACK, [weight, "none"], [packed])]
    lies = Value()
    copy = Step("aten::clone", [weight, Some("=contiguous_format")], [lies])
    return [copy, Step(PACK, [lies, "none"], [packed])]


def _why_plain(editor: Editor, x: Value, weight: Value, bias: Any) -> str:
    """Why a layer cannot take a packed weight; empty if it can."""
    meta, inner = weight.meta, x.meta
    if weight not in editor.lasting:
        return "its weight is computed at each call"
    if meta is None or inner is None:
        return "shapes and dtypes of its inputs are not known"
    if meta.dim() != 2 or known(meta.shape) is None or not inner.dim():
        return "its weight is no matrix of a known size, or its input has no dimension"
    bias_meta = bias.item.meta if isinstance(bias, Some) else meta
    if inner.dtype != meta.dtype or bias_meta is None or bias_meta.dtype != meta.dtype:
        return "input, weight and bias differ in dtype"
    if isinstance(bias, Some) and not is_vector(bias_meta):
        return NO_VECTOR
    return "its input is empty" if 0 in inner.shape else why_not_packed(meta)


NO_VECTOR = "its bias is no vector in one piece of memory"


def is_vector(bias: Tensor) -> bool:
    """Whether a bias lies in memory as oneDNN takes for granted."""
    return bias.dim() == 1 and bias.is_contiguous()


def why_not_packed(weight: Tensor) -> str:
    """Why a weight is not packed in oneDNN's order, whatever it is multiplied with; empty if it
    can be."""
    if weight.dtype == torch.float32 and weight.numel() < SMALLEST:
        return f"its weight has fewer than {SMALLEST} elements, for which a call costs too much"
    return supports(weight.dtype) or ""


def pays(x: Any, weight: Any) -> bool:
    """Whether the packed layer is faster than torch's own on inputs like this one, or of any size
    where that is not known."""
    return is_faster(x, weight, packed_call, plain_call, gain=1.0)


Make = Callable[[Tensor], "LinearCall"]
"""The product with a weight of some numbers."""


def is_faster(
    x: Any,
    weight: Any,
    make: Make,
    than: Make,
    gain: float = GAIN,
) -> bool:
    """Whether the product that `make` gives for a weight is faster than that of `than`, on inputs
    like this one, or of any size where that is not known.

    All ways to compute it are timed at once, so that each is timed once.
    gain: the part of the other's time that it takes at most; 1 where more is gained after it, by
        what follows in the same sweep. Of inputs of any size it is the mean, which one time that
        others on the machine made longer does not turn.
    """
    ways = tuple(dict.fromkeys((*ways_of(weight), make, than)))
    rows = rows_of(known(x.shape), weight.numel())
    if not measure.TIMED:
        for count in rows:
            for call in products_of(x, weight, ways, count):
                call()
        return True
    outputs, width = weight.shape
    key = (
        "program",
        about(outputs),
        about(width),
        weight.dtype,
        x.dim(),
        *(way.__name__ for way in ways),
    )
    ratios = []
    for count in rows:
        times = seconds_of((*key, count), partial(products_of, x, weight, ways, count))
        ratios.append(times[ways.index(make)] / times[ways.index(than)])
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    most = NO_LOSS if len(ratios) == 1 else MOST_LOSS
    return mean <= gain and ratios[-1] <= most


def ways_of(weight: Tensor) -> tuple[Make, ...]:
    """The ways to compute a product with a weight like this one."""
    is_packable, fits = not why_not_packed(weight), fits_panels(weight)
    return plain_call, *[packed_call] * is_packable, *[panels_call] * fits


def products_of(
    x: Tensor, weight: Tensor, ways: Sequence[Make], rows: int
) -> list[Callable[[], Tensor]]:
    """Calls of products with a weight of numbers, on so many rows in as many dimensions as x."""
    values = numbers(*weight.shape, dtype=weight.dtype)
    given = input_of(rows, weight.shape[1], [1] * x.dim()).to(weight.dtype)
    made = [within_program(partial(_listed, make, values), values.nbytes) for make in ways]
    return [partial(product, given) for product in made]


def _listed(make: Make, values: Tensor) -> list[LinearCall]:
    return [make(values)]


@dataclass(frozen=True, eq=False)
class LinearCall:
    """A product with a weight of numbers, and with a bias, as a step.

    arguments: what follows the input.
    constants: the values among them.
    """

    target: str
    arguments: Sequence[Argument]
    constants: dict[Value, Tensor]

    def of(self, x: Value) -> list[Step]:
        """The steps with an input, of which the last gives the product."""
        return [Step(self.target, [x, *self.arguments], [Value()])]


def plain_call(weight: Tensor) -> LinearCall:
    """The product of torch's own layer."""
    value, bias = Value(), Value()
    return LinearCall(LINEAR, [value, Some(bias)], {value: weight, bias: bias_of(weight)})


def packed_call(weight: Tensor) -> LinearCall:
    """The product with a weight in oneDNN's order."""
    value, bias = Value(), Value()
    packed = torch.ops.mkldnn._reorder_linear_weight.default(weight, None)
    arguments = [value, Some(bias), *words("none", "")]
    return LinearCall(PACKED, arguments, {value: packed, bias: bias_of(weight)})


def panels_call(weight: Tensor) -> LinearCall:
    """The product with a weight in panels."""
    format, value, bias = PLAIN_NAMES[weight.dtype], Value(), Value()
    packed = torch.ops.oxytorch.pack_panels.default(weight, format)
    after = [str(weight.shape[0]), Some(bias), "none", '"none"', '"none"']
    arguments = [f'"{format}"', value, *["none"] * 3, *after]
    return LinearCall(PANELS, arguments, {value: packed, bias: bias_of(weight)})


def fits_panels(weight: Tensor) -> bool:
    """Whether a weight may lie in panels, whatever it is multiplied with."""
    is_small = weight.dtype == torch.float32 and weight.numel() < SMALLEST
    return weight.dtype in PLAIN_NAMES and not is_small and weight.numel() > 0


def bias_of(weight: Tensor) -> Tensor:
    """One for a layer that is timed, as most have."""
    return torch.zeros(weight.shape[0], dtype=weight.dtype, device="cpu")


def within_program(
    make: Callable[[], Sequence[LinearCall]],
    nbytes: int,
    after: Callable[[Value], Sequence[Step]] = lambda result: (),
) -> Product:
    """What an input gives with several products, computed as in a program: each product takes what
    a kernel of ours has just written, so that it lies in the caches of all threads' processors; and
    again with other weights, until no cache holds the first.

    nbytes: of the weights that `make` gives products with.
    after: steps with the last product, which are timed with it.
    """
    x, steps = Value(), Steps()
    steps.inputs.append(x)
    for _ in range(turns_of(nbytes)):
        calls = make()
        written = Value()
        for call in calls:
            steps.constants |= call.constants
        products = [step for call in calls for step in call.of(written)]
        last = products[-1].results[0]
        assert last is not None
        kernel = Step("oxytorch::rms_norm", [x, "none", EPSILON], [written])
        steps.steps += [kernel, *products, *after(last)]
        steps.outputs = [last]
    steps.steps.append(Step("oxytorch::rms_norm", [x, "none", EPSILON], [Value()]))
    program = steps.program()
    return lambda given: program([given])[0][0]


def turns_of(nbytes: int) -> int:
    """How often products with weights of so many bytes are computed until no cache holds the
    first."""
    cached = min(torch.get_num_threads() * OF_ONE_CACHE, OF_CACHES)
    return min(MOST_TURNS, max(2, -(-cached // max(nbytes, 1))))


def fuse(editor: Editor) -> None:
    """Compute activations and sums in the sweep of the packed layer before them."""
    fuse_after(editor, PACKED, 3, _with_other, is_contiguous)


def fuse_after(
    editor: Editor,
    target: str,
    place: int,
    with_other: Callable[[Step, Value, Value | None], Step | None],
    fits: Callable[[Value | None], bool],
) -> None:
    """Join steps of one kind with the activation, or the sum, that alone takes their result.

    place: of the first of the three arguments that tell the activation.
    with_other: the step that adds a value, and makes a result; None if it cannot.
    fits: whether a result may lie in memory as that of such a step.
    """
    for step in editor.steps.steps:
        if step.target != target or editor.is_changed(step):
            continue
        (result,) = step.results
        taker = None if result is None else editor.only_taker(result)
        if taker is None or result is None:
            editor.leave(step, "its result is returned, or taken by several steps")
            continue
        if editor.is_changed(taker):
            continue
        if not fits(taker.results[0]):
            editor.leave(step, f"{taker.target} after it makes a result in another order")
            continue
        found, other = activation(taker), other_of_sum(taker, result)
        joined = None
        if found is not None:
            arguments = [*step.arguments[:place], *words(*found), *step.arguments[place + 3 :]]
            joined = Step(target, arguments, taker.results)
        elif other is not None:
            joined = with_other(step, other, taker.results[0])
        if joined is not None:
            editor.replace(step)
            editor.replace(taker, joined)
        else:
            editor.leave(step, f"{taker.target} after it is no activation or sum that can join it")
    editor.apply()


def _with_other(step: Step, other: Value, result: Value | None) -> Step | None:
    x, packed, bias = step.arguments[:3]
    return Step(f"{PACKED}.binary", [x, other, packed, bias, '"add"'], [result])
