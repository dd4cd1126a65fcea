"""`load_quantized`: read a quantized model from a directory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.errors import CheckpointError
from ..core.json_file import read_json
from ..core.modes import with_normal_tensors
from ..core.tensor_file import TensorFile, TensorFiles
from ..ops.panels import PanelWeight
from ..rewriting.memory import check_available
from .building import empty_model
from .checkpoints import Scheme, scheme_of
from .filling import Filling, cast, check_slot, slots
from .store import DESCRIPTION, load_stored
from .weights import ReorderedPanelWeight

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@with_normal_tensors
def load_quantized(
    directory: str | Path,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    *,
    dtype: torch.dtype | None = None,
    shared: bool = True,
    verify: bool = True,
) -> nn.Module:
    """Return the quantized model in a directory.

    directory: written by `save_quantized`, or a checkpoint of GPTQ, AWQ, compressed-tensors or fp8
        (DeepSeek's) with weights of 4 or 8 bits, safetensors files and a config.json. Needs neither
        a GPU nor those packages.
    model: the module to fill, or a function that makes it; its parameters take no memory until they
        are replaced. None makes the language model of config.json with transformers.
    dtype: dtype of what is not quantized, and of results. None: that of the files, but for
        checkpoints bfloat16 instead of float16, which few CPUs multiply.
    shared: map the file, so that processes share its memory, which is filled when it is first read.
        False copies the packed weights into huge pages, if the system has them: int4 weights are
        read at 44 instead of 39 GB/s (benchmarks/quantized_files.py, two cores of an AMD Zen 4).
    verify: compare the sha256 of what `save_quantized` wrote.

    shared and verify are for directories of `save_quantized`. Do not write to its files while a
    model uses them; replacing them is safe. Nothing is unpickled, and no code in it is run.

    Raises CheckpointError, which names the file and the tensor or setting, for what does not fit,
    and MemoryError before work starts. A given model is then unchanged.
    """
    target = Path(directory)
    if not target.is_dir():
        raise CheckpointError(f"load_quantized: expected a directory, found none at {target}")
    if dtype is not None and dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"load_quantized: expected dtype float32, bfloat16, float16 or None, got {dtype}"
        )
    if (target / DESCRIPTION).is_file():
        return load_stored(target, model, dtype, shared, verify)
    if not (target / "config.json").is_file():
        raise CheckpointError(
            f"load_quantized: expected {DESCRIPTION} or config.json in {target}, found neither; "
            "it is no directory of a model"
        )
    return _load_checkpoint(target, model, dtype)


def _load_checkpoint(
    directory: Path, model: nn.Module | Callable[[], nn.Module] | None, dtype: torch.dtype | None
) -> nn.Module:
    path = directory / "config.json"
    config = read_json(path)
    settings = config.get("quantization_config")
    if settings is None:
        settings = _settings_beside(directory)
    if not isinstance(settings, dict):
        raise CheckpointError(
            f"{path}: expected a quantization_config, got {settings!r}; load a plain model with "
            "transformers' from_pretrained and call oxytorch.quantize_ on it"
        )
    scheme = scheme_of(settings, str(path))
    files = _files(directory)
    check_available("load_quantized", files.nbytes(), f"the weights of {directory}")
    filling = Filling(empty_model(directory, model, dtype or _dtype(config)), str(directory))
    _fill(filling, files, scheme)
    filling.put(f"{settings['quant_method']}")
    return filling.model


def _settings_beside(directory: Path) -> dict[str, Any] | None:
    """Settings in a file of their own, as older programs wrote them."""
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (directory / name).is_file():
            return {"quant_method": method, **read_json(directory / name)}
    return None


def _dtype(config: dict[str, Any]) -> torch.dtype:
    """The dtype that a configuration names, with bfloat16 in place of float16."""
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return torch.float32 if name == "float32" else torch.bfloat16


def _files(directory: Path) -> TensorFiles:
    if (directory / _INDEX).is_file():
        places = read_json(directory / _INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
            raise CheckpointError(
                f"{directory / _INDEX}: expected weight_map to give each tensor's file, got "
                f"{str(places)[:80]}"
            )
        names = sorted(set(places.values()))
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(
                    f"{directory / _INDEX}: expected files in the same directory, got {name!r}"
                )
        files = TensorFiles([TensorFile(directory / name) for name in names])
        missing = [name for name in places if name not in files]
        if missing:
            raise CheckpointError(
                f"{directory / _INDEX}: expected tensor {missing[0]!r} in "
                f"{places[missing[0]]}, found none"
            )
        return files
    if (directory / _SINGLE).is_file():
        return TensorFiles([TensorFile(directory / _SINGLE)])
    others = sorted(path.name for path in directory.glob("*.safetensors"))
    if len(others) == 1:
        return TensorFiles([TensorFile(directory / others[0])])
    raise CheckpointError(
        f"load_quantized: expected {_SINGLE} or {_INDEX} in {directory}, found "
        f"{', '.join(others) or 'no safetensors files'}; files in pickle format are not read"
    )


def _fill(filling: Filling, files: TensorFiles, scheme: Scheme) -> None:
    """Read every tensor of a checkpoint into `filling`."""
    wanted = slots(filling.model)
    used: set[str] = set()
    for path, module in filling.model.named_modules():
        if not scheme.holds(files, path):
            continue
        name = f"{path}.weight"
        transposed = _is_transposed(module, path, filling.source)
        out_features, in_features = _shape(module, transposed)
        found = scheme.read(files, path, (out_features, in_features))
        packed = PanelWeight.from_codes(
            found.format,
            found.codes,
            found.scales,
            found.zero_points,
            dtype=wanted[name].dtype,
            exact_scales=True,
        )
        packed.activation_dtype = found.activation_dtype
        filling.packed[name] = ReorderedPanelWeight.around(packed, transposed, found.order)
        used.update(f"{path}.{suffix}" for suffix in (*scheme.suffixes, "weight"))
    unused = []
    for name in files:
        if name in used:
            continue
        if name in wanted:
            filling.plain[name] = cast(files[name], wanted[name].dtype)
            check_slot(str(files.path(name)), name, filling.plain[name], wanted)
        elif not _is_needless(filling, files, scheme, name):
            unused.append(name)
    filling.check_complete(unused)
    filling.check_finite()


def _is_needless(filling: Filling, files: TensorFiles, scheme: Scheme, name: str) -> bool:
    """Whether a tensor that the model has no place for can be left out."""
    model = filling.model
    path, _, last = name.rpartition(".")
    if last in scheme.ignored or name in dict(model.named_buffers()):
        return True
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    if any(re.search(pattern, name) for pattern in patterns) or last == "inv_freq":
        return True
    # AutoGPTQ gives a bias of zeros to layers that have none.
    return last == "bias" and f"{path}.weight" in filling.packed and not bool(files[name].any())


def _is_transposed(module: nn.Module, path: str, source: str) -> bool:
    """Whether a layer keeps its weight as [in_features, out_features]."""
    if isinstance(module, nn.Linear):
        return False
    if type(module).__module__.startswith("transformers."):
        from transformers.pytorch_utils import Conv1D

        if isinstance(module, Conv1D):
            return True
    raise CheckpointError(
        f"{source}: expected {path} to be a linear layer, because its weight is quantized, got a "
        f"{type(module).__name__}"
    )


def _shape(module: nn.Module, transposed: bool) -> tuple[int, int]:
    weight = module._parameters["weight"]
    assert weight is not None
    first, second = weight.shape
    return (second, first) if transposed else (first, second)
