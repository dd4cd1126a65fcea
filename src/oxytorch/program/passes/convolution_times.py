"""Which way of computing a convolution is the fastest, by timing all of them once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from ...ops.convolution_panels import matrix_of
from ...ops.linear import supports
from ...ops.panels.formats import PLAIN_NAMES
from ...ops.panels.layout import OUTPUTS
from ...ops.windows import channels_last
from ...rewriting import measure
from ...rewriting.measure import CLEAR_GAIN, GAIN, about, first_win, numbers, seconds_of
from ..program import Step
from .editor import Editor
from .post_ops import is_activation

CONVOLUTION = "aten::convolution"
PACK = "mkldnn::_reorder_convolution_weight"
PACK_TRANSPOSED = "mkldnn::_reorder_convolution_transpose_weight"
PACKED = "mkldnn::_convolution_pointwise"
PACKED_TRANSPOSED = "mkldnn::_convolution_transpose_pointwise"
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The orders with channels last, by numbers of dimensions."""
MOST_LINES = 64
"""Lines of a kernel that `depthwise_convolution` takes."""
SMALL, CACHE, MOST_WEIGHTS = 64 << 10, 4 << 20, 8
"""Bytes of a weight below which it does not matter where it lies; bytes after which the second
cache of a thread's processor holds others; weights that are timed in turns at most."""
FEW_CHANNELS = 8
"""Images of fewer channels our operator reads whatever order they lie in."""
LEAVING = 25e-6
"""Seconds that torch's operators take longer amid kernels of ours than by themselves: they end the
parallel region that these share, as measured with two threads."""
AMID_OWN, MOST_AMID_OWN = 200e-6, 0.5
"""Seconds by which a convolution of torch's or oneDNN's lengthens a whole model of ours beside its
own time, and the most, as a part of that: its result lies in other caches than those that the next
kernel's threads read from. As measured with two threads and with 16."""


@dataclass(frozen=True)
class Convolution:
    """What the time of a convolution depends on.

    size, shape: of its input and its weight.
    more: the padding of the result, where it is transposed.
    takes, returns: whether what it takes and returns has torch's order, not channels last.
    """

    size: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    more: tuple[int, ...] | None = None
    takes: bool = False
    returns: bool = False

    @property
    def key(self) -> Hashable:
        """The same for layers of about one size."""
        channels = tuple(map(about, self.shape[:2]))
        rest = self.size, self.shape[2:], *astuple(self)[2:]
        return "convolution", channels, not self.why_not_own(), *rest

    @property
    def geometry(self) -> list[Any]:
        """Padding, stride, dilation and groups as oneDNN's operators take them, for two dimensions
        where it has one; for a transposed one the padding of the result after the first."""
        pairs = [(self.padding, 0), (self.stride, 1), (self.dilation, 1)]
        if self.more is not None:
            pairs.insert(1, (self.more, 0))
        is_flat = len(self.stride) == 1
        return [*([neutral] * is_flat + [*word] for word, neutral in pairs), self.groups]

    @property
    def is_depthwise(self) -> bool:
        return self.groups == self.size[1] == self.shape[0]

    @property
    def result(self) -> Tensor:
        """What it gives, without values."""
        made = (
            torch.empty(size, dtype=self.dtype, device="meta") for size in (self.size, self.shape)
        )
        return self.of(*made)

    def of(self, x: Tensor, weight: Tensor) -> Tensor:
        """The convolution of x, by torch's own operator."""
        lists = [*self.stride], [*self.padding], [*self.dilation]
        more = [*(self.more or [0] * len(self.stride))]
        return torch.convolution(x, weight, None, *lists, self.more is not None, more, self.groups)

    def why_not_own(self) -> str:
        """Why our operators cannot compute it; empty if they can."""
        if self.more is not None:
            return "it is transposed"
        if self.dtype not in PLAIN_NAMES:
            return f"its weight is {str(self.dtype).removeprefix('torch.')}"
        if self.is_depthwise:
            lines = torch.Size(self.shape[2:-1]).numel()
            return f"its kernels have more than {MOST_LINES} lines" if lines > MOST_LINES else ""
        if self.groups > 1 and self.shape[0] // self.groups % OUTPUTS:
            return f"a group's outputs are no multiple of {OUTPUTS}"
        return ""


def convolution_of(step: Step, takes: bool = False, returns: bool = False) -> Convolution:
    """What a step computes."""
    x, weight = step.arguments[0].meta, step.arguments[1].meta
    stride, padding, dilation, transposed, more, groups = step.arguments[3:]
    return Convolution(
        size_of(x),
        tuple(weight.shape),
        weight.dtype,
        _numbers(stride),
        _numbers(padding),
        _numbers(dilation),
        int(groups),
        None if transposed == "false" else _numbers(more),
        takes,
        returns,
    )


def size_of(x: Tensor) -> tuple[int, ...]:
    """The size of what a convolution takes: where it may be any, that of the captured run, or 0
    where values decide it."""
    return tuple(
        (n.node.hint if n.node.has_hint() else 0) if isinstance(n, torch.SymInt) else n
        for n in x.shape
    )


def _numbers(words: Iterable[str]) -> tuple[int, ...]:
    return tuple(map(int, words))


class Ways:
    """Ways of computing a convolution of numbers, each made when it is called first."""

    def __init__(self, layer: Convolution) -> None:
        self._layer = layer

    @cached_property
    def _given(self) -> Tensor:
        return numbers(*self._layer.size).to(self._layer.dtype)

    @cached_property
    def _values(self) -> Tensor:
        return numbers(*self._layer.shape).to(self._layer.dtype)

    @cached_property
    def _ordered(self) -> Tensor:
        tensor = self._wide(self._given)
        return tensor if self._layer.takes else channels_last(tensor)

    @cached_property
    def _for_own(self) -> Tensor:
        return self._given if self._layer.takes else channels_last(self._given)

    def _wide(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(2) if len(self._layer.size) == 3 else tensor

    def _returned(self, found: Tensor) -> Tensor:
        return found.contiguous() if self._layer.returns else found

    def plain(self) -> Tensor:
        """By torch's own operator, which keeps the order of what it takes."""
        own = self._layer
        found = own.of(self._given, self._values)
        if own.takes and not own.returns and found.dim() in LAST:
            return found.contiguous(memory_format=LAST[found.dim()])
        return found

    def _weights(self, make: Callable[[], Tensor]) -> Iterator[Tensor]:
        """One weight after the other, so that no nearest cache holds the next: a model's others
        push it out from call to call."""
        return cycle([make() for _ in range(self._count())])

    def _count(self) -> int:
        if self._values.nbytes < SMALL:
            return 1
        return min(MOST_WEIGHTS, 1 + torch.get_num_threads() * CACHE // self._values.nbytes)

    @cached_property
    def _packed_weights(self) -> Iterator[Tensor]:
        pack = _operator(PACK if self._layer.more is None else PACK_TRANSPOSED)
        weight, size = self._wide(self._values), [*self._wide(self._given).shape]
        return self._weights(lambda: pack(weight, *self._layer.geometry, size))

    def packed(self) -> Tensor:
        """With a weight in oneDNN's order."""
        run = _operator(PACKED if self._layer.more is None else PACKED_TRANSPOSED)
        given = self._ordered, next(self._packed_weights), None, *self._layer.geometry
        return self._returned(run(*given, "none", [], ""))

    @cached_property
    def _own_weights(self) -> Iterator[Tensor]:
        if self._layer.is_depthwise:
            return cycle([self._values[:, 0].movedim(0, -1).float().contiguous()])
        matrix, format = matrix_of(self._values, self._layer.groups), PLAIN_NAMES[self._layer.dtype]
        return self._weights(lambda: torch.ops.oxytorch.pack_panels.default(matrix, format))

    def own(self) -> Tensor:
        """By our operator."""
        own = self._layer
        pads = [size for size in own.padding for _ in range(2)]
        lists = [*own.stride], pads, [*own.dilation]
        if own.is_depthwise:
            run = torch.ops.oxytorch.depthwise_convolution.default
            found = run(self._for_own, next(self._own_weights), None, None, *lists, "none")
        else:
            run = torch.ops.oxytorch.convolution_panels.default
            weight = PLAIN_NAMES[own.dtype], next(self._own_weights)
            size = [*own.shape[2:]], own.shape[0]
            found = run(self._for_own, *weight, *size, None, None, *lists, own.groups, "none")
        return self._returned(found)


def _operator(target: str) -> Any:
    return getattr(torch.ops.mkldnn, target.split("::")[1]).default


def is_faster(
    layer: Convolution,
    way: str,
    than: str,
    swept: bool = False,
    padded: bool = False,
    gain: float = GAIN,
) -> bool:
    """Whether a convolution takes at most `gain` of another way's time.

    All ways are timed at once, so that each is timed once, for modules and programs.

    way, than: methods of `Ways`; of an own one and another, the other ends the parallel region that
        kernels of ours share.
    swept: whether an activation follows, which our operators compute in their sweep, and others do
        not.
    padded: whether zeros are added before, which our operators do in their sweep, others not.
    """
    if not measure.TIMED:
        ways = Ways(layer)
        for each in (way, than):
            getattr(ways, each)()
        return True
    times = times_of(layer)
    after = _seconds_of_activation(layer.result) if swept else 0.0
    after += _seconds_of_zeros(layer) if padded else 0.0
    is_amid_own = "own" in (way, than) and torch.get_num_threads() > 1

    def whole(each: str) -> float:
        seconds = times[each]
        if each == "own":
            return seconds
        return seconds + after + (min(AMID_OWN, MOST_AMID_OWN * seconds) if is_amid_own else 0.0)

    return whole(way) <= gain * whole(than)


def times_of(layer: Convolution) -> dict[str, float]:
    """Seconds of all ways in which a convolution may be computed, by names of methods of `Ways`."""
    names = ways_of_layer(layer)

    def make() -> list[Callable[[], Tensor]]:
        ways = Ways(layer)
        return [getattr(ways, name) for name in names]

    return dict(zip(names, seconds_of(layer.key, make), strict=True))


def ways_of_layer(layer: Convolution) -> list[str]:
    """The names of methods of `Ways` by which a convolution may be computed."""
    names = ["plain"]
    if supports(layer.dtype) is None:
        names.append("packed")
    if not layer.why_not_own():
        names.append("own")
    return names


def _seconds_of_activation(result: Tensor) -> float:
    """Seconds of what follows most convolutions, where no sweep computes it."""
    key = "activation", about(result.numel()), result.dtype

    def make() -> list[Callable[[], Tensor]]:
        given = numbers(result.numel()).to(result.dtype)
        return [lambda: torch.relu_(given)]

    return seconds_of(key, make)[0]


def _seconds_of_zeros(layer: Convolution) -> float:
    """Seconds of a step that adds a line of zeros to each spatial dimension of what it takes."""
    batch, channels, *lines = layer.size
    key = "zeros", about(channels), batch, *lines, layer.dtype

    def make() -> list[Callable[[], Tensor]]:
        inner = [max(1, count - 1) for count in lines]
        given = numbers(batch, channels, *inner).to(layer.dtype)
        if given.dim() in LAST:
            given = given.contiguous(memory_format=LAST[given.dim()])
        return [lambda: torch.constant_pad_nd(given, [0, 1] * len(lines))]

    return seconds_of(key, make)[0]


def seconds_plain(layer: Convolution) -> float:
    """Seconds of torch's own operator, where no other way matters."""
    return seconds_of(("plain alone", layer.key), lambda: [Ways(layer).plain])[0]


def winners(editor: Editor, steps: list[Step]) -> set[Step]:
    """The convolutions that are faster with packed weights.

    Those of one dimension win or lose together, since they mostly exchange tensors, and have to be
    faster by more: other operators may be slower in their order.
    """
    layers = {step: layer_of(editor, step, steps) for step in steps}
    flat = [step for step in steps if step.arguments[0].meta.dim() == 3]
    wins = {
        step for step in steps if step not in flat and is_faster(layers[step], "packed", "plain")
    }
    if flat:
        ways = [Ways(layers[step]) for step in flat]

        def plain() -> Tensor:
            return [each.plain() for each in ways][-1]

        def packed() -> Tensor:
            return [each.packed() for each in ways][-1]

        keys = tuple(layers[step].key for step in flat)
        if first_win(keys, [(plain, packed)], CLEAR_GAIN) is not None:
            wins |= {*flat}
    return wins


def layer_of(editor: Editor, step: Step, steps: list[Step]) -> Convolution:
    """What a step computes, one of all those that may change."""
    return convolution_of(step, *_torchs_order(editor, step, steps))


def _torchs_order(editor: Editor, step: Step, steps: list[Step]) -> tuple[bool, bool]:
    """Whether what a convolution takes, and what it returns, is taken to have torch's order: where
    it is the only one, or takes few channels that the model is given; of one dimension also where
    no other one or transposition is next to it."""
    if len(steps) == 1:
        return True, True
    if step.arguments[0].meta.dim() != 3:
        return _takes_input(editor, step), False
    before = editor.maker.get(step.arguments[0])
    while before is not None and is_activation(before):
        before = editor.maker.get(before.arguments[0])
    taken = before is None or before.target not in _NEXT
    todo, returned = [*editor.takers.get(step.results[0], [])], False  # type: ignore[arg-type]
    while todo:
        taker = todo.pop()
        if is_activation(taker) and taker.results[0] is not None:
            todo += editor.takers.get(taker.results[0], [])
        else:
            returned |= taker.target not in _NEXT
    return taken, returned


def _takes_input(editor: Editor, step: Step) -> bool:
    """Whether a convolution of few channels takes an input of the program in torch's order, cast
    and padded; the copy of more channels is little beside their products."""
    value = step.arguments[0]
    is_last = value.meta.shape[1] >= FEW_CHANNELS or not value.meta.is_contiguous()
    before = editor.made_by(value, *_BEFORE)
    while before is not None:
        value = before.arguments[0]
        before = editor.made_by(value, *_BEFORE)
    return not is_last and value in editor.steps.inputs


_BEFORE = ("aten::_to_copy", "aten::pad", "aten::constant_pad_nd")
_NEXT = (CONVOLUTION, "aten::transpose.int", "aten::permute")
