"""Passes `dropout`, `fold` and `fuse`: replace patterns in the graphs of the model's modules.

From the top down: a module whose own code takes part in a pattern gets a region; where it takes no
part, or cannot be captured, its children are looked at.
"""

from __future__ import annotations

from torch import nn

from ...graph.capture import CallForm, CaptureError, Capturer
from ...graph.patterns import Choices, Rewrite
from ...graph.region import Region
from ..context import Context


def run(context: Context) -> None:
    capturer = Capturer(lambda m: m in context.closed or context.recognizer.keeps_whole(m))
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


def _visit(context: Context, capturer: Capturer, module: nn.Module, seen: set[nn.Module]) -> None:
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
    region = Region(module, rewrites)
    for layer, folded in region.folds.items():
        context.folds[layer] = folded
        context.did("fold", folded.norm, f"{type(folded.norm).__name__} into its layer")
    for match in rewrites[0].matches:
        context.did("fuse", module, match.description)
        context.fused_layers.update(match.layers)
    context.set_forward(module, region)
    for child in module.modules():
        if child is not module and child not in region.inlined:
            _visit(context, capturer, child, seen)


def _rewrites(context: Context, capturer: Capturer, module: nn.Module) -> list[Rewrite]:
    if type(module).forward is nn.Module.forward or "forward" in module.__dict__:
        return []
    forms = (
        context.observed.forms.get(module),
        CallForm.default(module),
        context.observed.shaped_forms.get(module),
    )
    choices = Choices(
        fold="fold" in context.passes and "pack" in context.passes,
        fuse="fuse" in context.passes,
        drop="dropout" in context.passes,
    )
    found: list[Rewrite] = []
    captured = False
    for form in dict.fromkeys(form for form in forms if form is not None):
        if form.fixes_shapes and captured:
            continue
        try:
            capture = capturer.capture(module, form)
        except CaptureError:
            continue
        captured = True
        if any(m.training for m in (module, *capture.inlined)):
            continue
        folds = found[0].folds if found else {}
        rewrite = Rewrite(capture, context.recognizer, choices, folds).run()
        if any(match.at_root for match in rewrite.matches):
            found.append(rewrite)
    return found
