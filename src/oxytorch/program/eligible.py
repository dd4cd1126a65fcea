"""What keeps all calls of a module from programs: hooks of its users, training, memory that others
hold."""

from __future__ import annotations

from types import FunctionType

from torch import nn

from ..core.sources import GLOBAL_HOOKS
from ..core.watched import unwatch, watch
from ..rewriting.copies import aliased_among

SPECIAL = "a module has a hook or is in training mode"
HELD = "the memory of a parameter is that of another tensor, too"
"""Why there is no program where writes to that tensor would not be seen."""


def is_special(module: nn.Module) -> bool:
    """Whether a module or a part of it has a hook or is in training mode, for now."""
    return any(GLOBAL_HOOKS) or any(
        part.training or _has_users_hooks(part) for part in module.modules()
    )


def _has_users_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks besides functions of the library that its class is from.

    Those are its code, as the hooks with which transformers collects hidden states: what they do to
    tensors is recorded, and what they read is looked at.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    library = type(module).__module__.partition(".")[0]
    return bool(hooks) and (
        library in ("__main__", "torch")
        or any(
            type(hook) is not FunctionType or hook.__module__.partition(".")[0] != library
            for hook in hooks
        )
    )


class ParameterWatch:
    """Has writes to the parameters of a module through `.data` seen, from `begin` on."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._watched: set[int] = set()  # identities

    def begin(self) -> None:
        """Watch the parameters that the module has now."""
        self._watched.update(id(p) for p in self._module.parameters() if watch(p))

    def end(self) -> None:
        """Leave the parameters as they were found."""
        for parameter in self._module.parameters():
            if id(parameter) in self._watched:
                unwatch(parameter)
                self._watched.discard(id(parameter))

    def __bool__(self) -> bool:
        return bool(self._watched)

    def are_held(self) -> bool:
        """Whether others hold memory of parameters that are not watched yet, and might write to it
        uncounted."""
        parameters = self._module.parameters()
        return bool(aliased_among(p for p in parameters if id(p) not in self._watched))
