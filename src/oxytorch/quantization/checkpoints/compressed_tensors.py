"""Checkpoints of compressed-tensors, as llm-compressor writes them.

pack-quantized:

    weight_packed      int32 [out, in * bits / 32]      codes plus 2^(bits - 1), inputs in order
    weight_scale       [out, groups]
    weight_zero_point  int32 [out * bits / 32, groups], packed like codes; older files int8
                       [out, groups]
    weight_shape       int64 [2]
    weight_g_idx       int32 [in]                       the group of each input (act-order)

int-quantized: weight int8 [out, in] with the same scales; activations may be quantized to 8 bits
for each token when they are multiplied.

float-quantized: weight float8_e4m3fn [out, in] with the same scales, or one for each block of
block_structure, weight_scale [out / 128, in / 128], each rounded up. Activations that such a file
wants quantized stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.errors import CheckpointError
from ...core.tensor_file import TensorFiles
from .scheme import (
    Codes,
    Scheme,
    fields_of,
    holds_float8,
    in_groups,
    is_size,
    is_tensor_scale,
    known_groups,
    take,
    take_block_scales,
    take_float8,
    take_scales,
    take_tensor_scale,
)

_INTEGERS: dict[str, tuple[Any, ...]] = {
    "type": ("int",),
    "num_bits": (4, 8),
    "strategy": ("channel", "group", "tensor"),
}
_FLOATS: dict[str, tuple[Any, ...]] = {
    "type": ("float",),
    "num_bits": (8,),
    "strategy": ("channel", "group", "tensor", "block"),
    "symmetric": (True, None),
}
_FORMATS = {"pack-quantized": _INTEGERS, "int-quantized": _INTEGERS, "float-quantized": _FLOATS}
"""What the settings of weights may be in each format."""


class CompressedTensors(Scheme):
    """Integers of 4 and 8 bits and floats of 8, per channel, group, block or tensor."""

    suffixes = (
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
    )
    # Scales for keys and values of a cache of 8 bits; ours has its own. Scales of activations that
    # stay as they are.
    ignored = ("k_scale", "v_scale", "k_zero_point", "v_zero_point", "input_scale")

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        super().__init__(config, source)
        self.one_of("quantization_status", ("compressed", "frozen"), "compressed")
        sparsity = config.get("sparsity_config") or {}
        if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
            raise self.refuse("sparsity_config", "with the format 'dense'", sparsity)
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise self.refuse("config_groups", "to hold at least one group", groups)
        self.groups = {name: self._checked(name, group) for name, group in groups.items()}

    def _checked(self, name: str, group: Any) -> Mapping[str, Any]:
        setting = f"config_groups.{name}"
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise self.refuse(f"{setting}.weights", "to say how weights are quantized", group)
        form = group.get("format") or self.config.get("format")
        if not isinstance(form, str) or form not in _FORMATS:
            raise self.refuse("format", f"one of {', '.join(_FORMATS)}", form)
        weights = group["weights"]
        for key, wanted in _FORMATS[form].items():
            if weights.get(key) not in wanted:
                raise self.refuse(f"{setting}.weights.{key}", f"one of {wanted}", weights.get(key))
        if weights["strategy"] == "block" and not is_size(weights.get("block_structure")):
            raise self.refuse(
                f"{setting}.weights.block_structure",
                "two sizes above 0",
                weights.get("block_structure"),
            )
        self._check_targets(setting, group)
        self._check_inputs(setting, group, weights["type"])
        return group

    def _check_targets(self, setting: str, group: Mapping[str, Any]) -> None:
        targets = group.get("targets")
        if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
            raise self.refuse(f"{setting}.targets", "to be a list of names", targets)
        for target in targets:
            try:
                re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
            except re.error as error:
                raise self.refuse(
                    f"{setting}.targets", f"with patterns ({error})", target
                ) from error

    def _check_inputs(self, setting: str, group: Mapping[str, Any], type: str) -> None:
        inputs = group.get("input_activations")
        if inputs is None:
            return
        needed = {"num_bits": 8, "type": type}
        wanted = f"of type {type} and 8 bits"
        if type == "int":
            needed["dynamic"] = True
            wanted = "of type int, 8 bits and dynamic"
        if not isinstance(inputs, Mapping) or any(
            inputs.get(key) != value for key, value in needed.items()
        ):
            raise self.refuse(f"{setting}.input_activations", wanted, inputs)

    def holds(self, files: TensorFiles, path: str) -> bool:
        if f"{path}.weight_packed" in files:
            return True
        if holds_float8(files, path):
            return True
        name = f"{path}.weight"
        return name in files and files.place(name).dtype == torch.int8

    def read(self, files: TensorFiles, path: str, shape: tuple[int, int]) -> Codes:
        group = self._group_of(path)
        weights = group["weights"]
        if weights["type"] == "float":
            return self._floats(files, path, shape, weights)
        bits: int = weights["num_bits"]
        codes = self._codes(files, path, shape, bits)
        count = self._scale_count(files, path, shape)
        scales = self._scales(files, path, shape, count)
        zeros = (
            None if weights.get("symmetric", True) else self._zeros(files, path, shape, count, bits)
        )
        codes, order = in_groups(files, f"{path}.weight_g_idx", codes, count)
        activation_dtype = None if group.get("input_activations") is None else "int8"
        return known_groups(path, f"int{bits}", codes, scales, zeros, order, activation_dtype)

    def _floats(
        self, files: TensorFiles, path: str, shape: tuple[int, int], weights: Mapping[str, Any]
    ) -> Codes:
        codes = take_float8(files, path, shape)
        if weights["strategy"] == "block":
            block = weights["block_structure"]
            scales = take_block_scales(files, f"{path}.weight_scale", shape, block)
        else:
            scales = self._scales(files, path, shape, self._scale_count(files, path, shape))
        return known_groups(path, "fp8", codes, scales, None)

    def _group_of(self, path: str) -> Mapping[str, Any]:
        """The group whose targets name a module; names win over kinds of modules."""
        for group in self.groups.values():
            if any(_names(target, path) for target in group.get("targets", ())):
                return group
        for group in self.groups.values():
            if "Linear" in group.get("targets", ()):
                return group
        targets = [target for group in self.groups.values() for target in group.get("targets", ())]
        raise self.refuse("config_groups", f"with a target for {path}", targets)

    def _codes(self, files: TensorFiles, path: str, shape: tuple[int, int], bits: int) -> Tensor:
        out, columns = shape
        if f"{path}.weight_packed" not in files:
            plain = take(files, f"{path}.weight", (torch.int8,), shape)
            middle = 2 ** (bits - 1)
            codes: Tensor = plain.view(torch.uint8) + middle
            if bits == 4 and bool((codes > 15).any()):
                raise CheckpointError(
                    f"{files.path(f'{path}.weight')}: expected tensor '{path}.weight' to hold "
                    "codes of 4 bits, got larger ones"
                )
            return codes
        if f"{path}.weight_shape" in files:
            given = take(files, f"{path}.weight_shape", (torch.int64, torch.int32), (2,)).tolist()
            if tuple(given) != shape:
                raise CheckpointError(
                    f"{files.path(f'{path}.weight_shape')}: expected '{path}.weight_shape' to say "
                    f"{list(shape)}, got {given}"
                )
        size = -(-columns * bits // 32)
        words = take(files, f"{path}.weight_packed", (torch.int32,), (out, size))
        return fields_of(words, bits).flatten(1)[:, :columns].contiguous()

    def _scale_count(self, files: TensorFiles, path: str, shape: tuple[int, int]) -> int:
        name = f"{path}.weight_scale"
        if name not in files:
            raise CheckpointError(f"checkpoint: expected a tensor {name!r}, found none")
        found = files.place(name).shape
        count = found[1] if len(found) == 2 else 1
        if not count or shape[1] % count:
            raise CheckpointError(
                f"{files.path(name)}: expected tensor {name!r} to have a number of columns "
                f"(groups) that divides in_features {shape[1]}, got {list(found)}"
            )
        return count

    def _scales(self, files: TensorFiles, path: str, shape: tuple[int, int], count: int) -> Tensor:
        name = f"{path}.weight_scale"
        if is_tensor_scale(files, name) and shape[0] != 1:
            return take_tensor_scale(files, name, shape[0])
        return take_scales(files, name, (shape[0], count))

    def _zeros(
        self, files: TensorFiles, path: str, shape: tuple[int, int], count: int, bits: int
    ) -> Tensor:
        out, name = shape[0], f"{path}.weight_zero_point"
        if name in files and files.place(name).dtype == torch.int8:
            plain = take(files, name, (torch.int8,), (out, count))
            zeros: Tensor = plain.view(torch.uint8) + 2 ** (bits - 1)
            return zeros
        words = take(files, name, (torch.int32,), (-(-out * bits // 32), count))
        return fields_of(words, bits).transpose(1, 2).reshape(-1, count)[:out].contiguous()


def _names(target: str, path: str) -> bool:
    """Whether a target is a module's path, its end, or a pattern for it."""
    if target.startswith("re:"):
        return re.match(target[3:], path) is not None
    return target == path or path.endswith(f".{target}")
