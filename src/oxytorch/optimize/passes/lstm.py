"""Pass `lstm`: LSTM layers with packed weights; oneDNN would else reorder them at every call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.modes import must_run_plain
from ...core.watched import is_parameter
from ...graph.recognize import holds_its_parameters
from ...graph.recurrent import RecurrentForward, input_and_state, states_fit, with_weights
from ...ops.lstm import PackedLstmWeight, lstm, why_not_packed
from ...rewriting.measure import Calls, first_win, numbers
from ..context import OptimizeContext
from .pack import HELD_ELSEWHERE, cast_plain

_USUAL_SIZES = ((1, 1), (16, 1), (16, 8))
"""Steps and batch of the inputs that are timed where no sample tells."""


def refusal(context: OptimizeContext, module: nn.LSTM) -> str | None:
    """Return why an LSTM's weights cannot be packed, or None if they can."""
    if module.proj_size:
        return "LSTM with projections"
    if not holds_its_parameters(module, module._flat_weights_names):
        return "LSTM: a weight is no parameter of it"
    for name, parameter in module._parameters.items():
        if not is_parameter(parameter):
            return f"LSTM: {name} is a {type(parameter).__name__}"
        if parameter.device.type != "cpu":
            return f"LSTM: {name} is on {parameter.device}"
        if len(context.owners.get(id(parameter), [])) > 1:
            return f"LSTM: {name} is shared with another module"
    if context.is_held_elsewhere(module):
        return f"LSTM: {HELD_ELSEWHERE}"
    if module in context.observed.without_tensor:
        return "LSTM: it is given no tensor, but a PackedSequence perhaps"
    weight = module._parameters["weight_ih_l0"]
    assert weight is not None
    dtype = context.target_dtype(module, weight)
    return why_not_packed(dtype)


def run(context: OptimizeContext) -> None:
    for module in context.open_modules():
        if type(module) is not nn.LSTM:
            continue
        reason = refusal(context, module)
        if reason is not None:
            context.skipped("lstm", module, reason)
            continue
        plain: dict[str, torch.Tensor] = {}
        for name, parameter in module._parameters.items():
            assert parameter is not None
            plain[name] = parameter.detach().to(context.target_dtype(module, parameter))
        packed = _packed_weights(module, plain)
        converts = context.converts(module)
        if not _pays(context, module, plain, packed):
            cast_plain(context, module)
            context.skipped("lstm", module, "LSTM: torch's own is as fast here")
            continue
        for name, values in packed.items():
            parameter = module._parameters[name]
            assert parameter is not None
            if name.startswith("weight") or values.dtype != parameter.dtype:
                context.set_parameter(module, name, _parameter(values, parameter.requires_grad))
        context.log.prepare_for_packed(module)
        context.log.set_forward(module, LstmForward(module, converts))
        context.applied("lstm", module, "LSTM with packed weights")


def packed(module: nn.LSTM) -> LstmForward:
    """The forward of an LSTM like this one with its weights packed, which converts its input."""
    plain: Any = {name: p.detach() for name, p in module._parameters.items() if p is not None}
    return LstmForward(with_weights(module, _packed_weights(module, plain)), converts=True)


def _packed_weights(module: nn.LSTM, plain: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: _packed(module, name, values) for name, values in plain.items()}


def _packed(module: nn.LSTM, name: str, values: torch.Tensor) -> torch.Tensor:
    if not name.startswith("weight"):
        return values
    kind = "input" if name.startswith("weight_ih") else "hidden"
    reverse = name.endswith("_reverse")
    return PackedLstmWeight(values, kind=kind, reverse=reverse, has_bias=module.bias)


def _pays(
    context: OptimizeContext,
    module: nn.LSTM,
    plain: dict[str, torch.Tensor],
    packed: dict[str, torch.Tensor],
) -> bool:
    """Whether the packed layer is faster than torch's own on inputs like the sample's."""
    size = context.observed.input_sizes.get(module)
    width, dtype = module.input_size, plain["weight_ih_l0"].dtype
    usual = [(count, batch, width) for count, batch in _USUAL_SIZES]
    if module.batch_first:
        usual = [(batch, count, width) for count, batch, _ in usual]
    own, forward = with_weights(module, plain), LstmForward(with_weights(module, packed))

    def calls(of: tuple[int, ...]) -> Calls:
        x = numbers(*of).to(dtype)
        return lambda: type(module).forward(own, x)[0], lambda: forward(x)[0]

    form = module.hidden_size, module.num_layers, module.bidirectional, module.bias
    key = ("lstm", width, *form, module.batch_first, dtype, size)
    return first_win(key, [calls(of) for of in ([size] if size else usual)]) == 0


def _parameter(values: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    if isinstance(values, PackedLstmWeight):
        return values.as_parameter(requires_grad)
    return nn.Parameter(values, requires_grad)


class LstmForward(RecurrentForward):
    """The forward of an LSTM with packed weights."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = input_and_state(args, kwargs)
        found = None if given is None else self._packed(*given)
        return self.own(*args, **kwargs) if found is None else found

    def _packed(self, x: Any, hx: Any) -> Any:
        if self._lost:
            self._repack()
        module: Any = self.module
        parameters = module._parameters.values()
        state = () if hx is None else hx
        if (
            type(x) is not torch.Tensor
            or x.is_nested
            or x.numel() == 0
            or x.dim() not in (2, 3)
            or x.shape[-1] != module.input_size
            or not isinstance(state, tuple)
            or not states_fit(module, x, state)
            or type(module).forward is not self._class_forward
            or module.training
            or must_run_plain(x, *state, *parameters)
            or not all(p.is_packed() for p in parameters if isinstance(p, PackedLstmWeight))
            or not all(
                isinstance(module._parameters.get(name), PackedLstmWeight)
                or (name.startswith("bias") and module._parameters.get(name) is not None)
                for name in module._flat_weights_names
            )
        ):
            return None
        dtype = next(iter(parameters)).dtype
        if any(t.dtype != dtype for t in (x, *state)) and not self.converts:
            return None
        try:
            return lstm(x, hx, module)
        except RuntimeError:  # the module's own code says what is wrong with x
            return None
