"""Runs of a model on its sample input, which leave no trace in either."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..graph.state import Path, State


class Sample:
    """What a model is called with while it is optimized: positional and keyword arguments.

    sample_input: a tensor is the only argument, a tuple or list the positional ones, a mapping the
    keyword ones.
    """

    def __init__(self, sample_input: Any) -> None:
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        if isinstance(sample_input, Mapping):
            self.kwargs = dict(sample_input)
        elif isinstance(sample_input, (tuple, list)):
            self.args = tuple(sample_input)
        else:
            self.args = (sample_input,)
        self._written: set[Path] = set()  # by runs of the model
        self._keeps_all = False

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as a pair."""
        return self.args, self.kwargs

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
        return State((*models, {"args": self.args, "kwargs": self.kwargs}), written)

    def written(self, model: nn.Module) -> set[int]:
        """The identities of a model's tensors that its runs write to."""
        return State([model], self._written).held()

    def fit(self, model: nn.Module, dtypes: set[torch.dtype]) -> None:
        """Run a model once, which finds out what its runs write to.

        dtypes: those that the model is to be converted to; floating inputs of these are given as
        the model is now. Raises ValueError where the arguments do not fit.
        """
        own = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        if own is not None and own not in dtypes:
            self.args, self.kwargs = pytree.tree_map(
                lambda leaf: leaf.to(own) if _is_one_of(leaf, dtypes) else leaf, self.call
            )
        state = self._state(model)
        try:
            with torch.no_grad(), state.watching():
                model(*self.args, **self.kwargs)
            return
        except Exception:  # it may not run under modes
            self._keeps_all = True
        finally:
            self._written = state.written
            state.restore()
        with self.running(model):
            try:
                with torch.no_grad():
                    model(*self.args, **self.kwargs)
            except Exception as error:
                raise ValueError(
                    f"optimize: sample_input does not fit {type(model).__name__}.forward "
                    f"({type(error).__name__}: {error}); give a tensor, a tuple of positional "
                    "arguments or a mapping of keyword arguments that the model can be called with"
                    f"{self._dtype_hint(own)}"
                ) from error

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


def _is_one_of(leaf: Any, dtypes: set[torch.dtype]) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in dtypes
