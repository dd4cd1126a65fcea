"""The passes over programs, on a graph of TorchScript."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..passes import convolution_times, improve, linear, own_convolutions, panels, split
from ..program import Step
from .metas import Metas
from .stretch import Stretch
from .types import operator_of
from .writer import Writer

_STRUCTURES = (
    "prim::Constant",
    "prim::ListConstruct",
    "prim::ListUnpack",
    "prim::TupleConstruct",
    "prim::TupleIndex",
    "prim::TupleUnpack",
    "prim::NumToTensor",
    "prim::dtype",
    "prim::device",
)
"""Nodes that only pass on what they are given."""
_STAY = "prim::If", "prim::Loop"


@dataclass
class Outcome:
    """What passes did to a graph: `applied` counts new calls, `skipped` has operators with why."""

    applied: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)


def rewrite(graph: Any, metas: Metas, layouts: bool) -> Outcome:
    """Change a graph so that it runs faster.

    metas: what is known of its values.

    layouts: whether convolutions may be given another order in memory.
    """
    outcome = Outcome()
    _blocks(graph, graph.block(), graph.alias_db(), metas, layouts, outcome)
    torch._C._jit_pass_dce(graph)
    return outcome


def _blocks(
    graph: Any, block: Any, aliases: Any, metas: Metas, layouts: bool, outcome: Outcome
) -> None:
    found = [*_stretches(block, aliases, outcome)]
    inner = [each for node in block.nodes() for each in node.blocks()]
    for each in inner:
        _blocks(graph, each, aliases, metas, layouts, outcome)
    for nodes, end in found:
        _one(graph, nodes, end, metas, layouts, outcome)


def _stretches(block: Any, aliases: Any, outcome: Outcome) -> Iterator[tuple[list[Any], Any]]:
    """The longest runs of nodes that a pass may change, each with the node after it."""
    run: list[Any] = []
    for node in [*block.nodes(), block.returnNode()]:
        why = _why_not(node, aliases)
        if why is None:
            run.append(node)
            continue
        if node.kind() != "prim::Return":
            outcome.skipped.setdefault(node.kind(), why)
        if any(each.kind() != "prim::Constant" for each in run):
            yield run, node
        run = []


_OF_ORDER = ("aten::view", "aten::_unsafe_view", "aten::as_strided", "aten::set_", "oxytorch::")
"""Begins the operators that ask how their input lies in memory."""


def _why_not(node: Any, aliases: Any) -> str | None:
    """Why a node has to stay where it is, None if it need not."""
    kind = node.kind()
    if kind in _STAY:
        return "stays; what is in it is looked at by itself"
    if kind == "prim::Return" or [*node.blocks()]:
        return "stays"
    if kind not in _STRUCTURES:
        text = node.schema()
        if not kind.startswith(("aten::", "oxytorch::")) or text == "(no schema)":
            return "is no operator"
        if torch._C.parse_schema(text).is_mutable:
            return "writes to a tensor that is used elsewhere"
        if is_random(node):
            return "draws random numbers"
        if not [*node.outputs()] or kind in _WITH_EFFECT:
            return "does more than to give a result"
    values = (*node.inputs(), *node.outputs())
    if kind != "prim::Constant" and any(map(aliases.has_writers, values)):
        return "takes or gives a tensor that is written to"
    return None


def is_random(node: Any) -> bool:
    """Whether a node draws random numbers."""
    if not node.isNondeterministic():
        return False
    func = operator_of(node)
    names = [] if func is None else [each.name for each in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    chance = node.inputsAt(names.index("dropout_p"))
    return chance.node().kind() != "prim::Constant" or bool(chance.toIValue() != 0)


_WITH_EFFECT = ("aten::manual_seed", "aten::set_grad_enabled", "aten::warn", "aten::save")


def _one(
    graph: Any, nodes: Sequence[Any], end: Any, metas: Metas, layouts: bool, outcome: Outcome
) -> None:
    """Run the passes on one stretch, and write it back if they changed it."""
    stretch = Stretch(nodes, metas)
    for kind, why in stretch.why_kept.items():
        outcome.skipped.setdefault(kind, why)
    before = [*stretch.steps.steps]
    layouts = layouts and not any(node.kind().startswith(_OF_ORDER) for node in stretch.kept)
    improve(stretch.steps, (), storable=True, layouts=layouts)
    gained = _gained(before, stretch.steps.steps)
    if not gained:
        return
    _compute_ahead(stretch)
    Writer(graph, stretch, end).write()
    outcome.applied.update(gained)


def _compute_ahead(stretch: Stretch) -> None:
    """Make constants of what depends on constants alone."""
    steps = stretch.steps
    inputs = [*steps.inputs]
    first, derived = split(steps, ())
    if derived:
        made, _ = first.program()([])
        steps.constants |= dict(zip(derived, made, strict=True))
    steps.inputs = inputs


def _gained(before: Sequence[Step], after: Sequence[Step]) -> Counter[str]:
    """The calls that are new, with what they compute."""
    count = Counter(map(_title, after))
    count.subtract(map(_title, before))
    return Counter({name: number for name, number in count.items() if name and number > 0})


_LAYERS = {
    linear.PANELS: "linear",
    own_convolutions.PANELS: "convolution",
    own_convolutions.DEPTHWISE: "depthwise convolution",
}
_STORED = dict.fromkeys((linear.PANELS, own_convolutions.PANELS), ", weight in panels")
_TITLES = {
    "aten::gelu": "gelu",
    "aten::silu": "silu",
    "oxytorch::add_layer_norm": "add + layer_norm",
    "oxytorch::add_rms_norm": "add + rms_norm",
    "oxytorch::pack_panels": "",
    "oxytorch::gelu_mul": "gelu * mul",
    "oxytorch::silu_mul": "silu * mul",
}


def _title(step: Step) -> str:
    """What a call computes, for calls that passes make; else nothing."""
    if step.target in panels.SWEEPS:
        epilogue = step.arguments[panels.SWEEPS[step.target][1]].strip('"')
        after = "" if epilogue == "none" else f" + {epilogue}"
        return f"{_LAYERS[step.target]}{after}{_STORED.get(step.target, '')}"
    if step.target == convolution_times.CONVOLUTION:
        weight = step.arguments[1].meta
        is_plain = weight is None or weight.is_contiguous()
        return "" if is_plain else "convolution, channels last"
    namespace, _, name = step.target.partition("::")
    own = name if namespace == "oxytorch" else ""
    if namespace == "aten" and name.endswith("_"):
        own = f"{name[:-1]} in place"
    return _TITLES.get(step.target, own)
