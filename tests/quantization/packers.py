"""Checkpoints written from the formats' descriptions, code by code: nothing of the readers is used.

Codes are numpy arrays [out, in] of unsigned values, scales and zero points [out, groups].
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file


def words(fields: np.ndarray, bits: int) -> np.ndarray:
    """Pack the last dimension's fields into 32-bit words, the first field in the lowest bits."""
    per_word = 32 // bits
    missing = -fields.shape[-1] % per_word
    fields = np.pad(fields, [(0, 0)] * (fields.ndim - 1) + [(0, missing)])
    result = np.zeros((*fields.shape[:-1], fields.shape[-1] // per_word), dtype=np.uint64)
    for index in range(fields.shape[-1]):
        field = fields[..., index].astype(np.uint64)
        result[..., index // per_word] |= field << np.uint64(bits * (index % per_word))
    return result.astype(np.uint32).view(np.int32)


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def gptq(
    path: str,
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray,
    *,
    bits: int,
    group_of: np.ndarray | None = None,
    version: int = 1,
) -> dict[str, torch.Tensor]:
    """AutoGPTQ's tensors. group_of: the group of each input; None is one after the other."""
    columns, groups = codes.shape[1], scales.shape[1]
    if group_of is None:
        group_of = np.arange(columns) // (columns // groups)
    stored = zeros - 1 if version == 1 else zeros
    return {
        f"{path}.qweight": tensor(words(codes, bits).T),
        f"{path}.qzeros": tensor(words(stored.T & (2**bits - 1), bits)),
        f"{path}.scales": tensor(scales.T.astype(np.float16)),
        f"{path}.g_idx": tensor(group_of.astype(np.int32)),
    }


def awq(
    path: str, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray
) -> dict[str, torch.Tensor]:
    """AutoAWQ's tensors for "gemm": field i of a word is output order[i] of eight."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(values: np.ndarray) -> torch.Tensor:  # [rows, out]
        eights = values.reshape(values.shape[0], -1, 8)[..., order]
        return tensor(words(eights.reshape(values.shape), 4))

    return {
        f"{path}.qweight": packed(codes.T),
        f"{path}.qzeros": packed(zeros.T),
        f"{path}.scales": tensor(scales.T.astype(np.float16)),
    }


def compressed(
    path: str,
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    *,
    bits: int,
    group_of: np.ndarray | None = None,
) -> dict[str, torch.Tensor]:
    """compressed-tensors' "pack-quantized"; zero points are packed along the outputs."""
    found = {
        f"{path}.weight_packed": tensor(words(codes, bits)),
        f"{path}.weight_scale": tensor(scales).to(torch.bfloat16),
        f"{path}.weight_shape": torch.tensor(codes.shape),
    }
    if zeros is not None:
        found[f"{path}.weight_zero_point"] = tensor(words(zeros.T, bits).T)
    if group_of is not None:
        found[f"{path}.weight_g_idx"] = tensor(group_of.astype(np.int32))
    return found


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FP8_BLOCKS = {**FP8, "weight_block_size": [128, 128]}


def float8(path: str, codes: np.ndarray, scales: torch.Tensor, name: str) -> dict[str, Any]:
    """Weights of E4M3 numbers, beside the scales of what "fp8" or compressed-tensors say."""
    return {
        f"{path}.weight": tensor(codes.astype(np.uint8)).view(torch.float8_e4m3fn),
        f"{path}.{name}": scales,
    }


def random_float8(out: int, columns: int, seed: int = 0) -> np.ndarray:
    """Codes of E4M3 numbers but NaN."""
    codes = np.random.default_rng(seed).integers(0, 256, (out, columns))
    return np.where(codes & 0x7F == 0x7F, 0x80, codes)


def float8_values(
    codes: np.ndarray, scales: np.ndarray, block: tuple[int, int] | None = None
) -> torch.Tensor:
    """Sign, 4 bits of exponent (bias 7), 3 of mantissa; times the scale of the number's block."""
    exponents, mantissas = codes >> 3 & 15, codes & 7
    normal = (8 + mantissas) * 2.0 ** (exponents - 10.0)
    numbers = np.where(exponents == 0, mantissas * 2.0**-9, normal) * np.where(codes < 128, 1, -1)
    rows, columns = (np.arange(size) for size in codes.shape)
    if block is None:
        block = (codes.shape[0] // scales.shape[0], codes.shape[1] // scales.shape[1])
    each = scales[np.ix_(rows // block[0], columns // block[1])]
    return tensor(numbers.astype(np.float32) * each.astype(np.float32))


def float8_settings(strategy: str, **more: Any) -> dict[str, Any]:
    """The quantization_config of compressed-tensors for E4M3."""
    found = compressed_settings(8, True, None, "float-quantized")
    found["config_groups"]["group_0"]["weights"] |= {"type": "float", "strategy": strategy, **more}
    return found


def compressed_settings(
    bits: int, symmetric: bool, group_size: int | None, format: str = "pack-quantized", **more: Any
) -> dict[str, Any]:
    """The quantization_config of compressed-tensors."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def write(
    directory: Path,
    tensors: dict[str, torch.Tensor],
    settings: dict[str, Any],
    config: dict[str, Any] | None = None,
) -> Path:
    """A directory with model.safetensors and config.json."""
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    values = {**(config or {"dtype": "float32"}), "quantization_config": settings}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def random_codes(
    out: int, columns: int, groups: int, bits: int, seed: int = 0, symmetric: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales that bfloat16 and float16 hold exactly, and zero points from 1 on."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 2**bits, (out, columns))
    scales = random.integers(64, 128, (out, groups)) / 8192.0
    zeros = random.integers(1, 2**bits, (out, groups))
    if symmetric:
        zeros = np.full((out, groups), 2 ** (bits - 1))
    return codes, scales.astype(np.float32), zeros


def values(
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray,
    group_of: np.ndarray | None = None,
) -> torch.Tensor:
    """scale (code - zero point), float32."""
    columns, groups = codes.shape[1], scales.shape[1]
    if group_of is None:
        group_of = np.arange(columns) // (columns // groups)
    return tensor((scales[:, group_of] * (codes - zeros[:, group_of])).astype(np.float32))
