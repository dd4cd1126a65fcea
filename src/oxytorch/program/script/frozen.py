"""Modules of TorchScript: which may be optimized, frozen copies, and the report that they carry."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.jit import ScriptModule
from torch.jit._freeze import run_frozen_optimizations
from torch.jit._recursive import wrap_cpp_module

from ...rewriting.report import Entry, Report

REPORT = "oxytorch_report"
"""An attribute of the result, which files keep."""


def check(module: ScriptModule) -> None:
    """Raise ValueError for a module in training mode, without a forward or optimized before."""
    if not module._c._has_method("forward"):
        raise ValueError(
            "optimize: expected a module with a forward, got one of TorchScript without"
        )
    parts: list[Any] = [*module.modules()]
    if any(each._c.hasattr("training") and each.training for each in parts):
        raise ValueError(
            "optimize: expected model in evaluation mode, got a module of TorchScript in training "
            "mode; call eval() on it first, or script or trace it in evaluation mode"
        )
    own = next((kind for kind in _kinds(module.graph) if kind.startswith("oxytorch::")), None)
    if own is not None or module._c.hasattr(REPORT):
        found = "one that was" if own is None else f"one that calls {own}"
        raise ValueError(
            "optimize: expected a module of TorchScript that is not optimized yet, got "
            f"{found}; optimize the original"
        )


def _kinds(block: Any) -> Iterator[str]:
    """The kinds of all nodes of a graph or block."""
    for node in block.nodes():
        yield node.kind()
        for each in node.blocks():
            yield from _kinds(each)


def frozen(module: ScriptModule) -> ScriptModule:
    """A copy whose weights are constants of its graph, with all methods, and with the attributes
    of a module that is frozen already. Raises ValueError where torch cannot freeze it."""
    is_frozen = not module._c.hasattr("training")
    kept = other_methods(module)
    if is_frozen:
        kind: Any = torch._C.ConcreteModuleType.from_jit_type(module._c._type())
        kept += [*kind.get_attributes()]
    try:
        found = _wrapped(torch._C._freeze_module(module._c, kept))
        if not is_frozen:
            run_frozen_optimizations(found)
    except RuntimeError as error:
        raise ValueError(f"optimize: torch.jit.freeze cannot freeze the module: {error}") from error
    return found


def _wrapped(module: Any) -> ScriptModule:
    """A module of C++ as one of Python."""
    found: ScriptModule = wrap_cpp_module(module)  # type: ignore[no-untyped-call]
    return found


def arguments(module: ScriptModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The value for each input of forward in a call.

    Raises ValueError where they do not fit.
    """
    forward: Any = module.forward
    _, *wanted = forward.schema.arguments
    names = [each.name for each in wanted]
    surplus = [name for name in kwargs if name not in names]
    if surplus or len(args) > len(names):
        raise ValueError(
            f"optimize: expected a sample_input for forward({', '.join(names)}), got "
            f"{surplus[0] if surplus else f'{len(args)} arguments'}"
        )
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for each in wanted:
        if each.name not in given and not each.has_default_value():
            raise ValueError(
                f"optimize: expected a sample_input for forward({', '.join(names)}), got none "
                f"for {each.name}"
            )
    return [given.get(each.name, each.default_value) for each in wanted]


def with_report(module: ScriptModule, report: Report) -> ScriptModule:
    """A module that carries a report from now on, in files too."""
    module._c._register_attribute(REPORT, torch._C.StringType.get(), json.dumps(asdict(report)))
    return _wrapped(module._c)  # which reads its attributes again


def report_of(module: ScriptModule) -> Report | None:
    """The report of a module that was optimized, in this process or another."""
    if not module._c.hasattr(REPORT):
        return None
    found = json.loads(module._c.getattr(REPORT))
    return Report(**{**found, "entries": [Entry(**each) for each in found["entries"]]})


def other_methods(module: ScriptModule) -> list[str]:
    """The methods of a module besides forward."""
    return [name for name in module._c._method_names() if name != "forward"]
