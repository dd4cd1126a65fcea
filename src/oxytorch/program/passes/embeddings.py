"""Pass over embedding bags."""

from __future__ import annotations

from ..program import Some, Step
from .editor import Editor, is_contiguous
from .norms import DTYPES

_MODES = {"0": "sum", "1": "mean"}


def embedding_bags(editor: Editor) -> None:
    """Have bags of embeddings computed by the kernel of this package."""
    for step in editor.steps.steps:
        if step.target != "aten::_embedding_bag" or any(step.results[1:]):
            continue
        weight, indices, offsets, _, mode, _, weights, includes_last, padding = step.arguments
        is_known = weight.meta is not None and weight.meta.dtype in DTYPES
        is_known = is_known and is_contiguous(step.results[0])
        if padding != "-1" or mode not in _MODES or not is_known:
            continue
        arguments = [weight, indices, Some(offsets), f'"{_MODES[mode]}"', weights, includes_last]
        editor.replace(step, Step("oxytorch::embedding_bag", arguments, step.results[:1]))
    editor.apply()
