"""What stands between modules that compute in different dtypes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ..core.converted import Conversion, converted, floating_tensors
from .errors import DtypeError
from .forward import Forward, with_parameters
from .mixed_norms import norms_in_one_dtype


@dataclass(frozen=True)
class Boundary:
    """What happens to the floating-point tensors that a module is given, and to those it returns.

    takes: the dtype that they are converted to, or None.
    least_dims: dimensions that a tensor has to have for that; those of fewer are often positions or
        frequencies, which would lose too much.
    gives_back: whether the module returns the dtype that it was given; `otherwise` where it was
        given no such tensor, if that is a dtype.
    returns: the dtype that results are converted to, whatever the module was given, until the user
        converts the model: as long as the module's parameters have the dtype `takes`, and those of
        `beside`, one that was converted, that one. Without `returns`, `beside` has the dtype
        `takes` until then, and what it has then is taken.
    agrees: whether the weights of a layer, of which code outside makes some at each call, are all
        given one dtype.
    explains: the dtype that parts of the module were converted to, where an error about dtypes is
        to say what to do.
    """

    takes: torch.dtype | None = None
    gives_back: bool = False
    least_dims: int = 0
    otherwise: torch.dtype | None = None
    returns: torch.dtype | None = None
    beside: nn.Module | None = None
    agrees: bool = False
    explains: torch.dtype | None = None

    @property
    def keeps_dtype(self) -> bool:
        """Whether the module returns what it takes: nothing around it was converted."""
        return self.takes is not None and self.takes is self.returns


class BoundaryForward(Forward):
    """A module's forward, its own or the one that a pass gave it, within its boundary."""

    def __init__(self, module: nn.Module, boundary: Boundary) -> None:
        super().__init__(module)
        is_script = isinstance(module, torch.jit.ScriptModule)  # keeps a method in its dictionary
        self.inner = self.own if is_script else module.__dict__.get("forward", self.own)
        self.boundary = boundary
        self._keeps_dtype = boundary.keeps_dtype
        self._is_own = not is_script and "forward" not in module.__dict__
        self._witness = None if boundary.beside is None else _first_name(boundary.beside)

    @property
    def stands_in(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.inner, "stands_in", False))

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if isinstance(self.module, torch.jit.ScriptModule):
            return self.module._c._get_method("forward")(*args, **kwargs)
        return super().own(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_usual = self._keeps_dtype and len(args) == 1 and not kwargs and type(args[0]) is Tensor
        if is_usual and args[0].dtype is self.boundary.takes:
            if self._is_own:  # without packed weights, which a pass's forward goes with
                return type(self.module).forward(self.module, args[0])
            return self.inner(args[0])
        if torch.is_autocast_enabled("cpu"):
            return self.inner(*args, **kwargs)
        takes, least, inner = self.boundary.takes, self.boundary.least_dims, self.inner
        if self.boundary.agrees:
            inner, takes = self._agreeing()
        given = self.boundary.returns
        if given is not None and takes is not None:
            own, takes = takes, dtype_of(self.module)
            if takes is not own or not is_still(self.boundary.beside, given):
                given = None  # the user has converted the model since
        elif self._witness is not None and not self.boundary.agrees:
            takes = self._current(takes)
        if self.boundary.gives_back:
            given = first_dtype(args, kwargs) or self.boundary.otherwise
        conversion = None
        if takes is not None:
            conversion = Conversion(takes, least)
            args, kwargs = conversion.arguments(args, kwargs)
        try:
            with norms_in_one_dtype():
                result = inner(*args, **kwargs)
        except UNFIT as error:
            if self.boundary.explains is not None:
                explain_dtypes(error, partial(_advice, self.module, self.boundary.explains))
            raise
        if conversion is not None:
            conversion.write_back()
        return result if given is None else given_back(result, given)

    def _current(self, takes: torch.dtype | None) -> torch.dtype | None:
        """The dtype that the module beside has: `takes`, until the user converts the model."""
        beside = self.boundary.beside
        assert beside is not None
        weight = beside._parameters.get(self._witness)  # type: ignore[arg-type]
        return takes if weight is None else weight.dtype

    def _agreeing(self) -> tuple[Any, torch.dtype | None]:
        """The layer's forward with weights of one dtype, and that dtype.

        It is that of the weights made outside, which is what the code around computes in.
        """
        module: Any = self.module
        made = {name: v for name, v in vars(module).items() if _is_floating(v)}
        dtype = next((value.dtype for value in made.values()), None)
        if dtype is None or dtype == self.boundary.takes:
            return self.inner, self.boundary.takes
        parameters = {
            name: None if p is None else converted(p, dtype)
            for name, p in module._parameters.items()
        }
        alike = with_parameters(module, parameters)
        vars(alike).update({name: value.to(dtype) for name, value in made.items()})
        if isinstance(module, nn.RNNBase):
            weights = [getattr(alike, name, None) for name in module._flat_weights_names]
            vars(alike).update(_flat_weights=weights, _flat_weight_refs=[None] * len(weights))
        return partial(type(module).forward, alike), dtype


def _first_name(module: nn.Module) -> str | None:
    """The name of a module's first floating-point parameter, of its own."""
    floating = (n for n, p in module._parameters.items() if p is not None and _is_floating(p))
    return next(floating, None)


def dtype_of(module: nn.Module) -> torch.dtype | None:
    """The dtype of a module's parameters, its own or those of its parts."""
    own = first_dtype(tuple(module._parameters.values()), {})
    return own or first_dtype(tuple(module.parameters()), {})


def is_still(module: nn.Module | None, dtype: torch.dtype) -> bool:
    """Whether a module's parameters have the dtype that they were converted to."""
    return module is None or dtype_of(module) is dtype


_ABOUT = re.compile(r"d-?types?\b|scalar ?type|bfloat16|\bhalf\b|float16", re.IGNORECASE)
_OF_INTEGERS = re.compile(r"\b(u?int\d*|long|short|byte|char|bool|integral)\b", re.IGNORECASE)


UNFIT = (RuntimeError, TypeError, ValueError)
"""What torch raises where dtypes do not fit."""


def explain_dtypes(error: Exception, advice: Callable[[], str]) -> None:
    """Raises DtypeError with an advice where torch says that floating-point dtypes do not fit each
    other or an operator."""
    message = str(error)
    is_about = _ABOUT.search(message) is not None and _OF_INTEGERS.search(message) is None
    if is_about and not isinstance(error, DtypeError):
        raise DtypeError(advice()) from error


def _advice(module: nn.Module, dtype: torch.dtype) -> str:
    advice = (
        f"optimize: the code of {type(module).__name__} mixes {dtype} with other dtypes, or calls "
        f"what has no {dtype}, as it may after .to({dtype}) alone (the error above says where); "
        "either give optimize a sample_input like this call's, on which parts that fail are found, "
        f"or name such a part: dtype={{'': {dtype}, 'path.of.the.part': torch.float32}}"
    )
    # Vectors are those of normalizations, which keep theirs.
    of_layers = ((name, p) for name, p in module.named_parameters() if p.dim() > 1)
    floating = {name: p.dtype for name, p in of_layers if _is_floating(p)}
    other = next((name for name, own in floating.items() if own is not dtype), None)
    if other is None:
        return advice
    part = other.rpartition(".")[0]
    return (
        f"{advice}; or, as {other!r} is {floating[other]}, convert what was put in after optimize: "
        f"model.get_submodule({part!r}).to({dtype})"
    )


def first_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype of the first floating-point tensor among arguments."""
    return next((tensor.dtype for tensor in floating_tensors((args, kwargs))), None)


def given_back(result: Any, dtype: torch.dtype) -> Any:
    """A result with its floating-point tensors converted."""
    if type(result) is Tensor:
        return result.to(dtype) if result.is_floating_point() else result
    return pytree.tree_map(
        Conversion(dtype), result, is_leaf=lambda value: isinstance(value, PackedSequence)
    )


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
