"""What `oxytorch bench gpu-optim` measures: tensors."""

from __future__ import annotations

from oxytorch.benchmark.optim.cases import Case, Shapes, small_shapes


def llama_shapes() -> Shapes:
    """Sixteen layers of a Llama of width 2048 with its embedding and head: 147 tensors, 0.95 B."""
    width, inner, words = 2048, 5632, 32000
    layer: Shapes = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)] + [(width,)] * 2
    return [(words, width), *layer * 16, (width,), (words, width)]


def resnet50_shapes() -> Shapes:
    """ResNet-50's bottlenecks without their shortcuts, and the classifier: 146 tensors, 22.8 M."""
    shapes: Shapes = []
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for _ in range(blocks):
            for out, into, side in ((width, before, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, into, side, side), (out,), (out,)]
            before = 4 * width
    return [*shapes, (1000, before), (1000,)]


CASES = {
    case.name: case
    for case in (
        Case("llama", "Llama shape", llama_shapes),
        Case("resnet50", "ResNet-50", resnet50_shapes),
        Case("small", "1000 small tensors", small_shapes),
    )
}

DEFAULT_FORMATS = ("float32", "bfloat16", "split", "split+int8")
"""Formats in which oxytorch takes part unless others are asked for."""
