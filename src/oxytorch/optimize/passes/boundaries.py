"""What converted modules and others are given, so that the whole runs as a converted model does.

In a stock model that was converted as a whole all tensors have one dtype. Here normalizations, some
layers and vectors keep theirs; each returns the dtype that it was given, and the model converts
what it is called with. Whether it then runs is tried on the sample input, before anything is
changed; what does not run keeps its dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...core.interruption import pass_on_interruption
from ...graph.boundary import Boundary, BoundaryForward, dtype_of
from ...graph.record import name_of
from ...rewriting.changes import forwards_set
from ..context import OptimizeContext
from ..text_models import core_dtype, core_of
from . import cast, precision, whole
from .kernels import NormForward

VECTOR = 1
"""Dimensions of tensors that keep their dtype where a model runs so: they are often positions,
frequencies or statistics."""


def prepare(context: OptimizeContext) -> None:
    """Decide which modules are converted, and what all are given."""
    whole.choose(context)
    precision.choose(context)
    _leave_shared(context)
    context.boundaries = _boundaries(context)
    _warn_of_infinities(context)
    if not context.tries_later:
        try_out(context)


def _warn_of_infinities(context: OptimizeContext) -> None:
    """Say which inputs of the sample become infinite: masks above all, which then give NaN."""
    boundary = context.boundaries.get(context.model)
    takes = None if boundary is None else boundary.takes
    if context.sample is None or takes is None:
        return
    named = {f"argument {i}": value for i, value in enumerate(context.sample.args)}
    for name, value in {**named, **context.sample.kwargs}.items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        if value.layout != torch.strided:
            continue
        if torch.equal(value.isinf(), value.to(takes).isinf()):
            continue
        warnings.warn(
            f"optimize: {name} has finite values that are infinite in {takes}, and rows of a mask "
            f"that are all so give NaN; fill masks with torch.finfo({takes}).min",
            stacklevel=2,
        )


def wanted(context: OptimizeContext) -> dict[str, torch.dtype]:
    """The dtypes that modules are to get, by path."""
    return {context.paths[module]: dtype for module, dtype in context.dtype_of.items()}


def try_out(context: OptimizeContext) -> bool:
    """Run the model in its new dtypes, and leave what fails in its own; whether nothing did."""
    if context.sample is None or context.runs_with == wanted(context):
        return True
    if not cast.converted_modules(context):
        return True
    error = _error(context)
    if error is None:
        context.runs_with = wanted(context)
        return True
    context.converts_vectors = True
    context.boundaries = _boundaries(context)
    if _error(context) is None:
        return False
    context.converts_vectors = False
    while error is not None and context.dtype_of:
        _leave_failing(context, error)
        context.boundaries = _boundaries(context)
        error = _error(context)
    return False


def settle(context: OptimizeContext) -> None:
    """Put boundaries around modules, once, after all passes that change them."""
    for module in context.paths:
        boundary = context.boundaries.pop(module, None)
        forward = module.__dict__.get("forward")
        if boundary is None:
            continue
        if isinstance(forward, NormForward) and boundary.takes is None:
            forward.gives_back = True
            continue
        context.log.set_forward(module, BoundaryForward(module, boundary))
        if boundary == Boundary(explains=boundary.explains):
            continue
        does = "returns the dtype that it is given"
        if boundary.takes is not None:
            does = f"inputs to {cast.short_name(boundary.takes)}"
        context.applied("cast", module, f"{type(module).__name__}: {does}")


def _boundaries(context: OptimizeContext) -> dict[nn.Module, Boundary]:
    converted = {*cast.converted_modules(context)}
    if not converted:
        return _unconverted(context)
    parts = (part for root in converted for part in root.modules())
    changed = {m: context.dtype_of[m] for m in parts if m in context.dtype_of and m._parameters}
    nearest = _Nearest(context, changed)
    found: dict[nn.Module, Boundary] = {}
    for module in (*context.open_modules(), *context.patched, *context.closed_roots):
        boundary = _boundary(context, module, module in converted)
        if boundary is not None and boundary.returns is not None:
            boundary = replace(boundary, beside=nearest(module, boundary.returns))
        elif boundary is not None:
            boundary = _following(boundary, module, nearest)
        if boundary is not None:
            found[module] = boundary
    explained = context.model not in converted or context.model in found
    if explained and not isinstance(context.model, torch.jit.ScriptModule):
        explains = min((context.dtype_of[m] for m in converted), key=lambda d: d.itemsize)
        found[context.model] = replace(found.get(context.model, Boundary()), explains=explains)
    core, own = core_of(context.model), core_dtype(context.model)
    if core is not None and own is not None:
        found[core] = replace(found.get(core, Boundary()), gives_back=True, otherwise=own)
    return found


def _unconverted(context: OptimizeContext) -> dict[nn.Module, Boundary]:
    """The boundary of a model no layer of which is converted, though a dtype is asked for all: it
    and its layers convert what they are given to their own."""
    model = context.model
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(dtypes) != 1 or isinstance(model, torch.jit.ScriptModule):
        return {}
    if context.dtype in (None, *dtypes):
        return {}
    (own,) = dtypes
    layers = dict.fromkeys(context.slower, Boundary(own, returns=own))
    wholes: set[nn.Module] = {m for m in context.closed_roots if isinstance(m, whole.ATTENTION)}
    wholes |= {m for m in context.open_modules() if type(m) in whole.RECURRENT}
    wholes -= context.patched
    boundary = Boundary(own, gives_back=True)
    nearest = _Nearest(context, {})
    taken = {m: _following(boundary, m, nearest) for m in wholes if dtype_of(m) is own}
    return {model: boundary, **taken, **layers}


class _Nearest:
    """Finds the converted module that stands nearest to another one in the tree of modules.

    changed: the modules whose parameters are converted, and to which dtype.
    """

    def __init__(self, context: OptimizeContext, changed: dict[nn.Module, torch.dtype]) -> None:
        self._paths = context.paths
        self.changed = changed
        self._first: dict[tuple[str, torch.dtype], nn.Module] = {}
        in_order = (m for m in context.paths if m in changed)
        for module in in_order:
            for prefix in _prefixes(context.paths[module]):
                self._first.setdefault((prefix, changed[module]), module)

    def __call__(self, module: nn.Module, dtype: torch.dtype) -> nn.Module | None:
        """The first module converted to a dtype in the smallest subtree that holds both."""
        keys = ((prefix, dtype) for prefix in _prefixes(self._paths[module]))
        return next((self._first[key] for key in keys if key in self._first), None)


def _prefixes(path: str) -> Iterator[str]:
    """A module's path, and those of the modules that hold it, up to the model's empty one."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _following(boundary: Boundary, module: nn.Module, nearest: _Nearest) -> Boundary:
    """The boundary, with a module beside that tells when the user has converted the model."""
    if boundary.takes is None:
        return boundary
    own = (
        part
        for part in module.modules()
        if not isinstance(part, torch.jit.ScriptModule)
        and boundary.takes
        is (nearest.changed.get(part) or _dtype_of_parameters(part, recurse=False))
    )
    beside = next(own, None) or nearest(module, boundary.takes)
    return replace(boundary, beside=beside)


def _boundary(context: OptimizeContext, module: nn.Module, converts: bool) -> Boundary | None:
    """What a module of a model, part of which is converted, is given and gives."""
    if isinstance(module, ParametrizationList):
        return None
    is_patched = module in context.patched
    is_whole = (module in context.closed and not is_patched) or module in context.kept
    if converts and is_whole:
        return Boundary(context.dtype_of[module])
    own = _dtype_of_parameters(module, is_whole)
    if is_whole or (is_patched and own is not None):
        return Boundary(own, gives_back=True)
    is_layer = cast.is_layer(context, module)
    if module in context.slower:
        return Boundary(own, returns=context.slower[module])
    rule = context.rule(module)
    if own is not None and is_layer:
        if converts or type(module) in cast.TAKE_ANY:
            return None  # it converts its input itself, or takes any
        if type(module) is nn.RMSNorm:
            return Boundary(gives_back=rule is None)
        if context.is_mixed(own):
            return Boundary(own, gives_back=rule is None, agrees=cast.is_made(module))
        return None
    if own is not None and not converts and context.recognizer.norm(module) is not None:
        return Boundary(gives_back=True)
    if rule is not None and (own is None or not is_layer):
        least = 0 if context.converts_vectors else VECTOR + 1
        return Boundary(rule, least_dims=least)
    if own is None and cast.keeps_vectors(context, module) and not [*module.children()]:
        return Boundary(gives_back=True, otherwise=context.dtype)
    return None


def _dtype_of_parameters(module: nn.Module, recurse: bool) -> torch.dtype | None:
    found: list[torch.Tensor] = [*module.parameters(recurse)]
    if cast.is_torchs(module):  # code may have put a plain tensor in a parameter's place
        found += [t for t in module.__dict__.values() if isinstance(t, torch.Tensor)]
    return next((p.dtype for p in found if p.is_floating_point()), None)


def _leave_shared(context: OptimizeContext) -> None:
    """Leave modules that share a parameter with one that gets another dtype, or stays."""
    while True:
        shared = {
            module: owner
            for module in cast.converted_modules(context)
            for owner in [_other_owner(context, module)]
            if owner is not None
        }
        if not shared:
            return
        for module, owner in shared.items():
            context.skipped("cast", module, f"shares its weight with {owner}, which is not cast")
            parts = module.modules() if module in context.closed else (module,)
            context.leave_dtype({*parts})


def _other_owner(context: OptimizeContext, module: nn.Module) -> str | None:
    dtype = context.dtype_of[module]
    for parameter in module.parameters(recurse=module in context.closed):
        if not parameter.is_floating_point():
            continue
        for owner, _ in context.owners.get(id(parameter), []):
            if context.dtype_of.get(owner) != dtype:
                return context.paths[owner]
    return None


def _leave_failing(context: OptimizeContext, error: Exception) -> None:
    """Leave the module whose code raised an error, and others of its class, in their dtype."""
    failing = context.model
    trace = error.__traceback__
    while trace is not None:
        names = trace.tb_frame.f_code.co_varnames
        module = trace.tb_frame.f_locals.get(names[0]) if names else None
        if isinstance(module, nn.Module) and module in context.paths:
            failing = module
        trace = trace.tb_next
    while failing in context.kept or failing in context.closed - context.patched:
        path = context.paths[failing].rpartition(".")[0]
        failing = next(m for m, p in context.paths.items() if p == path)
    alike = [m for m in context.paths if type(m) is type(failing) and not cast.is_torchs(m)]
    message = str(error).strip().partition("\n")[0]
    for module in {failing: None, **dict.fromkeys(alike)}:
        context.keep_dtype(module)
        reason = f"keeps its dtype: its code fails else ({type(error).__name__}: {message})"
        context.skipped("cast", module, reason)
    _leave_shared(context)


def _error(context: OptimizeContext) -> Exception | None:
    """What a run of the model raises whose tensors have the dtypes that they are to get."""
    sample = context.sample
    assert sample is not None
    try:
        with sample.running(context.model), torch.no_grad(), _as_converted(context):
            sample.given_to(context.model)
    except Exception as error:  # whatever the model's code says to tensors of another dtype
        pass_on_interruption(error)
        return error
    return None


@contextmanager
def _as_converted(context: OptimizeContext) -> Iterator[None]:
    """While the model runs as if its tensors had the dtypes that they are to get."""
    tensors = [*context.model.parameters(), *context.model.buffers()]
    with _within(context), _AsConverted(_table(context)):
        yield
    del tensors  # which kept their identities valid where code replaces a buffer


def _table(context: OptimizeContext) -> dict[int, torch.dtype]:
    """The dtype that each tensor of the model is to get, by its identity."""
    found: dict[int, torch.dtype] = {}
    for module in cast.changed(context):
        dtype = context.dtype_of.get(module)
        for parameter in module._parameters.values():
            if dtype is not None and parameter is not None and parameter.is_floating_point():
                found[id(parameter)] = dtype
        for name, wanted in cast.buffers(context, module):
            found[id(module._buffers[name])] = wanted
    return found


@contextmanager
def _within(context: OptimizeContext) -> Iterator[None]:
    """While all modules have their boundaries; converted layers take the dtype that they get."""
    boundaries = {m: replace(each, explains=None) for m, each in context.boundaries.items()}
    for module in cast.converted_modules(context):
        if module not in boundaries and cast.takes_input(context, module):
            boundaries[module] = Boundary(context.dtype_of[module])
    with forwards_set({m: BoundaryForward(m, each) for m, each in boundaries.items()}):
        yield


class _AsConverted(TorchFunctionMode):
    """Gives every function the model's tensors in other dtypes, without converting them all."""

    def __init__(self, dtypes: dict[int, torch.dtype]) -> None:
        super().__init__()
        self._dtypes = dtypes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if name_of(func) == "grad":  # that of the parameter itself
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map(self._seen, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _seen(self, leaf: Any) -> Any:
        dtype = self._dtypes.get(id(leaf))
        return leaf if dtype is None else leaf.to(dtype)
