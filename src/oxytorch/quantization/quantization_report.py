"""What `quantize_` did: every layer with its size before and after, and what was left and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..rewriting.memory import size_text
from ..rewriting.report import Entry, Report, Table


@dataclass(frozen=True)
class QuantizedLayer:
    """One layer's weight: [out_features, in_features], and its bytes before and after."""

    module: str
    shape: tuple[int, int]
    bytes_before: int
    bytes_after: int


@dataclass
class QuantizationReport(Report):
    """The account of one `quantize_` call. `str(report)` is for people, `as_dict()` for programs.

    dtype: the configuration, as text. bytes_before and bytes_after: of all parameters.
    """

    layers: list[QuantizedLayer] = field(default_factory=list)

    def _lines(self, table: Table) -> list[str]:
        before, after = (
            sum(getattr(layer, name) for layer in self.layers)
            for name in ("bytes_before", "bytes_after")
        )
        lines = [
            f"oxytorch.quantize_: {self.model}, {self.dtype}, {self.seconds:.2f} s, parameters "
            f"{size_text(self.bytes_before)} -> {size_text(self.bytes_after)}",
            f"  {len(self.layers)} weights {size_text(before)} -> {size_text(after)}",
        ]
        return [*lines, *self._sections(table)]

    def add(self, layer: QuantizedLayer, form: str, beside: tuple[str, ...]) -> None:
        """Note a layer that was quantized to `form`; beside: who keeps its plain weight."""
        out_features, in_features = layer.shape
        detail = f"[{out_features}, {in_features}] {size_text(layer.bytes_before)} -> " + size_text(
            layer.bytes_after
        )
        if beside:
            detail += f", beside the plain weight of {', '.join(beside)}"
        self.layers.append(layer)
        self.entries.append(Entry(form, layer.module, True, detail))
