"""What a look at a call of a module leaves behind, and why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..graph.errors import CaptureError
from .calls import Form, form_of
from .codes import Codes
from .outputs import output_tensors
from .reachable import Reachable

KNOWN_ARGUMENTS = "it is called with a tensor or a list that its code can reach by another way, too"

CHANGES = "what its code can read changes from call to call"


@dataclass(frozen=True)
class Look:
    """What a run of a module's code can have read, the code that ran, and the forms of the tensors
    that it gave, if it was the module's own."""

    state: Reachable
    codes: Codes
    forms: list[Form] | None


def forms_of_output(value: Any) -> list[Form]:
    """The forms of the tensors in an output. Raises CaptureError where they cannot be asked."""
    try:
        return [form_of(tensor)._replace(memory=0) for tensor in output_tensors(value)]
    except RecursionError:
        raise CaptureError("its output holds itself") from None
    except RuntimeError as error:  # of tensors of other kinds
        first = str(error).partition("\n")[0]
        raise CaptureError(f"its output cannot be recorded: {first}") from None


def in_words(error: Exception) -> str:
    """Why there is no program."""
    if isinstance(error, CaptureError):
        return str(error)
    first = str(error).strip().partition("\n")[0]
    return f"a run of it fails, {type(error).__name__}: {first}"
