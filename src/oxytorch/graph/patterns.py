"""The patterns that a record is searched for.

Every match names the steps that it replaces, by their numbers. It is made only where nobody else
sees what lies between these steps, and no other step writes to what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ..ops.post_op import PostOp
from .activations import activation_of_function
from .boundary import Boundary
from .fused import Folded, FusedAddNorm, FusedGate, FusedLayer
from .recognize import BatchNorm, RecognizedNorm, Recognizer, convolution_of_module
from .recommendation import FusedEmbeddingBags, FusedInteraction, alike_bags, find_interaction
from .record import Record
from .steps import RecordedValue

ADD = (Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add_, torch.add)
MULTIPLY = (Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul)
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Identity)


@dataclass(frozen=True)
class Choices:
    """Which kinds of replacement are wanted."""

    fold: bool
    fuse: bool
    drop: bool


@dataclass
class Match:
    """One replacement.

    description: in words.
    steps: the numbers of those that it replaces, in order.
    run: what is called in place of the last of them, with `arguments`; it gives `results`.
    modules: those that are no longer called.
    watched: tensors whose values were looked at.
    folded: where it has one.
    at: the number of the step in whose place it is called.
    """

    description: str
    steps: list[int]
    run: Any
    arguments: Any
    results: Any
    modules: tuple[nn.Module, ...] = ()
    layers: tuple[nn.Module, ...] = ()
    watched: tuple[Tensor, ...] = ()
    folded: Folded | None = None
    at: int = field(init=False)

    def __post_init__(self) -> None:
        self.at = self.steps[-1]


class Patterns:
    """The matches in a record.

    converts: the modules whose inputs are to be converted to the dtype of their weight.
    returns: those that keep their dtype and return another one.
    is_free: whether a module's call may be gone past.
    """

    def __init__(
        self,
        record: Record,
        recognizer: Recognizer,
        choices: Choices,
        converts: set[nn.Module],
        returns: Mapping[nn.Module, Boundary],
        folds: dict[nn.Module, Folded],
        is_free: Callable[[nn.Module], bool],
    ) -> None:
        self.record = record
        self._is_free = is_free
        self.steps = record.steps
        self._recognizer = recognizer
        self._choices = choices
        self._converts = converts
        self._returns = returns
        self._folds = folds
        self._taken: set[int] = set()
        self._users: dict[int, list[int]] = {}
        self._maker: dict[int, int] = {}
        # Steps that return what they are given: the dropout layers of a model that is not trained.
        self.dropped = {n: self._dropout(n) for n in range(len(self.steps)) if self._is_dropped(n)}
        for number, step in enumerate(self.steps):
            if number in self.dropped:
                continue
            for value in values_in(step.arguments):
                self._users.setdefault(value.number, []).append(number)
            for value in values_in(step.result):
                self._maker.setdefault(value.number, number)

    def run(self) -> list[Match]:
        found = []
        for find in (
            self._layer, self._add_norm, self._gate, self._embedding_bags, self._interaction,
        ):  # fmt: skip
            for number in range(len(self.steps)):
                match = None if number in self._taken or number in self.dropped else find(number)
                is_taken = match is None or self._taken.intersection(match.steps)
                if match is not None and not is_taken and all(map(self._is_free, match.modules)):
                    found.append(match)
                    self._taken.update(match.steps)
        return found

    def _is_dropped(self, number: int) -> bool:
        step = self.steps[number]
        args = step.arguments[0]
        same = len(args) > 0 and type(args[0]) is RecordedValue and step.result == args[0]
        module = self._dropout(number)
        is_dropout = step.target is F.dropout if module is None else self._is_free(module)
        return self._choices.drop and same and is_dropout

    def _dropout(self, number: int) -> nn.Module | None:
        target = self.steps[number].target
        return target if type(target) in _DROPOUT else None

    # What steps are.

    def module(self, number: int) -> nn.Module | None:
        """The module that a step calls with nothing but positional arguments."""
        step = self.steps[number]
        is_module = isinstance(step.target, nn.Module) and not step.arguments[1]
        return step.target if is_module else None

    def _input(self, number: int) -> Any:
        """The only argument of a step, if it is one tensor that the run made."""
        args, kwargs = self.steps[number].arguments
        return args[0] if len(args) == 1 and not kwargs and type(args[0]) is RecordedValue else None

    def result(self, number: int) -> RecordedValue | None:
        found = self.steps[number].result
        return found if type(found) is RecordedValue else None

    def only_user(self, number: int) -> int | None:
        """The step that alone takes a step's result, as long as that is in no call's output."""
        value = self.result(number)
        users = [] if value is None else self._users.get(value.number, [])
        return users[0] if len(users) == 1 else None

    def shape(self, value: Any) -> tuple[int, ...] | None:
        return (
            tuple(self.record.tensors[value.number].shape) if type(value) is RecordedValue else None
        )

    def activation(self, number: int) -> PostOp | None:
        step = self.steps[number]
        if isinstance(step.target, nn.Module):
            return None if self._input(number) is None else self._recognizer.activation(step.target)
        args, kwargs = step.arguments
        if not args or type(args[0]) is not RecordedValue:
            return None
        return activation_of_function(step.target, args, kwargs)

    def norm(self, number: int) -> RecognizedNorm | None:
        module = self.module(number)
        if module is None or self._input(number) is None:
            return None
        return self._recognizer.norm(module)

    def is_sound(self, steps: list[int]) -> bool:
        """Whether the steps may be computed together at the place of the last one."""
        if not self._may_join(steps):
            return False
        inner = {self.steps[n].storages.get(r.number) for n in steps for r in self._results(n)}
        read = {s for n in steps for s in self.steps[n].storages.values()}
        for number in range(steps[0], steps[-1] + 1):
            writes = self.steps[number].writes & read
            # A step of the match may write to what another one of it has made.
            if writes and not (number in steps and writes <= inner):
                return False
        return True

    def _may_join(self, steps: list[int]) -> bool:
        """Whether the code that the steps lie in may be gone past, up to what they share."""
        paths = [self.record.path(self.steps[number].call) for number in steps]
        shared = 0
        while all(len(path) > shared for path in paths) and len({p[shared] for p in paths}) == 1:
            shared += 1
        calls = {number for path in paths for number in path[max(shared - 1, 0) :]}
        return shared > 0 and all(self.record.calls[n].refusal is None for n in calls)

    def _results(self, number: int) -> list[RecordedValue]:
        return [*values_in(self.steps[number].result)]

    # Matches.

    def _layer(self, number: int) -> Match | None:
        layer = self.module(number)
        if layer is None or self._input(number) is None:
            return None
        if not (is_packable_convolution(layer) or self._recognizer.linear(layer) is not None):
            return None
        padding, padded = self._padding(number, layer)
        if padded is None or not self.is_sound([padded, number]):
            padding = padded = None
        chain = [number] if padded is None else [padded, number]
        kind = _kind(layer) if padded is None else f"padding + {_kind(layer)}"
        parts, modules = [kind], [layer]
        following = self.only_user(number)
        folded = self._folded(layer, following)
        if folded is not None:
            assert following is not None
            if folded.norm is not self.module(following) or not self.is_sound([*chain, following]):
                return None
            chain.append(following)
            parts.append("folded batch norm")
            modules.append(folded.norm)
            following = self.only_user(following)
        post_op, other, taken = self._sound_post_op(chain, following, layer)
        chain += taken
        modules += [m for m in map(self.module, taken) if m is not None]
        if len(chain) == 1:
            return None
        if str(post_op):
            parts.append(str(post_op))
        source = self._input(number) if padded is None else self.steps[padded].arguments[0][0]
        converts, returns = layer in self._converts, self._returns.get(layer)
        return Match(
            " + ".join(parts),
            chain,
            FusedLayer(layer, post_op, folded, padding, converts, returns),
            (source,) if other is None else (source, other),
            self.steps[chain[-1]].result,
            tuple(modules),
            (layer,) if folded is None else (layer, folded.norm),
            folded=folded,
        )

    def _folded(self, layer: nn.Module, following: int | None) -> Folded | None:
        """The batch normalization after a layer in the layer's weight, where it may be folded."""
        if not self._choices.fold or following is None:
            return None
        norm = self.module(following)
        found = self._foldable(layer, norm, following)
        if found is None or norm is None:
            return None
        return self._folds.get(layer) or Folded(layer, norm, found)

    def _sound_post_op(
        self, chain: list[int], following: int | None, layer: nn.Module
    ) -> tuple[PostOp, RecordedValue | None, list[int]]:
        """The post-operation after the steps of a layer, its other operand and its steps."""
        if self._choices.fuse and following is not None:
            post_op, other, taken = self._post_op(chain[-1], following, layer)
            if self.is_sound([*chain, *taken]):
                return post_op, other, taken
        return PostOp(), None, []

    def _post_op(
        self, last: int, following: int, layer: nn.Module
    ) -> tuple[PostOp, RecordedValue | None, list[int]]:
        """The post-operation of a layer, its second operand, and the steps that it stands for."""
        post_op = self.activation(following)
        if post_op is not None:
            return post_op, None, [following]
        binary, other = self._binary(following, last)
        is_first = other is not None and self.steps[following].arguments[0][0] == other
        if binary is None or (not _is_convolution(layer) and self._feeds_norm(following)):
            return PostOp(), None, []
        after = self.only_user(following)
        if (
            _is_convolution(layer)
            and after is not None
            and self.activation(after) == PostOp("relu")
        ):
            post_op = PostOp("relu", binary=binary, other_first=is_first)
            return post_op, other, [following, after]
        return PostOp(binary=binary, other_first=is_first), other, [following]

    def _binary(self, number: int, left: int) -> tuple[str | None, RecordedValue | None]:
        step = self.steps[number]
        kind = "add" if step.target in ADD else "mul" if step.target in MULTIPLY else None
        args, kwargs = step.arguments
        if (
            kind is None
            or kwargs
            or len(args) != 2
            or not all(type(a) is RecordedValue for a in args)
        ):
            return None, None
        own = self.result(left)
        if args[0] == args[1] or own not in args:
            return None, None
        other = args[1] if args[0] == own else args[0]
        same = self.shape(other) == self.shape(own)
        return (kind, other) if same else (None, None)

    def _feeds_norm(self, number: int) -> bool:
        value = self.result(number)
        users = [] if value is None else self._users.get(value.number, [])
        return any(self.norm(user) is not None and self._may_join([number, user]) for user in users)

    def _foldable(
        self, layer: nn.Module, norm: nn.Module | None, number: int | None
    ) -> BatchNorm | None:
        """What the normalization after a layer computes, where it can be folded into the layer."""
        found = None if norm is None else self._recognizer.batch_norm(norm)
        if found is None or number is None or self._input(number) is None:
            return None
        weight = layer._parameters["weight"]
        assert weight is not None
        dims = found.dims
        if type(layer) is nn.Linear:
            fits = dims == 1 and len(self.shape(self._input(number)) or ()) == 2
        else:
            fits = _spatial_dims(layer) == dims
            fits = fits and len(self.shape(self._input(number)) or ()) == dims + 2
        fits = fits and weight.shape[0] == len(found.variance) and weight.is_floating_point()
        return found if fits else None

    def _padding(self, number: int, layer: nn.Module) -> tuple[tuple[int, ...] | None, int | None]:
        """Zeros that a step of its own puts evenly around a convolution's input, and that step."""
        maker = self._maker.get(self._input(number).number)
        if not self._choices.fuse or maker is None or self.steps[maker].target is not F.pad:
            return None, None
        args, kwargs = self.steps[maker].arguments
        given = {**dict(zip(("input", "pad", "mode", "value"), args, strict=False)), **kwargs}
        sides, spatial = given.get("pad"), _spatial_dims(layer)
        if given.get("mode", "constant") != "constant" or given.get("value") not in (None, 0):
            return None, None
        if not isinstance(sides, (list, tuple)) or not all(type(s) is int for s in sides):
            return None, None
        pairs = [*zip(sides[::2], sides[1::2], strict=True)]
        even = all(left == right >= 0 for left, right in pairs) and len(pairs) <= spatial
        if (
            not even
            or self.only_user(maker) != number
            or not args
            or type(args[0]) is not RecordedValue
        ):
            return None, None
        missing = (0,) * (spatial - len(pairs))
        return (*missing, *(left for left, _ in reversed(pairs))), maker

    def _add_norm(self, number: int) -> Match | None:
        norm, module = self.norm(number), self.module(number)
        if not self._choices.fuse or norm is None or module is None:
            return None
        add = self._maker.get(self._input(number).number)
        if add is None or add in self._taken or self.steps[add].target not in ADD:
            return None
        args, kwargs = self.steps[add].arguments
        if kwargs or len(args) != 2 or not all(type(a) is RecordedValue for a in args):
            return None
        if self.shape(args[0]) != self.shape(args[1]) or self.steps[add].writes:
            return None
        total, normed = self.result(add), self.result(number)
        if total is None or normed is None or not self.is_sound([add, number]):
            return None
        users = self._users[total.number]
        keep_total = self.only_user(add) is None
        if keep_total and any(add < user < number for user in users):
            return None
        results = (normed, total) if keep_total else normed
        run = FusedAddNorm(module, norm, keep_total, bool(self._converts))
        match = Match(f"add + {norm.kind}", [add, number], run, args, results, (module,))
        match.layers = (module,)
        return match

    def _gate(self, number: int) -> Match | None:
        step = self.steps[number]
        args, kwargs = step.arguments
        if not self._choices.fuse or step.target not in MULTIPLY or kwargs or len(args) != 2:
            return None
        for gate, up in (args, args[::-1]):
            if type(gate) is not RecordedValue or type(up) is not RecordedValue or gate == up:
                continue
            maker = self._maker.get(gate.number)
            if maker is None or maker in self._taken or self.only_user(maker) != number:
                continue
            post_op = self.activation(maker)
            if post_op is None or post_op.name not in ("gelu", "silu"):
                continue
            source = self.steps[maker].arguments[0][0]
            if self.shape(source) != self.shape(up) or not self.is_sound([maker, number]):
                continue
            modules = tuple(m for m in (self.module(maker),) if m is not None)
            run = FusedGate(post_op, gate == args[0])
            return Match(
                f"{post_op} * up", [maker, number], run, (source, up), step.result, modules
            )
        return None

    def _embedding_bags(self, number: int) -> Match | None:
        step = self.steps[number]
        joined = step.arguments[0][0] if step.target in (torch.stack, torch.cat) else None
        if not self._choices.fuse or not isinstance(joined, (list, tuple)):
            return None
        bags = []
        for value in joined:
            maker = self._maker.get(value.number) if type(value) is RecordedValue else None
            module = None if maker is None else self.module(maker)
            if maker is not None and module is not None and self.only_user(maker) == number:
                bags.append((maker, module, self.steps[maker].arguments[0]))
        bags = alike_bags(bags)
        steps = sorted(bag[0] for bag in bags)
        if len(bags) < 2 or not self.is_sound(steps):
            return None
        indices, offsets = zip(*(bag[2] for bag in bags), strict=True)
        modules = tuple(bag[1] for bag in bags)
        return Match(
            f"{len(bags)} embedding bags in one", steps, FusedEmbeddingBags([*modules]),
            ([*indices], [*offsets]), [self.steps[bag[0]].result for bag in bags], modules, modules,
        )  # fmt: skip

    def _interaction(self, number: int) -> Match | None:
        found = find_interaction(self, number) if self._choices.fuse else None
        if found is None:
            return None
        dense, sparse, steps, watched = found
        if not self.is_sound(steps):
            return None
        return Match(
            "pairwise interaction", steps, FusedInteraction(), (dense, sparse),
            self.steps[number].result, watched=watched,
        )  # fmt: skip

    def maker(self, value: Any) -> int | None:
        """The step that made a value."""
        return self._maker.get(value.number) if type(value) is RecordedValue else None


def values_in(nested: Any) -> Iterator[RecordedValue]:
    """All Values in a structure, in order."""
    for leaf in pytree.tree_leaves(nested):
        if type(leaf) is RecordedValue:
            yield leaf


def is_packable_convolution(module: nn.Module) -> bool:
    """Whether a module is a convolution that oneDNN's pre-packed form covers."""
    return convolution_of_module(module) is not None


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)


def _kind(module: nn.Module) -> str:
    return "convolution" if _is_convolution(module) else "linear"


def _spatial_dims(layer: nn.Module) -> int:
    """The dimensions that a convolution goes over; 0 of a linear layer."""
    weight = layer._parameters["weight"]
    return weight.dim() - 2 if _is_convolution(layer) and weight is not None else 0


__all__ = ["Choices", "Match", "Patterns", "is_packable_convolution", "values_in"]
