"""Runs of a model on its sample input, which leave no trace in either."""

from __future__ import annotations

import copy
import inspect
import operator
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core.interruption import pass_on_interruption
from ..graph.state import Path, State

_EMPTIED = frozenset([list, dict, OrderedDict, defaultdict, set, deque])


class SampleError(ValueError):
    """A model cannot be called with its sample input."""


class SampleInput:
    """What a model is called with while it is optimized: positional and keyword arguments.

    sample_input: a tensor is the only argument, a tuple or list the positional ones, a mapping the
    keyword ones.

    Lists and dictionaries among them are made again for whoever asks, since a call may empty them.
    """

    def __init__(self, sample_input: Any) -> None:
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if isinstance(sample_input, Mapping):
            kwargs = dict(sample_input)
        elif isinstance(sample_input, (tuple, list)):
            args = tuple(sample_input)
        else:
            args = (sample_input,)
        self._given = args, kwargs
        leaves = pytree.tree_leaves(self._given)
        if any(isinstance(leaf, Tensor) and leaf.is_inference() for leaf in leaves):
            self._given = pytree.tree_map(_normal, self._given)
        self._own: torch.dtype | None = None  # the dtype of the model
        self._is_known = False
        self._written: set[Path] = set()  # by runs of the model, once that is known
        self._keeps_all = False

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as a pair, for one call."""
        args, kwargs = self._given
        if all(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
            return self._given  # a call itself makes the dictionary again
        made: dict[int, Any] = {}
        return _made_again(args, made), _made_again(kwargs, made)

    def given_to(self, function: Callable[..., Any]) -> Any:
        """What a function or model returns for the arguments."""
        args, kwargs = self.call
        return function(*args, **kwargs)

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments, for one call."""
        return self.call[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments, for one call."""
        return self.call[1]

    @contextmanager
    def running(self, *models: nn.Module) -> Iterator[None]:
        """Runs within begin with the state that is found here, which is put back at the end: that
        of the models, of the arguments and of the global random number generators."""
        state = self._state(*models)
        try:
            yield
        finally:
            state.restore()

    def _state(self, *models: nn.Module) -> State:
        written = None if self._keeps_all else self._written
        args, kwargs = self._given
        return State((*models, {"args": args, "kwargs": kwargs}), written)

    def written(self, model: nn.Module) -> set[int]:
        """The identities of a model's tensors that its runs write to."""
        return State([model], self._written).held()

    def fit(self, model: nn.Module, dtypes: set[torch.dtype]) -> None:
        """Give the arguments the dtype that a model has now.

        dtypes: those that it is to be converted to; floating inputs of these become as it is.
        """
        self._own = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        own = self._own
        if own is not None and own not in dtypes:
            self._given = pytree.tree_map(
                lambda leaf: leaf.to(own) if _is_one_of(leaf, dtypes) else leaf, self._given
            )

    @contextmanager
    def learning(self, model: nn.Module) -> Iterator[State | None]:
        """As `running`; where it is not known what runs write to, the first one finds it out by
        watching with the state that is given."""
        state = self._state(model)
        try:
            yield None if self._is_known else state
            if not self._is_known:
                self._is_known, self._written = True, state.written
        finally:
            state.restore()

    def learn(self, model: nn.Module) -> None:
        """Find out what a model's runs write to, where that is not known. Raises SampleError where
        the arguments do not fit."""
        if self._is_known:
            return
        try:
            with torch.no_grad(), self.learning(model) as state:
                assert state is not None
                with state.watching():
                    self.given_to(model)
        except Exception as error:  # it may not run under modes
            pass_on_interruption(error)
            self._is_known = self._keeps_all = True
            self._try(model)

    def _try(self, model: nn.Module) -> None:
        with self.running(model):
            try:
                with torch.no_grad():
                    self.given_to(model)
            except Exception as error:
                pass_on_interruption(error)
                raise self.misfit(model, error) from error

    def fits(self, model: nn.Module) -> bool:
        """Whether a model can be called with it."""
        return self._fits(model, self.args, self.kwargs)

    def misfit(
        self,
        model: nn.Module,
        error: Exception,
        caller: str = "optimize",
        name: str = "sample_input",
    ) -> SampleError:
        """The error for arguments with which a model raised `error`: what would fit, if it is
        found. name: the argument of `caller` that holds them."""
        way = self._other_structure(model, name) or (
            "give a tensor, a tuple of positional arguments or a mapping of keyword arguments that "
            f"it can be called with{_parameters_of(model)}"
        )
        return SampleError(
            f"{caller}: {name} does not fit {type(model).__name__}.forward "
            f"({type(error).__name__}: {error}); {way}{self._dtype_hint(self._own)}"
        )

    def _other_structure(self, model: nn.Module, given: str) -> str:
        """What would fit in place of this sample, for an error; an empty string if nothing does.
        given: the argument that holds it."""
        others: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        if self.kwargs:
            others = [
                (f"({given},), the mapping as its one argument", (self.kwargs,), {}),
                (f"tuple({given}.values()), without names", tuple(self.kwargs.values()), {}),
            ]
        elif len(self.args) == 1 and isinstance(self.args[0], Mapping):
            others = [("the mapping alone, its members by name", (), {**self.args[0]})]
        elif len(self.args) == 1 and isinstance(self.args[0], tuple | list):
            others = [("the inner tuple alone", tuple(self.args[0]), {})]
        elif self.args:
            inner = self.args if len(self.args) > 1 else ()
            others = [
                (f"({given},), all of it as one argument", (self.args,), {}),
                (f"{given}[0], its first member alone", inner[:1], {}),
                ("tensors with a first dimension more, x.unsqueeze(0)", _batched(self.args), {}),
            ]
        for name, args, kwargs in others:
            if (args or kwargs) and self._fits(model, args, kwargs):
                return f"it can be called with {name}; give that"
        return ""

    def _fits(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        try:
            with torch.no_grad():
                model(*args, **kwargs)
        except Exception as error:  # then that is not what was meant
            pass_on_interruption(error)
            return False
        return True

    def _dtype_hint(self, own: torch.dtype | None) -> str:
        given = {
            leaf.dtype
            for leaf in pytree.tree_leaves(self.call)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        }
        if own is None or given <= {own}:
            return ""
        names = ", ".join(str(dtype) for dtype in given - {own})
        return f"; its weights are {own}, so give floating inputs in that dtype, not {names}"


def _parameters_of(model: nn.Module) -> str:
    """The arguments of a model's forward, for an error; empty where they say nothing."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return ""
    needed = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    optional = {p.name for p in parameters if p.default is not p.empty}
    shown = [f"{name}=..." if name in optional else name for name in needed[:6]]
    more = ", ..." if len(needed) > len(shown) else ""
    return f": forward({', '.join(shown)}{more})" if needed else ""


def sample_of_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The arguments of a call as a sample_input; None where they cannot be told as one."""
    if not kwargs or not args:
        return kwargs or args or None
    try:
        given = inspect.signature(model.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # the call itself will tell
        return None
    kinds = {kind.kind for name, kind in given.signature.parameters.items()}
    positional = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL}
    if kinds & positional:
        return None
    names = list(given.signature.parameters)[: len(args)]
    return {**dict(zip(names, args, strict=True)), **kwargs}


def _batched(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.unsqueeze(0) if isinstance(arg, Tensor) else arg for arg in args)


def _made_again(value: Any, made: dict[int, Any]) -> Any:
    """The lists, dictionaries and sets of a value made again, with the same in them.

    made: what was made, by the identity of what it stands for.
    """
    kind = type(value)
    if kind is tuple:
        parts = tuple([_made_again(part, made) for part in value])
        return value if all(map(operator.is_, value, parts)) else parts
    if kind not in _EMPTIED and not isinstance(value, UserDict):
        return value
    if id(value) not in made:
        made[id(value)] = again = copy.copy(value)
        if isinstance(value, UserDict):
            again.data = _made_again(value.data, made)
        elif isinstance(again, dict):
            again.update((key, _made_again(item, made)) for key, item in value.items())
        elif not isinstance(again, set):
            for place, item in enumerate(value):
                again[place] = _made_again(item, made)
    return made[id(value)]


def _normal(leaf: Any) -> Any:
    """A tensor that was made in inference mode, as others are."""
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf


def _is_one_of(leaf: Any, dtypes: set[torch.dtype]) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in dtypes
