"""`optimize` makes a model faster, `explain` reports what was done, `undo` restores the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.optim.optimizer import Optimizer
from torch.utils import _pytree as pytree

from .. import _garbage
from ..core.modes import with_normal_tensors
from ..graph.state import random_unmoved
from ..program.call_report import call_report
from ..program.model import ProgramModel
from ..rewriting import predecessor
from ..rewriting.changes import ATTRIBUTE, QUANTIZED, ChangeLog, log_of
from ..rewriting.copies import InPlace, Separation, copied
from ..rewriting.driver import run_passes
from ..rewriting.measure import learning, steady_heap
from ..rewriting.memory import nbytes
from ..rewriting.predecessor import leads_on
from ..rewriting.refusals import (
    check_dtype_keys,
    check_evaluation,
    check_has_sizes,
    check_module,
    check_not_optimized,
    names_in,
)
from ..rewriting.report import Entry, Report
from . import later
from .context import OptimizeContext, observe
from .passes import DEFAULT, PASSES, boundaries, program, rewrite
from .passes.cast import dtypes, made_for
from .sample import SampleInput
from .text_models import dtype_rules, evaluating, features_sample, is_text_model
from .tune import Request, choose, keep_fastest

_Model = TypeVar("_Model", bound=nn.Module)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@overload
def optimize(
    model: _Model,
    *,
    optimizer: None = None,
    dtype: torch.dtype | Mapping[Any, torch.dtype] | None = None,
    sample_input: Any = None,
    graph: bool | None = None,
    inplace: bool = False,
    verify: bool = False,
    tune: bool = False,
    passes: Iterable[str] | None = None,
) -> _Model: ...


@overload
def optimize(model: ExportedProgram) -> ProgramModel: ...


@overload
def optimize(
    model: _Model,
    *,
    optimizer: Optimizer,
    dtype: torch.dtype | Mapping[Any, torch.dtype] | None = None,
    inplace: bool = False,
) -> tuple[_Model, Optimizer]: ...


@leads_on("optimize", predecessor.OPTIMIZE | predecessor.OF_ANOTHER)
@with_normal_tensors
def optimize(
    model: _Model | ExportedProgram,
    *,
    optimizer: Optimizer | None = None,
    dtype: torch.dtype | Mapping[Any, torch.dtype] | None = None,
    sample_input: Any = None,
    graph: bool | None = None,
    inplace: bool = False,
    verify: bool = False,
    tune: bool = False,
    passes: Iterable[str] | None = None,
) -> _Model | tuple[_Model, Optimizer] | ProgramModel:
    """Return `model` rewritten for fast inference on this machine's CPU.

    Outputs agree with those of `model` within the tolerances of docs/numerics.md. With `optimizer`,
    both are prepared for training instead, and (model, optimizer) is returned.

    model: in evaluation mode for inference. What cannot be improved is left unchanged. For a
        `torch.export.ExportedProgram`, with no other argument, the result is a program, which
        `oxytorch.save` writes to a file (docs/export.md). For a `torch.jit.ScriptModule`, with no
        other argument than sample_input, it is a frozen one (docs/torchscript.md).
    optimizer: of torch.optim or oxytorch.optim, over parameters of `model`. It becomes oxytorch's
        class of the same name, with fused steps, and keeps its state. With dtype=torch.bfloat16
        layers hold the upper 16 bits of their float32 weights, and each step updates all 32.
        Create learning-rate schedulers from the returned optimizer.
    dtype: torch.bfloat16 or torch.float16: convert weights. Or a mapping from modules to dtypes,
        with keys "" (all layers), paths (a module and all below it) or types, of which the most
        specific wins: {"": torch.bfloat16, "classifier": torch.float32}. None keeps dtypes.
    sample_input: arguments of a call of the model: a tensor, a tuple of positional arguments or a
        mapping of keyword arguments. Without it nothing but a program is fused. For a model of
        sentence-transformers: texts, or what its `preprocess` made of them
        (docs/sentence-transformers.md).
    graph: run the operators of the whole model as one program, fused further, without its Python.
        Without sample_input, programs are made of the calls. If it cannot be recorded, the other
        passes run, or its own code; `explain` says why. None, with `passes` of None: as True for
        models most of whose weights belong to convolutions, where a program is faster.
    inplace: change `model` itself instead of a copy.
    verify: compare the outputs on `sample_input` with the original's, module by module and as a
        whole.
    tune: time the passes on `sample_input` and keep those that win. If none does, the result is
        the model unchanged.
    passes: names from `oxytorch.optimize.PASSES`. None runs the default ones.

    state_dict() of the result has the same keys and plain values in the dtype asked for;
    load_state_dict() packs them again.

    Raises TypeError or ValueError before anything is changed if an argument does not fit, and
    VerificationError, which names the module, if `verify` finds a difference beyond the tolerance.
    """
    if graph is not None and not isinstance(graph, bool):
        raise TypeError(f"optimize: expected graph to be True, False or None, got {graph!r}")
    switches = {"inplace": inplace, "verify": verify, "tune": tune}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"optimize: expected {name} to be True or False, got {value!r}")
    others = {
        "optimizer": optimizer,
        "dtype": dtype,
        "passes": passes,
        "graph": graph or None,
        **{name: value or None for name, value in switches.items()},
    }
    if isinstance(model, torch.jit.ScriptModule):
        return _of_scripted(model, sample_input, others)  # type: ignore[return-value]
    if isinstance(model, ExportedProgram):
        return _of_exported(model, {**others, "sample_input": sample_input})
    if optimizer is not None:
        return _for_training(model, optimizer, {**others, "sample_input": sample_input})
    if passes is not None:
        passes = names_in("optimize", "passes", passes)
    is_text = is_text_model(model)
    _check(model, dtype, passes, trains=not is_text)
    _check_sample(model, sample_input, others)
    if is_text:
        dtype = dtype_rules(model, dtype)
        sample_input = None if sample_input is None else features_sample(model, sample_input)
    sample = None if sample_input is None else SampleInput(sample_input)
    times = learning() if tune else nullcontext()
    mode = evaluating(model) if is_text and not inplace else nullcontext()
    if is_text and inplace:
        model.eval()
    with mode, random_unmoved(), torch.autocast("cpu", enabled=False), steady_heap(), times:
        return _optimized(model, dtype, sample, graph, inplace, verify, tune, passes)


def _for_training(
    model: _Model, optimizer: Optimizer, others: Mapping[str, Any]
) -> tuple[_Model, Optimizer]:
    from .training import optimize_for_training

    check_module("optimize", model)
    for name in ("sample_input", "passes", "graph", "verify", "tune"):
        if others[name] is not None:
            raise ValueError(f"optimize: expected no {name} with an optimizer: it is for inference")
    return optimize_for_training(  # type: ignore[return-value]
        model, optimizer, others["dtype"], bool(others["inplace"])
    )


def _check_sample(model: nn.Module, sample_input: Any, others: Mapping[str, Any]) -> None:
    """Raises where an argument needs a sample, or the model's tensors have no values to run on."""
    for name in ("verify", "tune"):
        if others[name] and sample_input is None:
            raise ValueError(
                f"optimize: {name}=True expected a sample_input to run the model on, got None"
            )
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if sample_input is not None and tensors and all(tensor.is_meta for _, tensor in tensors):
        raise ValueError(
            f"optimize: expected a model whose tensors have values, got {tensors[0][0]} on the "
            "device meta; load the weights first"
        )
    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(sample_input)):
        raise ValueError(
            "optimize: expected a sample_input whose tensors have values, got one on the device "
            "meta; give one on the CPU, such as torch.randn of its shape"
        )


def _of_exported(model: ExportedProgram, others: Mapping[str, Any]) -> ProgramModel:
    from ..program.export import from_exported

    for name, value in others.items():
        if value is not None:
            instead = "; convert the model before it is exported" if name == "dtype" else ""
            raise ValueError(
                "optimize: expected no other argument with an exported program, got "
                f"{name}{instead}"
            )
    return from_exported(model)


def _of_scripted(
    model: torch.jit.ScriptModule, sample_input: Any, others: Mapping[str, Any]
) -> torch.jit.ScriptModule:
    from .scripted import optimize_scripted

    for name, value in others.items():
        if value is not None:
            raise ValueError(
                "optimize: expected no other argument than sample_input with a module of "
                f"TorchScript, got {name}"
            )
    with random_unmoved(), torch.autocast("cpu", enabled=False):
        return optimize_scripted(model, sample_input)


def _optimized(
    model: _Model,
    dtype: Any,
    sample: SampleInput | None,
    graph: bool | None,
    inplace: bool,
    verify: bool,
    tune: bool,
    passes: Iterable[str] | None,
) -> _Model:
    began = time.perf_counter()
    names = tuple(DEFAULT if passes is None else passes)
    is_free = graph is None and passes is None and not tune
    is_program = graph or (is_free and program.suits(model, sample is not None))
    waits = is_free and not is_program and sample is None and program.suits_later(model)
    if is_program:
        names = tuple(dict.fromkeys(("program", *names)))
    must_gain = passes is None and (sample is None or not graph)
    separate = InPlace(model) if inplace else Separation(model)
    result = model if inplace else copied(model)
    tuned = None
    if sample is not None:
        sample.fit(result, {*_asked(dtype)})
    if tune:
        assert sample is not None
        if passes is None:
            names = tuple(PASSES)
        names, tuned = choose(model, dtype, sample, names)
    reference = copied(model) if verify and inplace else model
    try:
        if sample is not None and passes is None and not (tune or inplace):
            request = Request(model, dtype, sample, names, separate, must_gain)
            found, tuned = keep_fastest(request, result)
            result = cast(_Model, found)
        else:
            given = result, dtype, sample, names, separate
            context = optimize_in_place(*given, must_gain=must_gain)
            if waits:
                later.wait(context, dtype)
        report = explain(result)
        report.tuned = tuned
        if verify:
            from .verify import compare

            assert sample is not None
            report.verified = compare(reference, result, sample)
        separate(result)
    except BaseException:
        if inplace and log_of(result) is not None:
            undo(result)
        raise
    report.bytes_after = nbytes(result)
    report.seconds = time.perf_counter() - began
    return result


def _asked(dtype: Any) -> list[torch.dtype]:
    """The dtypes that `dtype` names."""
    if dtype is None:
        return []
    return [*dtype.values()] if isinstance(dtype, Mapping) else [dtype]


def explain(model: nn.Module) -> Report:
    """Return the report of the `optimize` call that made `model`.

    str() of the report gives text, as_dict() data. For a model that runs as a program, its `calls`
    say how the calls so far were run: which sizes are served, and why no others. For a model that
    was only quantized, it is the report of `quantize_`. Raises ValueError if the model was
    neither optimized nor quantized.
    """
    if isinstance(model, torch.jit.ScriptModule):
        return _report_of_scripted(model)
    report = _last_log(model, "explain")[1].report
    waiting = later.waiting_in(model)
    report.calls = call_report(model) if waiting is None else waiting.in_words()
    return report


def undo(model: _Model) -> _Model:
    """Undo in place what `optimize` did to `model`, and return it.

    Restores forwards, dtypes and plain weights. Weights that were converted to a narrower dtype
    keep the values that they had in it. If the model was quantized and then optimized, the first
    call undoes the optimization and the second the quantization. Raises ValueError if there is
    nothing to undo.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "undo: expected a model that optimize changed, got a module of TorchScript, of which "
            "optimize makes a frozen copy; use the module that it was given"
        )
    attribute, log = _last_log(model, "undo")
    later.end_watches(model)
    log.undo()
    delattr(model, attribute)
    return model


def _last_log(model: nn.Module, caller: str) -> tuple[str, ChangeLog]:
    """Return what was done last to a model, and the attribute that holds it."""
    check_module(caller, model)
    for attribute in (ATTRIBUTE, QUANTIZED):
        log = log_of(model, attribute)
        if log is not None:
            return attribute, log
    raise ValueError(
        f"{caller}: expected a model returned by oxytorch.optimize, got a "
        f"{type(model).__name__} that was not optimized"
    )


def _report_of_scripted(model: torch.jit.ScriptModule) -> Report:
    from ..program.script import frozen

    report = frozen.report_of(model)
    if report is None:
        raise ValueError(
            "explain: expected a module that oxytorch.optimize returned, got a module of "
            "TorchScript that was not optimized, or was frozen since"
        )
    return report


def _check(model: nn.Module, dtype: Any, passes: Iterable[str] | None, trains: bool = True) -> None:
    """trains: whether a model in training mode is one that is trained, and so refused."""
    check_module("optimize", model)
    check_not_optimized("optimize", model)
    if trains:
        check_evaluation("optimize", model, ", or give its optimizer to train faster")
    check_has_sizes("optimize", model)
    for value in _asked(dtype):
        if value not in _DTYPES:
            names = ", ".join(str(d) for d in _DTYPES)
            raise ValueError(f"optimize: expected dtype to be one of {names}, got {value!r}")
    if isinstance(dtype, Mapping):
        check_dtype_keys(model, dtype)
    for name in () if passes is None else passes:
        if name not in PASSES:
            raise ValueError(f"optimize: expected passes from {', '.join(PASSES)}, got {name!r}")


def optimize_in_place(
    model: nn.Module,
    dtype: Any,
    sample: SampleInput | None,
    names: tuple[str, ...],
    separate: Separation | InPlace,
    look: Callable[[OptimizeContext], None] = observe,
    runs: tuple[str, ...] | None = None,
    must_gain: bool = False,
) -> OptimizeContext:
    """Run the passes `names` on a model; what is known of it then.

    look: notes what a run of the model on the sample shows.
    runs: those of the passes that are run, which ask what the others would do.
    must_gain: see `OptimizeContext`.
    """
    wanted = {} if dtype is None else dtypes(model, dtype)
    if "cast" not in names:
        wanted = {}
    distinct = sorted({str(d).removeprefix("torch.") for d in wanted.values()})
    report = Report(type(model).__name__, "/".join(distinct) or "dtypes as they are", list(names))
    asked = model, wanted, ChangeLog(report), names, separate
    context = OptimizeContext(*asked, sample=sample, must_gain=must_gain)
    if "cast" not in names and dtype is not None:
        context.log.skipped("cast", "", "not among the passes, so that dtype has no effect")
    elif dtype is not None:
        context.rules = dtype if isinstance(dtype, Mapping) else {"": dtype}
        context.dtype, context.made_for = context.rules.get(""), made_for(model)
    with _garbage.paused():
        run_passes(context, [look, *_steps(names if runs is None else runs)])
    return context


def _steps(names: tuple[str, ...]) -> list[Callable[[OptimizeContext], None]]:
    """What is run for these passes, in order."""
    steps: list[Callable[[OptimizeContext], None]] = [boundaries.prepare]
    for run in dict.fromkeys(run for name, (_, run) in PASSES.items() if name in names):
        steps.append(OptimizeContext.index)
        steps.append(run)
    return [*steps, boundaries.settle, OptimizeContext.finish, rewrite.settle, _name_the_rest]


def _name_the_rest(context: OptimizeContext) -> None:
    """Name the layers that no pass touched."""
    if context.is_program:
        return
    touched = {entry.module for entry in context.log.report.entries}
    fused = context.fused_layers
    absorbed = {folded.norm for folded in context.folds.values()}
    for module, path in context.paths.items():
        if path in touched or module in fused or module in absorbed:
            continue
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.Identity)):
            continue
        if module in context.patched:
            context.skipped("-", module, f"{type(module).__name__}: has a forward of its own")
            continue
        reads_itself = module in context.closed
        if [*module.children()] and not reads_itself:
            continue
        if reads_itself and [*module.children()]:
            context.skipped(
                "-", module, f"{type(module).__name__}: reads its parts' weights itself"
            )
        elif any(True for _ in module.parameters()) and not reads_itself:
            context.skipped("-", module, f"{type(module).__name__}: nothing faster known")


__all__ = ["DEFAULT", "PASSES", "Entry", "Report", "explain", "optimize", "undo"]
