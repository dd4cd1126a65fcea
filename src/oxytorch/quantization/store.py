"""Quantized models on disk: `oxytorch.safetensors` with the packed weights and `oxytorch.json`.

The weights are stored as kernels read them, so that loading maps the file and several processes
share its memory. Version 1 of `oxytorch.json`:

    format, version    "oxytorch.quantized", 1
    model              the class of the model
    transformers       whether config.json describes the model to transformers
    weights            for each packed weight: format, shape, group_size, dtype, activation, gated,
                       transposed; its tensors are <name>.panels and so on
    shared             names of tensors that are the same as another
    sha256             of each tensor's bytes
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.packed import PackedTensor
from ..ops._panels import PanelWeight
from ..optimize.record import record_of
from .building import empty_model, read_json
from .errors import CheckpointError
from .filling import Filling, cast, check_slot, slots
from .tensor_file import TensorFile, TensorFiles, bytes_of, write
from .weights import ReorderedPanelWeight

FORMAT = "oxytorch.quantized"
VERSION = 1
DESCRIPTION = "oxytorch.json"
TENSORS = "oxytorch.safetensors"

_PARTS = ("panels", "channel_scales", "group_scales", "zero_points", "order")


def save_quantized(model: nn.Module, directory: str | Path) -> None:
    """Write a model that `quantize_` made into a directory, packed as it is in memory.

    directory: made if it is not there; files of an earlier save are replaced. A model of
    transformers is written with its configuration, so that `load_quantized(directory)` needs
    nothing else. Raises ValueError for an optimized model: undo the optimization, save, and
    optimize again after loading.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"save_quantized: expected model to be a torch.nn.Module, got a {type(model).__name__}"
        )
    if record_of(model) is not None:
        raise ValueError(
            "save_quantized: expected a model that is quantized and not optimized, got an "
            "optimized one; call oxytorch.undo(model), save, and optimize again"
        )
    tensors: dict[str, Tensor] = {}
    weights: dict[str, Any] = {}
    shared: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in slots(model).items():
        if tensor.device.type != "cpu":
            raise ValueError(
                f"save_quantized: expected all tensors on the CPU, got {name!r} on {tensor.device}"
            )
        if id(tensor) in first:
            shared[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        if isinstance(tensor, (PanelWeight, ReorderedPanelWeight)):
            weights[name], parts = _described(tensor)
            tensors |= {f"{name}.{part}": value for part, value in parts.items()}
        else:
            tensors[name] = tensor.dense() if isinstance(tensor, PackedTensor) else tensor.detach()
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    hashes = write(target / TENSORS, tensors, {"format": "pt"})
    described = _save_configuration(model, target)
    description = {
        "format": FORMAT,
        "version": VERSION,
        "model": type(model).__name__,
        "transformers": described,
        "weights": weights,
        "shared": shared,
        "sha256": hashes,
    }
    (target / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")


def _described(weight: PanelWeight | ReorderedPanelWeight) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what `oxytorch.json` says of a packed weight, and its tensors."""
    inner = weight.packed if isinstance(weight, ReorderedPanelWeight) else weight
    parts = inner.tensors()
    if isinstance(weight, ReorderedPanelWeight) and weight.order is not None:
        parts["order"] = weight.order
    entry = {
        "format": inner.format,
        "shape": list(inner.shape),
        "group_size": inner.group_size,
        "dtype": str(inner.dtype).removeprefix("torch."),
        "activation": inner.activation,
        "gated": inner.is_gated,
        "transposed": isinstance(weight, ReorderedPanelWeight) and weight.transposed,
    }
    return entry, parts


def _save_configuration(model: nn.Module, directory: Path) -> bool:
    """Write the configuration of a model of transformers; return whether it is one."""
    config = getattr(model, "config", None)
    if not callable(getattr(config, "to_json_file", None)):
        return False
    values = json.loads(config.to_json_string())  # type: ignore[union-attr]
    values.pop("quantization_config", None)
    values["architectures"] = [type(model).__name__]
    values["dtype"] = str(model.dtype).removeprefix("torch.")
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    generation = getattr(model, "generation_config", None)
    if callable(getattr(generation, "to_json_string", None)):
        text = generation.to_json_string()  # type: ignore[union-attr]
        (directory / "generation_config.json").write_text(text, encoding="utf-8")
    return True


def load_stored(
    directory: Path,
    model: nn.Module | Callable[[], nn.Module] | None,
    dtype: torch.dtype | None,
    verify: bool,
) -> nn.Module:
    """Load what `save_quantized` wrote; see `load_quantized`."""
    description = _description(directory)
    if model is None and not description["transformers"]:
        raise ValueError(
            f"load_quantized: expected model, because {directory} holds a "
            f"{description['model']}, which is no model of transformers; give it or what makes it"
        )
    files = TensorFiles([TensorFile(directory / TENSORS)])
    filling = Filling(empty_model(directory, model, dtype), str(directory / TENSORS))
    wanted = slots(filling.model)
    used: set[str] = set()
    for name, entry in description["weights"].items():
        parts = {part: f"{name}.{part}" for part in _PARTS if f"{name}.{part}" in files}
        used.update(parts.values())
        tensors = {part: files[key] for part, key in parts.items()}
        filling.packed[name] = _weight(name, entry, tensors, directory, dtype)
        check_slot(filling.source, name, filling.packed[name], wanted)
    for name in files:
        if name not in used:
            filling.plain[name] = files[name] if dtype is None else cast(files[name], dtype)
            check_slot(filling.source, name, filling.plain[name], wanted)
    filling.shared = dict(description["shared"])
    filling.check_complete([])
    if verify:
        _verify(files, description["sha256"])
    filling.check_finite()
    filling.put(", ".join(sorted({entry["format"] for entry in description["weights"].values()})))
    return filling.model


def _description(directory: Path) -> dict[str, Any]:
    path = directory / DESCRIPTION
    found = read_json(path)
    if found.get("format") != FORMAT or found.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: expected format {FORMAT!r} of version {VERSION}, got {found.get('format')!r} "
            f"of version {found.get('version')!r}; a newer oxytorch may read it"
        )
    kinds = {"model": str, "transformers": bool, "weights": dict, "shared": dict, "sha256": dict}
    for key, kind in kinds.items():
        if not isinstance(found.get(key), kind):
            raise CheckpointError(
                f"{path}: expected {key} to be a {kind.__name__}, got {found.get(key)!r}"
            )
    return found


def _weight(
    name: str,
    entry: Any,
    tensors: dict[str, Tensor],
    directory: Path,
    dtype: torch.dtype | None,
) -> PackedTensor:
    """Return a packed weight over the file's memory."""
    source = directory / DESCRIPTION
    try:
        order = tensors.pop("order", None)
        own = getattr(torch, entry["dtype"])
        if own not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"expected a floating dtype, got {own}")
        packed = PanelWeight.from_tensors(
            tensors,
            format=entry["format"],
            shape=tuple(entry["shape"]),
            group_size=entry["group_size"],
            dtype=dtype or own,
            gated=entry["gated"],
        )
        if entry["activation"] not in (None, "int8"):
            raise ValueError(f"expected activation None or 'int8', got {entry['activation']!r}")
        packed.activation = entry["activation"]
        _check_order(order, packed.shape[1])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{source}: expected weight {name!r} to fit its tensors in {TENSORS}, got "
            f"{type(error).__name__}: {error}"
        ) from error
    for part in ("channel_scales", "group_scales"):
        scales = tensors.get(part)
        if scales is not None and not bool(scales.isfinite().all()):
            raise CheckpointError(
                f"{directory / TENSORS}: expected finite values in tensor '{name}.{part}', got NaN "
                "or infinity"
            )
    return ReorderedPanelWeight.around(packed, bool(entry["transposed"]), order)


def _check_order(order: Tensor | None, columns: int) -> None:
    if order is None:
        return
    whole = order.dtype == torch.int64 and order.shape == (columns,)
    if not whole or not torch.equal(order.sort().values, torch.arange(columns)):
        raise ValueError(f"expected order to hold each of {columns} inputs once")


def _verify(files: TensorFiles, hashes: dict[str, str]) -> None:
    """Raise CheckpointError that names the first tensor whose bytes are not those written."""

    def altered(name: str) -> bool:
        tensor = files[name]
        return hashlib.sha256(bytes_of(tensor)).hexdigest() != hashes.get(name)

    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        for name, is_altered in zip(files, pool.map(altered, files), strict=True):
            if is_altered:
                raise CheckpointError(
                    f"{files.path(name)}: expected tensor {name!r} to have the sha256 that "
                    f"{DESCRIPTION} tells, got another; the file was altered"
                )
