"""Programs of the calls of a model, one for each form, which show what happens within."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn

from ...graph.errors import CaptureError
from ...graph.record import inside_containers
from ...program.inputs import form_of_call
from ...program.outputs import output_tensors
from ...program.recorded import Run
from ...program.tape import recorded_once

_Shown = TypeVar("_Shown", covariant=True)


class Shows(Protocol[_Shown]):
    """A program of a call's tensors; None where its code read other values than it did then."""

    def __call__(self, tensors: Sequence[Tensor]) -> _Shown | None: ...


_Program = TypeVar("_Program", bound=Shows[Any])


class Runs(Generic[_Program]):
    """Programs of the calls of a model, each made at the first call of its form.

    own: the model's own code.
    make: makes a program of a run.
    """

    def __init__(self, own: Callable[..., Any], make: Callable[[Run], _Program]) -> None:
        self._own = own
        self._make = make
        self._forms: dict[Hashable, list[_Program]] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Program, Any]:
        """The program of a call, and what it shows. Raises CaptureError, ForeignError."""
        form, tensors = form_of_call(args, kwargs)
        for program in self._forms.get(form, ()):
            found = program(tensors)
            if found is not None:
                return program, found
        program = self.add_form(args, kwargs)
        found = program(tensors)
        if found is None:
            raise CaptureError("its code reads other values when it runs again")
        return program, found

    def programs(self) -> list[_Program]:
        """The programs that were made so far."""
        return [program for known in self._forms.values() for program in known]

    def add_form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Program:
        """Record a call of a further form. Raises CaptureError, ForeignError."""
        form, run = recorded_call(self._own, args, kwargs)
        program = self._make(run)
        self._forms.setdefault(form, []).append(program)
        return program


def recorded_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Hashable, Run]:
    """The form of a call, and the record of it. Raises CaptureError, ForeignError."""
    form, tensors = form_of_call(args, kwargs)
    before = inside_containers(args, kwargs)
    _, recording = recorded_once(lambda: function(*args, **kwargs), output_tensors, tensors)
    if isinstance(recording, CaptureError):
        raise recording
    if inside_containers(args, kwargs) != before:
        raise CaptureError("its code writes to a list or a dictionary that it is given")
    return form, Run(recording, tensors)


def names_of(module: nn.Module) -> dict[int, str]:
    """The names of a module's parameters, by their identities; a shared one has its first name."""
    return {id(parameter): name for name, parameter in module.named_parameters()}
