"""The forwards of recurrent layers and embeddings whose weights are bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..core.converted import converted
from ..core.modes import must_run_plain
from ..core.watched import is_parameter
from ..graph.forward import Forward
from ..graph.recognize import holds_its_parameters
from ..graph.recommendation import is_plain_bag
from ..graph.recurrent import RecurrentForward, input_and_state, states_fit
from ..ops.quantized_embedding_bag import quantized_embedding_bag
from ..ops.quantized_gru import quantized_gru
from ..ops.quantized_lstm import quantized_lstm
from .byte_weights import GateWeight, TableWeight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of what layers take and give, whatever their weights' dtype is."""


class ByteRecurrentForward(RecurrentForward):
    """The forward of an LSTM or GRU whose weights are bytes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = input_and_state(args, kwargs)
        found = None if given is None else self._of_bytes(*given)
        return self.own(*args, **kwargs) if found is None else found

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, of any floating dtype, on plain values."""
        weight: Any = self.module._parameters.get("weight_ih_l0")
        given = input_and_state(args, kwargs)
        if given is None or weight is None or torch.is_autocast_enabled("cpu"):
            return super().own(*args, **kwargs)
        x = given[0]
        dtype = x.data.dtype if isinstance(x, PackedSequence) else getattr(x, "dtype", None)
        if dtype not in DTYPES or weight.dtype not in DTYPES or dtype == weight.dtype:
            return super().own(*args, **kwargs)
        x, hx = (converted(each, weight.dtype) for each in given)
        return converted(super().own(x, hx), dtype)

    def _of_bytes(self, x: Any, hx: Any) -> Any:
        module: Any = self.module
        data, sizes = (x.data, x.batch_sizes.tolist()) if _is_packed(x) else (x, None)
        states = () if hx is None else hx if isinstance(module, nn.LSTM) else (hx,)
        if (
            not self._is_known(data, states)
            or data.dim() not in ((2, 3) if sizes is None else (2,))
            or module.training
        ):
            return None
        if sizes is not None:
            return self._packed_sequence(x, sizes, states)
        if not states_fit(module, data, states):
            return None
        batch = 0 if module.batch_first else 1
        if data.dim() == 2:
            output, last = self._run(
                data.unsqueeze(1), tuple(state.unsqueeze(1) for state in states), None
            )
            return output.squeeze(1), _of_kind(module, [state.squeeze(1) for state in last])
        output, last = self._run(data.transpose(0, 1) if batch == 0 else data, states, None)
        return output.transpose(0, 1) if batch == 0 else output, _of_kind(module, last)

    def _packed_sequence(
        self, x: PackedSequence, sizes: list[int], states: tuple[Tensor, ...]
    ) -> Any:
        module: Any = self.module
        layers = module.num_layers * (2 if module.bidirectional else 1)
        wanted = (layers, sizes[0], module.hidden_size)
        if any(tuple(state.shape) != wanted for state in states):
            return None
        if x.sorted_indices is not None:
            states = tuple(state.index_select(1, x.sorted_indices) for state in states)
        output, last = self._run(x.data, states, sizes)
        if x.unsorted_indices is not None:
            last = [state.index_select(1, x.unsorted_indices) for state in last]
        packed = PackedSequence(output, x.batch_sizes, x.sorted_indices, x.unsorted_indices)
        return packed, _of_kind(module, last)

    def _is_known(self, x: Any, states: Any) -> bool:
        """Whether the kernel gives what the module's own code does for such a call."""
        module: Any = self.module
        parameters = module._parameters
        if type(x) is not Tensor or not isinstance(states, tuple):
            return False
        if any(type(state) is not Tensor or state.dtype != x.dtype for state in states):
            return False
        return (
            not must_run_plain(x, *states, *parameters.values())
            and x.dtype in DTYPES
            and x.layout == torch.strided
            and not x.is_nested
            and x.numel() > 0
            and x.shape[-1] == module.input_size
            and type(module).forward is self._class_forward
            and holds_its_parameters(module, module._flat_weights_names)
            and all(
                parameters[name].is_packed()
                if isinstance(parameters[name], GateWeight)
                else name.startswith("bias") and is_parameter(parameters[name])
                for name in module._flat_weights_names
            )
        )

    def _run(
        self, x: Tensor, states: tuple[Tensor, ...], sizes: list[int] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """x: [steps, batch, features], or the rows of a packed sequence."""
        module: Any = self.module
        lists: dict[str, list[Tensor]] = {}
        for name in module._flat_weights_names:
            parameter = module._parameters[name]
            part = "input" if "_ih_" in name else "hidden"
            if isinstance(parameter, GateWeight):
                for key, tensor in parameter.tensors.items():
                    lists.setdefault(f"{part}_{key}", []).append(tensor)
            else:
                lists.setdefault(f"{part}_biases", []).append(parameter)
        none: list[Tensor] = []
        run: Any = quantized_lstm if isinstance(module, nn.LSTM) else quantized_gru
        count = 2 if isinstance(module, nn.LSTM) else 1
        direction = "both" if module.bidirectional else "forward"
        output, *last = run(
            x, *(states or [None] * count), **{"input_biases": none, "hidden_biases": none} | lists,
            hidden_size=module.hidden_size, direction=direction, batch_sizes=sizes,
        )  # fmt: skip
        return output, last


def _is_packed(x: Any) -> bool:
    return type(x) is PackedSequence


def _of_kind(module: nn.Module, states: list[Tensor]) -> Any:
    """Last states as the module returns them."""
    return tuple(states) if isinstance(module, nn.LSTM) else states[0]


class ByteTableForward(Forward):
    """The forward of an embedding or embedding bag whose table is bytes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        look_up: Any = self._bags if isinstance(self.module, nn.EmbeddingBag) else self._rows
        try:
            found = look_up(*args, **kwargs)
        except (RuntimeError, TypeError):  # the module's own code says what is wrong
            found = None
        return self.own(*args, **kwargs) if found is None else found

    def _table(self, *tensors: Tensor | None) -> Any:
        """The table, where it may be read as it is. tensors: the arguments of the call."""
        module: Any = self.module
        weight: Any = module._parameters.get("weight")
        fits = (
            isinstance(weight, TableWeight)
            and weight.dtype in DTYPES
            and all(t is None or (type(t) is Tensor and t.is_cpu) for t in tensors)
            and type(module).forward is self._class_forward
            and module.max_norm is None
            and not must_run_plain(weight, *tensors)
            and weight.is_packed()
        )
        return weight if fits else None

    def _rows(self, input: Tensor) -> Tensor | None:
        weight = self._table(input)
        if weight is None:
            return None
        places = input.reshape(-1, 1)
        table = weight.tensors["rows"]
        rows = quantized_embedding_bag(table, places, out_dtype=_NAMES[weight.dtype])
        return rows.view(*input.shape, weight.shape[1])

    def _bags(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor | None:
        module: Any = self.module
        factors = per_sample_weights
        weight = self._table(input, offsets, factors)
        is_plain = is_plain_bag(module) and not counts_differ(module)
        if weight is None or not is_plain or (input.dim() == 1) != (offsets is not None):
            return None
        return quantized_embedding_bag(
            weight.tensors["rows"],
            input,
            offsets,
            module.mode,
            None if factors is None else factors.float(),
            module.include_last_offset and offsets is not None,
            _NAMES[weight.dtype],
        )


_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}


def counts_differ(module: Any) -> bool:
    """Whether torch divides by other counts than our kernel: those of a last bag that ends before
    the indices do."""
    return module.mode == "mean" and bool(module.include_last_offset)
