"""What makes a program faster: a list of passes over its steps.

Weights are packed and normalizations folded by steps that depend on lasting values alone; `split`
takes these out into a program of their own, which runs once and again after a write to them.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from ...graph.errors import CaptureError
from ..program import Steps, Value
from . import (
    compared,
    convolution,
    joined,
    linear,
    norms,
    own_convolutions,
    panels,
    pooling,
    qdq,
    qdq_layers,
    quantized,
    recurrent,
    smoothing,
)
from .attention import attention
from .compared import Compared
from .editor import Editor, Note, Pass
from .embeddings import embedding_bags, merged_bags
from .formulas import activations, with_numbers
from .places import Place, places_of
from .post_ops import in_place
from .quantized_layers import Quantization
from .shuffles import shuffles
from .simplify import escaping, simplify
from .softmaxes import softmaxes
from .spellings import spellings
from .written_attention import written_attention

_log = logging.getLogger(__name__)

_FAILS = "it fails"

ALWAYS: tuple[Pass, ...] = (
    spellings,
    linear.as_linear,
    simplify,
    activations,
    linear.activations_before_views,
    shuffles,
    embedding_bags,
    merged_bags,
    attention,
    written_attention,
    softmaxes,
    norms.layer_norms,
    norms.rms_norms,
    norms.gates,
    norms.sums_before_norms,
    simplify,
)
"""Passes that hold for all weights."""
FOLDS: tuple[Pass, ...] = (convolution.fold_pads, convolution.fold_norms)
CONVOLUTIONS: tuple[Pass, ...] = (
    own_convolutions.fastest_own,
    panels.fuse,
    convolution.pack,
    convolution.fuse,
    pooling.pools,
    pooling.factors_of_channels,
)
WITH_LASTING: tuple[Pass, ...] = (
    recurrent.pack,
    joined.linear_layers,
    panels.fastest_in_panels,
    panels.fuse,
    linear.pack,
    linear.fuse,
    with_numbers,
    in_place,
)
STORABLE_CONVOLUTIONS: tuple[Pass, ...] = (
    own_convolutions.own,
    panels.fuse,
    convolution.channels_last,
)
STORABLE: tuple[Pass, ...] = (
    joined.storable_linear_layers,
    panels.to_panels,
    panels.fuse,
    with_numbers,
    in_place,
)
"""The same where packed weights have to be plain tensors, which files can hold."""
BY_OTHER_COMPILERS: tuple[Pass, ...] = (shuffles, with_numbers)
"""Passes that join what other compilers join, too."""


def improve(
    steps: Steps,
    lasting: Iterable[Value],
    storable: bool = False,
    layouts: bool = True,
    quantization: Quantization | None = None,
    known: Mapping[Value, Tensor] | None = None,
    handed_on: bool = False,
) -> list[Note]:
    """Change the steps of a program so that it runs faster; return what was done and left.

    lasting: inputs that are the same tensors at each call, and seldom written to.
    storable: whether packed weights have to be plain tensors.
    layouts: whether convolutions may be given another order in memory.
    quantization: which layers multiply bytes.
    known: the tensors of lasting inputs that nobody writes to.
    handed_on: whether another compiler takes the steps, which joins what is computed or moved
        element by element.

    A pass that fails, such as where a kernel that it times does, is left out, as the log and
    `left_out` tell; one that quantizes raises CaptureError.
    """
    if steps.has_effect:
        return []
    lasting = [*lasting]
    before = steps.copy()
    failed: dict[str, list[Note]] = {}
    left = {name_of(each) for each in BY_OTHER_COMPILERS} if handed_on else set()
    while True:
        editor = Editor(steps, lasting, known)
        try:
            _run_all(editor, storable, layouts, quantization, left.union(failed))
        except RuntimeError as error:
            if editor.by in failed:  # it is not that pass
                raise
            _log.info(
                "a program of %d steps is made without %s: %s", len(before.steps), editor.by, error
            )
            why = f"{_FAILS}: {error}"
            failed[editor.by] = [Note(editor.by, step, why=why) for step in before.steps]
            vars(steps).update(vars(before.copy()))
        else:
            return [*chain(*failed.values()), *editor.notes]


def _run_all(
    editor: Editor,
    storable: bool,
    layouts: bool,
    quantization: Quantization | None,
    left: Container[str],
) -> None:
    """Run the passes but for some, by name."""

    def run(*passes: Pass) -> None:
        _run(editor, [each for each in passes if name_of(each) not in left])

    run(qdq.spelled)
    follows = layouts and convolution.can_follow_order(editor)
    if layouts and not follows:
        convolution.leave_all(editor)
    run(*ALWAYS, qdq_layers.layers if follows else qdq_layers.linear_layers, qdq.rest)
    if follows:
        run(*FOLDS)
    if quantization is not None:
        try:
            _quantize(editor, quantization)
        except RuntimeError as error:
            raise CaptureError(f"its layers cannot be quantized: {error}") from error
    if follows:
        run(*(STORABLE_CONVOLUTIONS if storable else CONVOLUTIONS))
    run(*(STORABLE if storable else WITH_LASTING))


def left_out(notes: Sequence[Note]) -> list[str]:
    """The passes that failed, and why, by the notes of `improve`."""
    return [*dict.fromkeys(f"{n.by}: {n.why}" for n in notes if n.why.startswith(_FAILS))]


def _quantize(editor: Editor, quantization: Quantization) -> None:
    editor.by = "smoothing.smooth"
    quantization = smoothing.smooth(editor, quantization)
    editor.by = "quantized.quantize"
    quantized.quantize(editor, quantization)
    editor.by = "recurrent.quantize"
    recurrent.quantize(editor, quantization)


@dataclass(frozen=True)
class Points:
    """values: those whose ranges decide which bytes layers multiply, by name.
    left: why other layers cannot multiply any, by name.
    groups: the layers by what they take.
    by_rows: layers whose rows each get a range of their own in any case.
    shared: values that had better become bytes of one range, by name.
    """

    values: dict[str, Value]
    left: dict[str, str]
    groups: list[smoothing.Group]
    by_rows: list[str]
    shared: list[tuple[str, ...]]


def points(steps: Steps, lasting: Iterable[Value], names: Mapping[Value, str]) -> Points:
    """Change steps by the passes that hold for all weights, and find what layers take.

    names: of the values that stand for parameters.
    """
    editor = as_calibrated(steps, lasting)
    values, left = quantized.points_of(editor, names), quantized.left(editor, names)
    by_rows: dict[str, str] = {}
    for _, name, why in recurrent.layers_of(editor, names):
        by_rows[name] = by_rows.get(name) or why  # of all layers and directions of a module
    left |= {name: why for name, why in by_rows.items() if why}
    groups = smoothing.groups_of(editor, names)
    rows = [name for name, why in by_rows.items() if not why]
    return Points(values, left, groups, rows, quantized.shared_points(editor, names))


def compared_layers(
    steps: Steps, lasting: Iterable[Value], quantization: Quantization
) -> dict[str, Compared]:
    """Change steps so that layers are also computed as `quantization` says, each of them with what
    the others give in floating point; return the errors and the work of all layers, by name."""
    editor = as_calibrated(steps, lasting)
    return compared.compare(editor, smoothing.smooth(editor, quantization))


def as_calibrated(steps: Steps, lasting: Iterable[Value]) -> Editor:
    """An editor of steps, after the passes that hold for all weights."""
    editor = Editor(steps, lasting)
    _run(editor, ALWAYS + (FOLDS if convolution.can_follow_order(editor) else ()))
    return editor


def places(
    steps: Steps, lasting: Iterable[Value], names: Mapping[Value, str]
) -> tuple[dict[str, Place], dict[str, str]]:
    """How layers that can multiply bytes are computed with what stands around them, by name; and
    why others cannot. names: of the values that stand for parameters and buffers."""
    return places_of(steps, lasting, names, (qdq.spelled, *ALWAYS), FOLDS)


def _run(editor: Editor, passes: Iterable[Pass]) -> None:
    for each in passes:
        editor.by = name_of(each)
        each(editor)


def name_of(each: Pass) -> str:
    """A pass as it is called in reports: linear.pack."""
    return f"{each.__module__.rpartition('.')[2]}.{each.__name__}"


def split(steps: Steps, lasting: Iterable[Value]) -> tuple[Steps, list[Value]]:
    """Take out what depends on lasting values alone.

    Returns a program of these inputs and constants, and the values that it makes; they become
    further inputs of `steps`, whose inputs that nobody takes are dropped.
    """
    lasting = [*lasting]
    editor = Editor(steps, lasting)
    returned = escaping(editor)  # users may write to it, so it is made at each call as well
    taken_out = [step for step in steps.steps if editor.lasts(step)]
    rest = [s for s in steps.steps if not editor.lasts(s) or returned & {*s.results}]
    made, again = ({v for s in each for v in s.results if v} for each in (taken_out, rest))
    needed = {value for step in rest for value in step.taken} | {*steps.outputs}
    derived = [value for value in editor.maker if value in made & needed - again]
    before = Steps(lasting, {**steps.constants}, taken_out, derived)
    before.drop_unused()
    used = {value for step in before.steps for value in step.taken}
    before.inputs = [value for value in lasting if value in used]
    steps.inputs = [v for v in steps.inputs if v.is_size or v in needed] + derived
    steps.steps = rest
    steps.drop_unused()
    return before, derived
