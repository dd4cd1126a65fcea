"""What the passes over programs do with a model, and why they leave what they leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from ..program.call_report import call_report
from ..program.export import captured
from ..program.passes.editor import Note
from ..program.plan import ArenaPlan, hint
from ..program.program import Step, Steps, Value
from ..rewriting.changes import log_of
from ..rewriting.copies import same_weights
from . import drawing


def explain(
    model: nn.Module | ExportedProgram,
    inputs: Sequence[Any] | Mapping[str, Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Explanation:
    """Return a report on a model as a program: what is fused, what is not, and why.

    model: a module in evaluation mode, which `torch.export` captures, or what that returned.
    inputs: positional arguments to capture it with, a tensor for a single one, or a mapping of
        keyword arguments, as `sample_input` of `optimize`.
    kwargs: keyword arguments beside positional ones.

    The model stays as it is. Kernels are timed where a pass decides by time.

    For a model that `optimize` turned into a program, the report also says how the calls so far
    were run: which sizes are served, and why no others.

    print() gives the text with the program before and after; `.svg(path)` draws both.

    Raises TypeError if `model` is neither, and ValueError where it cannot become a program, with
    the reason.
    """
    if not isinstance(model, nn.Module | ExportedProgram):
        raise TypeError(
            "explain: expected model to be a torch.nn.Module or what torch.export.export returns, "
            f"got a {type(model).__name__}"
        )
    if isinstance(model, ExportedProgram):
        exported, name = model, "the exported program"
    else:
        named, args = dict(kwargs or {}), tuple[Any, ...]()
        if isinstance(inputs, Mapping):
            named = {**inputs, **named}
        else:
            args = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        name = type(model).__name__
        if model.training:
            raise ValueError(f"explain: expected {name} in evaluation mode; call model.eval()")
        exported = _exported(model, name, args, named)
    found = captured(exported)
    with torch.no_grad():
        after, once, notes = found.improved()
    calls = () if isinstance(model, ExportedProgram) else _calls(model)
    return Explanation(name, found.steps, after, once, tuple(notes), found.names, calls)


def _exported(
    model: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ExportedProgram:
    try:
        with torch.no_grad():
            return torch.export.export(same_weights(model), args, kwargs)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        holds_mapping = len(args) == 1 and isinstance(args[0], Mapping) and not kwargs
        remedy = (
            "for keyword arguments, pass the mapping itself as inputs and not in a tuple"
            if holds_mapping
            else "oxytorch.explain tells what else was done to an optimized model"
        )
        raise ValueError(
            f"explain: {name} cannot become a program: torch.export cannot capture it "
            f"({type(error).__name__}: {first}); {remedy}"
        ) from error


def _calls(model: nn.Module) -> tuple[str, ...]:
    lines = tuple(call_report(model))
    if not lines and log_of(model) is not None:
        return (
            "no program runs for calls of this model, which oxytorch.explain gives the reason of; "
            "what follows is the program that torch.export makes of it",
        )
    return lines


@dataclass(frozen=True, repr=False)
class Explanation:
    """What passes did with a program.

    before, after: the steps of a call.
    once: the steps that are done before the first call and after a write to a weight.
    notes: what each pass did or left, in order.
    names: of the weights.
    calls: what became of the calls so far, of a model that runs as a program.
    """

    name: str
    before: Steps
    after: Steps
    once: Steps
    notes: tuple[Note, ...]
    names: Mapping[Value, str]
    calls: tuple[str, ...] = ()

    @property
    def fused(self) -> list[Note]:
        """What was replaced, without what only changed its spelling."""
        return [note for note in self.notes if not note.why and note.made != (note.step.target,)]

    @property
    def skipped(self) -> list[Note]:
        """What a pass left, where no later one took it: the last reason of each pass."""
        makers = {value: step for step in self.after.steps for value in step.results if value}
        last: dict[tuple[str, Value], Note] = {}
        for note in self.notes:
            result = note.step.results[0] if note.step.results else None
            if note.why and result in makers and makers[result].target == note.step.target:
                last[(note.by, result)] = note
        return [*last.values()]

    def __str__(self) -> str:
        head = (
            f"{self.name}: {len(self.before.steps)} steps before, {len(self.after.steps)} after, "
            f"and {len(self.once.steps)} that are done once"
        )
        parts = [
            head,
            "Changed\n" + _lines(map(self._change, self.fused)),
            "Left as it is\n" + _lines(map(self._reason, self.skipped)),
            f"Arena\n{self._arena()}",
            f"Operators after\n{_lines(step.target for step in self.after.steps)}",
            self._program("Before", self.before),
            self._program("After", self.after),
        ]
        if self.once.steps:
            parts.append(self._program("Done once", self.once))
        if self.calls:
            parts.insert(1, "Calls\n" + _lines(self.calls))
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        return str(self)

    def _change(self, note: Note) -> str:
        made = " and ".join(note.made) if note.made else "part of another step"
        if len(note.made) > 2:
            made = f"{note.made[-1]}, which {len(note.made) - 1} other steps prepare"
        return f"{note.by}: {note.step.target} became {made}"

    def _reason(self, note: Note) -> str:
        return f"{note.by}: {note.step.target}{_shape(note.step)}: {note.why}"

    def _arena(self) -> str:
        """What the program's plan of memory takes, for all sizes and for those of the inputs."""
        plan = ArenaPlan.of_text(self.after.text())
        metas = [value.meta for value in self.after.inputs if not value.is_size]
        if not plan.places or any(meta is None for meta in metas):
            return "  nothing"
        shapes = [[hint(size) for size in meta.shape] for meta in metas if meta is not None]
        try:
            arena, results = plan.arena(shapes), plan.results(shapes)
        except IndexError:  # formulas of inputs that are sizes
            return f"  {plan.formula} bytes"
        return (
            f"  {plan.formula} bytes\n  for these inputs {arena} bytes, in place of {results} for "
            f"{len(plan.places)} results one beside another"
        )

    def _program(self, title: str, steps: Steps) -> str:
        """The text of a program, with the names of its weights and of what is made of them once."""
        own = [value for value in (*steps.inputs, *steps.constants) if not value.is_size]
        names = {**dict.fromkeys(self.once.outputs, "done once"), **self.names}
        lines = [
            f"  %{place} is {names[value]}" for place, value in enumerate(own) if value in names
        ]
        return "\n".join([title, *lines, steps.text()])

    def _repr_svg_(self) -> str:
        left = {note.step.results[0]: note.why for note in self.skipped}
        changed = {note.step for note in self.fused}
        return drawing.draw(
            [
                drawing.Column(
                    f"{self.name} before: {len(self.before.steps)} steps",
                    [self._box(step, "", step in changed) for step in self.before.steps],
                    _arrows(self.before),
                ),
                drawing.Column(
                    f"after: {len(self.after.steps)} steps",
                    [self._box(s, left.get(s.results[0], ""), False) for s in self.after.steps
                     if s.results],
                    _arrows(self.after),
                ),
            ]
        )  # fmt: skip

    def _box(self, step: Step, why: str, is_changed: bool) -> drawing.Box:
        namespace = step.target.partition("::")[0] if "::" in step.target else "size"
        is_left = bool(why) and namespace == "aten"
        kind = "changed" if is_changed else "left" if is_left else namespace
        words = f"{step.target}{_shape(step)}"
        return drawing.Box(step.target.partition("::")[2] or step.target, kind, f"{words}\n{why}")

    def svg(self, path: str | Path) -> None:
        """Draw the program before and after to a file; boxes tell more when pointed at."""
        Path(path).write_text(self._repr_svg_(), encoding="utf-8")


def _shape(step: Step) -> str:
    """The shape of the first result."""
    meta = step.results[0].meta if step.results and step.results[0] is not None else None
    return "" if meta is None else f" {[*meta.shape]}"


def _lines(texts: Iterable[str]) -> str:
    """Each text once, with its count where it is there several times."""
    counts = Counter(texts)
    lines = [f"  {text}{f'   ({n} times)' if n > 1 else ''}" for text, n in counts.items()]
    return "\n".join(lines) or "  nothing"


def _arrows(steps: Steps) -> list[tuple[int, int]]:
    """From which step to which a value goes."""
    maker = {value: at for at, step in enumerate(steps.steps) for value in step.results if value}
    return [
        (maker[value], at)
        for at, step in enumerate(steps.steps)
        for value in dict.fromkeys(step.taken)
        if value in maker
    ]
