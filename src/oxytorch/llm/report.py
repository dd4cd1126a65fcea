"""What `llm.optimize` did to a language model."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..rewriting.memory import size_text
from ..rewriting.report import Report, Table


@dataclass
class LanguageModelReport(Report):
    """The account of an `llm.optimize` call. `str(report)` is for people, `as_dict()` for programs.

    dtype: that of activations.

    weights, head, kv_cache: formats.
    layers, fused: decoder layers, and those of them that run as a few ops.
    difference: the largest one of a fused layer's outputs from the layer's own, as a fraction of
        its largest value; differing: the same of layers that were left for it.
    packed_difference: that of packed layers on the model's own hidden states, as a fraction of the
        output's norm.
    whole: `llm.generate` steps through the model without transformers' code.
    """

    weights: str = ""
    head: str = ""
    kv_cache: str = ""
    layers: int = 0
    fused: int = 0
    difference: float = 0.0
    allowed: float = 0.0
    packed_difference: float = 0.0
    differing: list[float] = field(default_factory=list)
    whole: bool = False
    notes: list[str] = field(default_factory=list)

    def _lines(self, table: Table) -> list[str]:
        lines = [
            f"oxytorch.llm.optimize: {self.model}, {self.dtype}, weights {self.weights}, "
            f"head {self.head}, cache {self.kv_cache}, {self.seconds:.2f} s, parameters "
            f"{size_text(self.bytes_before)} -> {size_text(self.bytes_after)}",
            f"  {self.fused} of {self.layers} decoder layers run as a few ops each",
        ]
        if self.fused:
            lines.append(
                f"  checked in float32 against the layers' own outputs: largest difference "
                f"{self.difference:.1e} of the largest value (allowed {self.allowed:.1e}); "
                f"with packed weights {self.packed_difference:.1e} of the output's norm"
            )
        lines += self._sections(table)
        if self.differing:
            lines.append(
                f"  layers that were left differ by {min(self.differing):.1e} to "
                f"{max(self.differing):.1e}"
            )
        return [*lines, *self.notes]
