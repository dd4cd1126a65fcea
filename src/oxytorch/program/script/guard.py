"""A graph that runs the changed one for calls of the form that it was made for, and the original
one for all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._sympy.printers import PythonPrinter

from ...graph.errors import CaptureError
from ..numbered import number_of
from .metas import Metas, order_of


def condition(inputs: Sequence[Any], samples: Sequence[Any], metas: Metas) -> Any:
    """The graph of a function of the inputs which tells whether the changed graph may run.

    inputs: of the graph, without the module.
    samples: what each was taken to be.
    metas: what was found for them; it is not to be asked for more afterwards.

    Raises CaptureError where TorchScript cannot compute it.
    """
    names = [f"x{place}" for place in range(len(inputs))]
    pairs = zip(names, inputs, strict=True)
    lines = [
        f"def holds({', '.join(f'{n}: {v.type().annotation_str}' for n, v in pairs)}) -> bool:"
    ]
    if not any(isinstance(sample, Tensor) and order_of(sample) is not None for sample in samples):
        raise CaptureError("nothing is known of its inputs, which are no tensors")
    for place, (name, value, sample) in enumerate(zip(names, inputs, samples, strict=True)):
        lines += _of_input(name, value, sample, _fixed(metas, value, place))
    sizes = {str(s): f"t{place}.size({dim})" for s, place, dim in metas.symbols}
    asked = [each.expr for each in metas.shapes.guards]
    used = {str(symbol) for each in asked for symbol in each.free_symbols}
    if not used <= {*sizes}:
        raise CaptureError("its sizes depend on values")
    lines += [f"    {name} = {sizes[name]}" for name in sorted(used)]
    texts = dict.fromkeys(PythonPrinter().doprint(each) for each in asked)
    lines.append(f"    return {' and '.join(texts) or 'True'}")
    try:
        unit = torch.jit.CompilationUnit("\n".join([*lines, ""]))
    except RuntimeError as error:
        raise CaptureError(f"its sizes have to fulfil {', '.join(texts)}") from error
    return unit.holds.graph


def _fixed(metas: Metas, value: Any, place: int) -> dict[int, int]:
    """The sizes of an input that may not vary, by dimension."""
    meta = metas.of(value)
    if not isinstance(meta, Tensor):
        return {}
    varying = {dim for _, other, dim in metas.symbols if other == place}
    return {d: int(size) for d, size in enumerate(meta.shape) if d not in varying}


def _of_input(name: str, value: Any, sample: Any, fixed: dict[int, int]) -> list[str]:
    """The lines that look at one input."""
    if sample is None:
        return [f"    if {name} is not None:", "        return False"]
    if not isinstance(sample, Tensor):
        return []
    order = order_of(sample)
    if order is None:
        return []
    own = "t" + name[1:]
    lines = [f"    {own} = {name}"]
    if value.type().kind() == "OptionalType":
        lines = [f"    if {name} is None:", "        return False"]
        lines.append(f"    {own} = torch.jit._unwrap_optional({name})")
    sizes = [fixed.get(dim, -1) for dim in range(sample.dim())]
    form = f"{own}, {number_of(sample.dtype)}, {sizes or 'torch.jit.annotate(List[int], [])'}"
    call = f"torch.ops.oxytorch.fits({form}, {number_of(order)})"
    return [*lines, f"    if not {call} or {own}.requires_grad:", "        return False"]


def branch(graph: Any, changed: Any, holds: Any) -> None:
    """Have a graph run another one of the same inputs where a function of them says so."""
    own, before = graph.copy(), [*graph.nodes()]
    module, *inputs = graph.inputs()
    graph.setInsertPoint(before[0] if before else graph.return_node())
    (found,) = graph.insertGraph(holds, inputs)
    chosen = graph.create("prim::If", [found], len([*graph.outputs()]))
    chosen = graph.insertNode(chosen)
    for each in (changed, own):
        block = chosen.addBlock()
        graph.setInsertPoint(block)
        for value in graph.insertGraph(each, [module, *inputs]):
            block.registerOutput(value)
    pairs = zip([*graph.outputs()], [*chosen.outputs()], strict=True)
    for place, (output, ours) in enumerate(pairs):
        ours.setType(output.type())
        graph.return_node().replaceInput(place, ours)
    for node in reversed(before):
        node.destroy()
    graph.lint()
