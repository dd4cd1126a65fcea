"""Runs a model on a few tokens and notes how it calls its decoder layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.interruption import pass_on_interruption
from . import recipes
from .matching import find
from .record import Rotation
from .samples import sample_length, sample_tokens


@dataclass
class LayerCalls:
    """How one decoder layer was called: by the prompt, then by one more token.

    prompt, token: arguments by name, without the hidden states.
    results: see `plan.LayerPlan`.
    hidden, output: the prompt's hidden states before and behind it, [1, n, width].
    """

    path: str
    module: nn.Module
    position: int
    prompt: dict[str, Any] = field(default_factory=dict)
    token: dict[str, Any] = field(default_factory=dict)
    results: int = 0
    hidden: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    output: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))


Rotations = list[tuple[Rotation, Tensor]]
"""Calls in the sample prompt, each with the cosines that it gave."""


def decoder_layers(model: nn.Module) -> list[LayerCalls]:
    """Returns the members of every list of layers some of which have an attention part.

    Where there is none (Mamba): of the longest lists whose members are built alike.
    """
    lists = [*_outermost_lists(model)]
    chosen = [
        (path, members)
        for path, members in lists
        if any(find(member, recipes.ATTENTION) is not None for member in members)
    ]
    if not chosen:
        most = max((len(members) for _, members in lists), default=0)
        chosen = [(path, members) for path, members in lists if len(members) == most]
    return [
        LayerCalls(f"{path}.{i}", member, i)
        for path, members in chosen
        for i, member in enumerate(members)
    ]


def _outermost_lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """Lists of modules that lie in no other, with their paths."""
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and module not in inside:
            inside.update(module.modules())
            yield path, module


@dataclass
class ObservedLayers:
    """What `observe` saw.

    rotations: what rotated the prompt.
    problem: why the layers' calls are not known, or "".
    """

    rotations: Rotations = field(default_factory=list)
    problem: str = ""


def observe(model: Any, layers: list[LayerCalls], config: Any) -> ObservedLayers:
    """Fills in how `model`, of transformers, calls `layers` for a prompt and one more token."""
    kind = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        return ObservedLayers(problem=f"{kind} is an encoder and a decoder")
    watch = _Watch({layer.module: layer for layer in layers})
    problem = ""
    try:
        with watch.watching(model), torch.no_grad():
            tokens = sample_tokens(model, sample_length(config) + 1)
            cache = _after_prompt(model, tokens[:, :-1])
            watch.phase = "token"
            if cache:
                token = _given(model, tokens, tokens.shape[1] - 1)
                model(**token, use_cache=True, **cache)
            else:
                problem = f"{kind} keeps nothing of earlier tokens"
    except Exception as error:  # such a model needs more than tokens: it is reported, and left
        pass_on_interruption(error)
        line = (str(error).splitlines() or [""])[0]
        problem = f"{kind} does not run on tokens alone ({type(error).__name__}: {line})"
    return ObservedLayers(watch.rotations, problem)


class _Watch:
    """Notes the calls of decoder layers, and of what makes rotary angles outside of them.

    phase: "prompt" or "token".
    """

    def __init__(self, calls: dict[nn.Module, LayerCalls]) -> None:
        self.phase = "prompt"
        self.rotations: Rotations = []
        self._calls = calls

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        inside = {part for m in self._calls for part in m.modules()}
        outside = [m for m in model.modules() if m not in inside and not [*m.parameters()]]
        with ExitStack() as hooks:
            for m in self._calls:
                hooks.enter_context(m.register_forward_pre_hook(self._called, with_kwargs=True))
                hooks.enter_context(m.register_forward_hook(self._returned))
            for m in outside:
                hooks.enter_context(m.register_forward_hook(self._rotated, with_kwargs=True))
            yield

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        setattr(self._calls[module], self.phase, named_arguments(module, args, kwargs))
        if self.phase == "prompt":
            self._calls[module].hidden = args[0] if args else kwargs["hidden_states"]

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        self._calls[module].results = len(output) if isinstance(output, tuple) else 0
        if self.phase == "prompt":
            self._calls[module].output = output[0] if isinstance(output, tuple) else output

    def _rotated(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        pair = isinstance(output, tuple) and len(output) == 2
        if self.phase != "prompt" or not pair or not all(isinstance(t, Tensor) for t in output):
            return
        named = {name: value for name, value in kwargs.items() if name not in ("x", "position_ids")}
        rest = args[2 - len(kwargs) + len(named) :]
        call = Rotation(module, rest, tuple(named.items()))
        if not any(isinstance(value, Tensor) for value in (*rest, *named.values())):
            self.rotations.append((call, output[0]))


def _after_prompt(model: Any, tokens: Tensor) -> dict[str, Any]:
    """The state of a model that read a prompt, under the name that it takes it by, or nothing."""
    from transformers.cache_utils import DynamicCache

    from .transformers_cache import caches_keys, keys_argument, state_of

    prompt = _given(model, tokens, 0)
    name = keys_argument(model)
    if name is None or not caches_keys(model):
        return state_of(model, model(**prompt, use_cache=True))
    # Without the model's configuration no layer forgets what left a window.
    state = {name: DynamicCache()}
    model(**prompt, **state, use_cache=True)
    return state


def _given(model: Any, tokens: Tensor, start: int) -> dict[str, Tensor]:
    """A call with the tokens [1, length] from `start` on, and positions as `generate` gives them.

    Without these some models go by what they remember of the call before.
    """
    from .transformers_cache import forward_arguments

    given = {"input_ids": tokens[:, start:]}
    if "position_ids" in forward_arguments(model):
        given["position_ids"] = torch.arange(start, tokens.shape[1], device="cpu")[None]
    return given


def named_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Returns a call's arguments by name, without the hidden states."""
    names = [*inspect.signature(type(module).forward).parameters][1:]
    return {**dict(zip(names[1:], args[1:], strict=False)), **kwargs}


def move(layers: list[LayerCalls], rotations: Rotations, model: nn.Module, copy: nn.Module) -> None:
    """Makes what was seen of a model that of a copy of it."""
    paths = {module: path for path, module in model.named_modules()}
    for layer in layers:
        layer.module = copy.get_submodule(layer.path)
    for index, (call, cos) in enumerate(rotations):
        module = copy.get_submodule(paths[call.module])
        rotations[index] = (Rotation(module, call.rest, call.named), cos)
