"""Which attention, transformer and recurrent layers get the dtype asked for: those that are faster.

Torch's layers of these kinds compute many steps, some of which are several times faster in bfloat16
and some several times slower, by their size and the machine. So each is timed in both dtypes, on
what the sample shows or on usual inputs, and half of these decide. Attention and transformer layers
read the weights of their parts themselves: all their parameters and buffers get the dtype, as after
`.bfloat16()`.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ...core.converted import Conversion
from ...core.interruption import pass_on_interruption
from ...graph.boundary import Boundary, BoundaryForward
from ...graph.forward import Forward
from ...rewriting.measure import Calls, first_win, numbers
from ..context import OptimizeContext
from . import cast, lstm

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""

ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
CELLS = (nn.GRUCell, nn.LSTMCell, nn.RNNCell)
RECURRENT = (nn.GRU, nn.RNN, nn.LSTM, *CELLS)
USUAL_STEPS = ((1, 16), (1, 64), (4, 16))
"""Batch and length of the inputs of attention that are timed where no sample tells."""
USUAL_SEQUENCES = ((1, 1), (1, 16), (4, 16), (8, 16))
"""The same of recurrent layers."""
USUAL_BATCHES = (1, 4, 16)
"""Rows of the inputs of cells that are timed."""
MOST_FORMS = 4
"""Calls of one layer on the sample that are timed."""


def choose(context: OptimizeContext) -> None:
    """Have the layers converted that are faster so, and the other ones not."""
    wholes = _wholes(context)
    outside = context.closed - {part for root in wholes for part in root.modules()}
    context.leave_dtype({*outside})
    if not context.rules:
        return
    found = {root: _dtype(context, root) for root in wholes}
    found |= {
        module: _dtype(context, module)
        for module in context.open_modules()
        if type(module) in RECURRENT and module not in context.made_for
    }
    candidates = {module: dtype for module, dtype in found.items() if dtype is not None}
    timed = {
        module
        for module in candidates
        if not cast.are_named(context, (part for part in module.modules() if part._parameters))
    }
    calls = _calls(context, timed)
    context.leave_dtype({part for root in wholes for part in root.modules()})
    for module, dtype in candidates.items():
        reason = None
        if module in timed:
            packs = _is_packed(context, module)
            reason = _loss(module, dtype, calls[module] or _usual(module), packs)
        if reason is None:
            parts = dict.fromkeys(module.modules(), dtype)
            context.dtype_of = {**context.dtype_of, **parts}
        else:
            context.leave_dtype({module})
            context.skipped("cast", module, f"{type(module).__name__}: {reason}")


def _wholes(context: OptimizeContext) -> list[nn.Module]:
    return [root for root in context.closed_roots if isinstance(root, ATTENTION)]


def _dtype(context: OptimizeContext, module: nn.Module) -> torch.dtype | None:
    """The one dtype that is asked for a module and all its parts, if they can have it."""
    wanted = set()
    for part in module.modules():
        tensors = [*part._parameters.values(), *part._buffers.values()]
        if (
            isinstance(part, torch.jit.ScriptModule)
            or getattr(part, "running_mean", None) is not None
            or any(isinstance(v, Tensor) and v.is_floating_point() for v in vars(part).values())
        ):
            return None
        if any(t is not None and t.is_floating_point() for t in tensors):
            path = context.paths[part]
            wanted.add(cast.asked(path, part, context.rules) or context.rules.get(""))
    (dtype,) = wanted if len(wanted) == 1 else (None,)
    own = {p.dtype for p in module.parameters() if p.is_floating_point()}
    return dtype if len(own) == 1 and dtype not in own else None


def _is_packed(context: OptimizeContext, module: nn.Module) -> bool:
    """Whether a layer is an LSTM whose weights are packed once they are converted."""
    is_lstm = type(module) is nn.LSTM and "lstm" in context.passes
    return is_lstm and lstm.refusal(context, module) is None  # type: ignore[arg-type]


def _calls(context: OptimizeContext, modules: set[nn.Module]) -> dict[nn.Module, list[Given]]:
    """What modules are called with in a run on the sample, each form once."""
    found: dict[nn.Module, list[Given]] = {module: [] for module in modules}
    if context.sample is None or not modules:
        return found

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        known = [_form(given) for given in found[module]]
        if len(known) < MOST_FORMS and _form((args, kwargs)) not in known:
            found[module].append((args, kwargs))

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
        with context.sample.running(context.model), torch.no_grad():
            context.sample.given_to(context.model)
    return found


def _form(given: Given) -> str:
    """What the time of a call depends on."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return ("packed", tuple(leaf.data.shape), tuple(leaf.batch_sizes.tolist()))
        if not isinstance(leaf, Tensor):
            return leaf
        parts = leaf.unbind() if leaf.is_nested else [leaf]
        return ([tuple(part.shape) for part in parts], leaf.dtype)

    is_leaf = partial(_is_a, PackedSequence)
    return repr([of(leaf) for leaf in pytree.tree_leaves(given, is_leaf=is_leaf)])


def _is_a(kind: type, value: Any) -> bool:
    return isinstance(value, kind)


def _usual(module: Any) -> list[Given]:
    """What a module may be called with."""
    if isinstance(module, CELLS):
        return [((numbers(rows, module.input_size),), {}) for rows in USUAL_BATCHES]
    if isinstance(module, nn.RNNBase):
        return [
            ((_sequence(module.batch_first, batch, count, module.input_size),), {})
            for batch, count in USUAL_SEQUENCES
        ]
    attention = module if isinstance(module, nn.MultiheadAttention) else module.self_attn
    widths = [attention.embed_dim]
    if isinstance(module, nn.MultiheadAttention):
        widths += [attention.kdim, attention.vdim]
    elif isinstance(module, nn.TransformerDecoderLayer):
        widths += [module.multihead_attn.kdim]
    if len({*widths}) == 1 and isinstance(module, nn.MultiheadAttention):  # of itself
        return [
            ((_sequence(attention.batch_first, batch, count, widths[0]),) * len(widths), {})
            for batch, count in USUAL_STEPS
        ]
    return [
        (tuple(_sequence(attention.batch_first, batch, count, width) for width in widths), {})
        for batch, count in USUAL_STEPS
    ]


def _sequence(batch_first: bool, batch: int, count: int, width: int) -> Tensor:
    return numbers(*((batch, count) if batch_first else (count, batch)), width)


def _loss(module: nn.Module, dtype: torch.dtype, given: list[Given], packs: bool) -> str | None:
    """Why a module should not be converted; None where it is faster so among others.

    packs: whether its weights are packed then.
    """
    own = next(p.dtype for p in module.parameters() if p.is_floating_point())
    kept = [
        (name, value)
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, (bool, int, float, str))
    ]
    shapes = [tuple(p.shape) for p in module.parameters()]
    key = (repr(module), repr(kept), repr(shapes), own, dtype, packs, *map(_form, given))
    try:
        pairs = enumerate(_pairs(module, own, dtype, given, packs))
        wins = [first_win((key, number), [pair]) == 0 for number, pair in pairs]
    except Exception as error:  # whatever a layer says of the dtype, or a subclass of our input
        pass_on_interruption(error)
        message = str(error).strip().partition("\n")[0]
        return f"cannot be timed in {cast.short_name(dtype)} ({type(error).__name__}: {message})"
    return None if 2 * sum(wins) >= len(wins) else f"{cast.short_name(own)} is as fast here"


def _pairs(
    module: nn.Module, own: torch.dtype, dtype: torch.dtype, given: list[Given], packs: bool
) -> list[Calls]:
    """The layer in its own dtype and in another one, in which both are given their inputs."""

    @cache  # where such a layer was timed before, no copies are made
    def both() -> tuple[Forward, Forward]:
        made: Any = _bare(module).to(dtype)
        converted = lstm.packed(made) if packs else BoundaryForward(made, Boundary(dtype))
        return BoundaryForward(_bare(module), Boundary(own, gives_back=True)), converted

    def calls(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Calls:
        args, kwargs = Conversion(dtype).arguments(args, kwargs)
        return lambda: both()[0](*args, **kwargs), lambda: both()[1](*args, **kwargs)

    return [calls(*each) for each in given]


def _bare(module: nn.Module) -> nn.Module:
    """A copy without hooks, which would note the calls."""
    made = copy.deepcopy(module)
    for part in made.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    return made
