"""Rewrites recorded steps into operators that oneDNN's graph compiler takes.

A batch normalization is folded into the convolution before it, zero padding becomes the
convolution's own, and operators that the compiler knows by another name get that name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .tape import Step, Value, values_in

_aten = torch.ops.aten
_FLAGS = (False, False, True, True)
"""benchmark, deterministic, cudnn_enabled, allow_tf32 of aten::_convolution."""

WIDEST_PADDED = 4
"""Most input channels per group of a convolution whose kernel is widened by zeros to take in
padding that is not the same on both sides; with more, the added products cost too much."""


class Rewriting:
    """One rewriting of recorded steps.

    externals: the tensors from outside; those that are made (folded weights) are added.
    nbytes: bytes of the tensors made.
    """

    def __init__(self, steps: list[Step], externals: list[Tensor], outputs: list[Value]) -> None:
        self.externals = [*externals]
        self.nbytes = 0
        self._given = steps
        self._outputs = outputs
        self._uses = Counter(v for step in steps for v in values_in(step.arguments))
        self._uses.update(outputs)
        self._fresh = 0
        self._steps: list[Step] = []
        self._maker: dict[Value, int] = {}

    def run(self) -> list[Step]:
        """Return the rewritten steps."""
        rules: dict[Any, Callable[[Step], Step | None]] = {
            _aten.convolution.default: self._convolution,
            _aten.native_batch_norm.default: self._batch_norm,
            _aten.addmm.default: self._linear,
            _aten.max_pool2d_with_indices.default: self._max_pool,
        }
        for given in self._given:
            rule = rules.get(given.operator)
            step: Step | None = given if rule is None else rule(given)
            if step is not None:
                self._add(step)
        return self._used()

    def weights(self, steps: list[Step]) -> list[Tensor]:
        """The constant weights of convolutions and linear layers, each once."""
        layers = (_aten._convolution.default, _aten.linear.default)
        places = {s.arguments[1]: None for s in steps if s.operator in layers}
        return [self.externals[v.number] for v in places if v.kind == "external"]

    def _add(self, step: Step) -> None:
        for value in values_in(step.results):
            self._maker[value] = len(self._steps)
        self._steps.append(step)

    def _made_by(self, value: Any, operator: Any) -> Step | None:
        """The step that made a value, where it is a call of `operator`."""
        place = self._maker.get(value)
        if place is None or self._steps[place].operator is not operator:
            return None
        return self._steps[place]

    def _tensor(self, value: Any) -> Tensor | None:
        return self.externals[value.number].detach() if value is not None else None

    def _external(self, tensor: Tensor) -> Value:
        self.externals.append(tensor)
        self.nbytes += tensor.nbytes
        return Value("external", len(self.externals) - 1)

    def _unused(self, values: Any) -> bool:
        return not any(self._uses[value] for value in values_in(values))

    def _used(self) -> list[Step]:
        """The steps without those whose results nothing takes."""
        wanted = {*self._outputs}
        kept: list[Step] = []
        for step in reversed(self._steps):
            needed = step.operator._schema.is_mutable or step.read is not None
            if needed or any(value in wanted for value in values_in(step.results)):
                kept.append(step)
                wanted.update(values_in(step.arguments))
        return kept[::-1]

    def _convolution(self, step: Step) -> Step:
        x, weight, bias, stride, padding, dilation, transposed, *rest = step.arguments
        padded = self._made_by(x, _aten.constant_pad_nd.default)
        if padded is not None and not transposed and weight.kind == "external":
            taken = self._taken_in(padded, weight, padding, dilation)
            if taken is not None:
                x, weight, padding = taken
        arguments = (x, weight, bias, stride, padding, dilation, transposed, *rest, *_FLAGS)
        return Step(_aten._convolution.default, arguments, step.results)

    def _taken_in(
        self, padded: Step, weight: Value, padding: tuple[int, ...], dilation: tuple[int, ...]
    ) -> tuple[Value, Value, tuple[int, ...]] | None:
        """A convolution's input, weight and padding without the zero padding before it.

        Padding of `before` and `after` zeros is that of max(before, after) on both sides for a
        kernel with that many more zeros in front or behind. None where it cannot be done, or a
        write to the unpadded tensor might come in between.
        """
        x, sides, value = padded.arguments
        since = self._steps[self._maker[padded.results[0]] :]
        written = any(step.operator._schema.is_mutable for step in since)
        kernel = self.externals[weight.number].detach()
        dims = kernel.dim() - 2
        pairs = [(sides[i], sides[i + 1]) for i in range(0, len(sides), 2)]
        if written or value != 0 or len(pairs) > dims or min(sides) < 0:
            return None
        pairs += [(0, 0)] * (dims - len(pairs))
        pairs.reverse()  # the last dimension comes first in `sides`
        padding = padding * dims if len(padding) == 1 else padding
        wider = [(max(pair) - pair[0], max(pair) - pair[1]) for pair in pairs]
        if any(map(any, wider)):
            if kernel.shape[1] > WIDEST_PADDED or any(d != 1 for d in dilation):
                return None
            zeros = [count for pair in reversed(wider) for count in pair]
            weight = self._external(F.pad(kernel, zeros))
        return x, weight, tuple(p + max(pair) for p, pair in zip(padding, pairs, strict=True))

    def _batch_norm(self, step: Step) -> Step | None:
        x, gamma, beta, mean, variance, training, momentum, epsilon = step.arguments
        if training or not self._unused(step.results[1:]) or mean is None or variance is None:
            return step
        parts = [p for p in (gamma, beta, mean, variance) if p is not None]
        layer = self._made_by(x, _aten._convolution.default)
        if layer is not None and self._uses[x] == 1 and all(p.kind == "external" for p in parts):
            folded = self._folded(layer, gamma, beta, mean, variance, epsilon)
            if folded is not None:
                place = self._maker[x]
                self._steps[place] = Step(layer.operator, folded, (step.results[0],))
                self._maker[step.results[0]] = place
                return None
        arguments = (x, gamma, beta, mean, variance, False, momentum, epsilon, False)
        return Step(_aten.batch_norm.default, arguments, (step.results[0],))

    def _folded(
        self, layer: Step, gamma: Any, beta: Any, mean: Any, variance: Any, epsilon: float
    ) -> tuple[Any, ...] | None:
        """A convolution's arguments with the normalization of its result in weight and bias.

        scale = gamma / sqrt(variance + eps); the new bias is (bias - mean) * scale + beta.
        """
        x, weight, bias, *rest = layer.arguments
        transposed = rest[3]
        if (
            transposed
            or weight.kind != "external"
            or (bias is not None and bias.kind != "external")
        ):
            return None
        kernel = self.externals[weight.number].detach()
        statistics = [self._tensor(v) for v in (gamma, beta, mean, variance, bias)]
        factor, shift, centre, spread, offset = (
            None if t is None else t.double() for t in statistics
        )
        assert centre is not None and spread is not None
        scale = (spread + epsilon).rsqrt()
        scale = scale if factor is None else scale * factor
        moved = (-centre if offset is None else offset - centre) * scale
        moved = moved if shift is None else moved + shift
        values = kernel.double() * scale.reshape(-1, *[1] * (kernel.dim() - 1))
        made = [self._external(t.to(kernel.dtype).contiguous()) for t in (values, moved)]
        return (x, *made, *rest)

    def _linear(self, step: Step) -> Step:
        """A product with a bias as a linear layer, or as two steps: aten::addmm is refused."""
        bias, x, other, beta, alpha = step.arguments
        if beta != 1 or alpha != 1:
            return step
        turned = self._made_by(other, _aten.t.default)
        plain = bias.kind == "external" and self.externals[bias.number].dim() == 1
        if turned is not None and turned.arguments[0].kind == "external" and plain:
            return Step(_aten.linear.default, (x, turned.arguments[0], bias), step.results)
        self._fresh += 1
        product = Value("product", self._fresh)
        self._add(Step(_aten.mm.default, (x, other), (product,)))
        return Step(_aten.add.Tensor, (product, bias, 1), step.results)

    def _max_pool(self, step: Step) -> Step:
        if not self._unused(step.results[1:]):
            return step
        return Step(_aten.max_pool2d.default, step.arguments, step.results[:1])
