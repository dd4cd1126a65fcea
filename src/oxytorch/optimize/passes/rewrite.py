"""Passes `dropout`, `fold` and `fuse`: replace patterns in the graphs of the model's modules.

From the top down: a module whose own code takes part in a pattern gets a region; where it takes no
part, or cannot be captured, its children are looked at.
"""

from __future__ import annotations

from torch import nn

from ...graph.capture import Capture, CallForm, CaptureError, Capturer
from ...graph.patterns import Rewrite
from ...graph.region import Region, Variant
from ..context import Context


def run(context: Context) -> None:
    capturer = Capturer(
        lambda m: m in context.closed or context.recognizer.keeps_whole(m)
    )
    seen: set[nn.Module] = set()
    _visit(context, capturer, context.model, seen)
    if "dropout" in context.passes:
        for module in context.open_modules():
            if type(module) in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d):
                context.set_forward(module, Passing(module))
                context.did("dropout", module, "removed in evaluation mode")


class Passing:
    """A dropout layer that costs one call: its input in evaluation mode."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: object) -> object:
        if self.module.training:
            return type(self.module).forward(self.module, x)
        return x


def _visit(
    context: Context, capturer: Capturer, module: nn.Module, seen: set[nn.Module]
) -> None:
    if module in seen or module in context.closed:
        return
    seen.add(module)
    if not [*module.children()]:
        return
    rewrites = _rewrites(context, capturer, module)
    if not rewrites:
        for child in module.children():
            _visit(context, capturer, child, seen)
        return
    inlined = {m for rewrite in rewrites for m in rewrite.capture.inlined}
    region = Region(module, sorted(inlined, key=lambda m: context.paths[m]))
    for rewrite in rewrites:
        region.variants.append(
            Variant(rewrite.capture, rewrite.fused, needs_no_gradient=bool(rewrite.folded))
        )
        for folded in rewrite.folded:
            context.folds.setdefault(folded.layer, []).append(folded)
    for match in rewrites[0].matches:
        context.did("fuse", module, match.description)
        context.fused_layers.update(match.layers)
    context.set_forward(module, region)
    for child in module.modules():
        if child is not module and child not in inlined:
            _visit(context, capturer, child, seen)


def _rewrites(context: Context, capturer: Capturer, module: nn.Module) -> list[Rewrite]:
    if type(module).forward is nn.Module.forward or "forward" in module.__dict__:
        return []
    if hasattr(nn.Module, "_forward_unimplemented"):
        if type(module).forward is nn.Module._forward_unimplemented:
            return []
    forms = dict.fromkeys(
        form
        for form in (context.observed.forms.get(module), CallForm.default(module))
        if form is not None
    )
    found = []
    for form in forms:
        try:
            capture: Capture = capturer.capture(module, form)
        except CaptureError:
            continue
        if any(m.training for m in (module, *capture.inlined)):
            continue
        rewrite = Rewrite(
            capture,
            context.recognizer,
            fold="fold" in context.passes and "pack" in context.passes,
            fuse="fuse" in context.passes,
            drop="dropout" in context.passes,
        ).run()
        if any(match.at_root for match in rewrite.matches):
            found.append(rewrite)
    return found
