"""Quantized models on disk: `oxytorch.safetensors` with the packed weights and `oxytorch.json`.

The weights are stored as kernels read them, so that loading maps the file and several processes
share its memory. `oxytorch.json`:

    format, version    "oxytorch.quantized", 1; 2 where there are weights of a `kind`
    model              the class of the model
    transformers       whether config.json describes the model to transformers
    weights            for each packed weight: format, shape, group_size, dtype, activation, gated,
                       transposed; its tensors are <name>.panels and so on. Of a part of a joined
                       weight: joined (its name in the next table), begin, end, transposed. Of a
                       recurrent layer or an embedding: kind, shape, dtype
    joined             weights that are made of others (query, key and value), so that they lie
                       side by side
    shared             names of tensors that are the same as another
    sha256             of each tensor's bytes
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import CheckpointError
from ..core.json_file import read_json
from ..core.packed import PackedTensor
from ..core.tensor_file import Source, TensorFile, TensorFiles, bytes_of, write
from ..ops.panels import PanelWeight
from ..rewriting.memory import check_available
from ..rewriting.refusals import check_finite
from .building import empty_model
from .byte_weights import KINDS, ByteWeight
from .described import (
    PARTS,
    bytes_from_description,
    check_order,
    described,
    described_bytes,
    from_description,
)
from .filling import Filling, cast, check_slot, slots
from .joining import joined_groups
from .weights import ReorderedPanelWeight

FORMAT = "oxytorch.quantized"
VERSIONS = 1, 2
"""Those that are read: without and with weights of recurrent layers and embeddings."""
DESCRIPTION = "oxytorch.json"
TENSORS = "oxytorch.safetensors"


def save_quantized(model: nn.Module, directory: str | Path) -> None:
    """Write a quantized model to a directory, with its weights packed as in memory.

    model: quantized by `quantize_`, optimized or not, with all tensors on the CPU. Of an optimized
        model only the weights are written: optimize again after loading. Weights that
        `oxytorch.llm.optimize` joined are written joined, so joining them again copies nothing.
    directory: created if it does not exist. Files of an earlier save are replaced. For a model of
        transformers they include its configuration, so `load_quantized(directory)` needs no model.

    Raises TypeError if `model` is no module and ValueError if nothing of it is quantized, or a
    tensor is not on the CPU.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"save_quantized: expected model to be a torch.nn.Module, got a {type(model).__name__}"
        )
    sources, shared, packed = _tensors_of(model)
    if not packed:
        raise ValueError(
            "save_quantized: expected a quantized model, got one without packed weights; call "
            "oxytorch.quantize_(model, ...) first, or save the plain one with torch"
        )
    weights, joined = _describe(packed, sources)
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    hashes = write(target / TENSORS, sources, {"format": "pt"})
    is_described = _save_configuration(model, target)
    has_kinds = any("kind" in entry for entry in weights.values())
    description = {
        "format": FORMAT,
        "version": max(VERSIONS) if has_kinds else min(VERSIONS),
        "model": type(model).__name__,
        "transformers": is_described,
        "weights": weights,
        "joined": joined,
        "shared": shared,
        "sha256": hashes,
    }
    (target / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")


_Packed = PanelWeight | ReorderedPanelWeight | ByteWeight


def _tensors_of(
    model: nn.Module,
) -> tuple[dict[str, Source], dict[str, str], dict[str, _Packed]]:
    """By name: what plain tensors are written from, the names of those that others are, and packed
    ones."""
    sources: dict[str, Source] = {}
    shared: dict[str, str] = {}
    first: dict[int, str] = {}
    packed: dict[str, _Packed] = {}
    for name, tensor in slots(model).items():
        if tensor.device.type != "cpu":
            raise ValueError(
                f"save_quantized: expected all tensors on the CPU, got {name!r} on {tensor.device}"
            )
        if id(tensor) in first:
            shared[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        if isinstance(tensor, (PanelWeight, ReorderedPanelWeight, ByteWeight)):
            packed[name] = tensor
        elif isinstance(tensor, PackedTensor):
            sources[name] = Source(tensor.dtype, tuple(tensor.shape), tensor.dense)
        else:
            sources[name] = Source.of(tensor.detach())
    return sources, shared, packed


def _describe(
    packed: dict[str, _Packed], sources: dict[str, Source]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tables `weights` and `joined`; add their tensors to `sources`."""
    weights: dict[str, Any] = {}
    joined: dict[str, Any] = {}
    inner = {
        name: weight.packed if isinstance(weight, ReorderedPanelWeight) else weight
        for name, weight in packed.items()
        if not isinstance(weight, ByteWeight)
    }
    names = {id(weight): name for name, weight in inner.items()}
    places: dict[str, dict[str, Any]] = {}
    for whole, parts in joined_groups(inner.values()):
        key = f"{names[id(parts[0])]}+{len(parts) - 1}"
        joined[key] = described(whole)
        _add_sources(sources, key, whole)
        begin = 0
        for part in parts:
            end = begin + part.shape[0]
            places[names[id(part)]] = {"joined": key, "begin": begin, "end": end}
            begin = end
    for name, weight in packed.items():
        if isinstance(weight, ByteWeight):
            weight.sync()
            weights[name] = described_bytes(weight)
            stored = {f"{name}.{part}": Source.of(t) for part, t in weight.tensors.items()}
            sources.update(stored)
            continue
        is_reordered = isinstance(weight, ReorderedPanelWeight)
        weights[name] = places.get(name) or described(inner[name])
        weights[name]["transposed"] = is_reordered and weight.transposed  # type: ignore[union-attr]
        if name not in places:
            _add_sources(sources, name, inner[name])
        if isinstance(weight, ReorderedPanelWeight) and weight.order is not None:
            sources[f"{name}.order"] = Source.of(weight.order)
    return weights, joined


def _add_sources(sources: dict[str, Source], name: str, weight: PanelWeight) -> None:
    """Add the tensors of a packed weight; parts of another are copied when they are written."""
    for part, tensor in weight.tensors().items():
        make = partial(_tensor_of, weight, part)
        sources[f"{name}.{part}"] = Source(tensor.dtype, tuple(tensor.shape), make)


def _tensor_of(weight: PanelWeight, part: str) -> Tensor:
    return weight.tensors()[part]


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
    shared: bool,
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
    if not shared:
        check_available("load_quantized", files.nbytes(), f"the weights of {directory}")
    reader = _Reader(directory, files, description["joined"], dtype, shared)
    for name, entry in description["weights"].items():
        filling.packed[name] = reader.weight(name, entry)
        check_slot(filling.source, name, filling.packed[name], wanted)
    used = reader.used
    for name in files:
        if name not in used:
            filling.plain[name] = files[name] if dtype is None else cast(files[name], dtype)
            check_slot(filling.source, name, filling.plain[name], wanted)
    filling.shared = dict(description["shared"])
    filling.check_complete([])
    if verify:
        _verify(files, description["sha256"])
    filling.check_finite()
    filling.put(", ".join(sorted(reader.formats)))
    return filling.model


def _description(directory: Path) -> dict[str, Any]:
    path = directory / DESCRIPTION
    found = read_json(path)
    if found.get("format") != FORMAT or found.get("version") not in VERSIONS:
        raise CheckpointError(
            f"{path}: expected format {FORMAT!r} of version {max(VERSIONS)}, got "
            f"{found.get('format')!r} of version {found.get('version')!r}; a newer oxytorch may "
            "read it"
        )
    tables = ("weights", "joined", "shared", "sha256")
    kinds = {"model": str, "transformers": bool, **dict.fromkeys(tables, dict)}
    for key, kind in kinds.items():
        if not isinstance(found.get(key), kind):
            raise CheckpointError(
                f"{path}: expected {key} to be a {kind.__name__}, got {found.get(key)!r}"
            )
    return found


class _Reader:
    """Makes packed weights over a file's memory.

    used: names of the tensors that belong to them.
    formats: those that were met.
    """

    def __init__(
        self,
        directory: Path,
        files: TensorFiles,
        joined: dict[str, Any],
        dtype: torch.dtype | None,
        shared: bool,
    ) -> None:
        self.source = directory / DESCRIPTION
        self.files = files
        self.dtype = dtype
        self.shared = shared
        self.used: set[str] = set()
        self.formats: set[str] = set()
        self._wholes = {key: self._panels(key, entry) for key, entry in joined.items()}

    def weight(self, name: str, entry: Any) -> PackedTensor:
        """Return the weight that an entry of `weights` describes."""
        with self._named(name):
            if "kind" in entry:
                return self._bytes(name, entry)
            if "joined" in entry:
                panels = self._wholes[entry["joined"]].part(entry["begin"], entry["end"])
            else:
                panels = self._panels(name, entry)
            order = self._take(name, ("order",)).get("order")
            check_order(order, panels.shape[1])
            return ReorderedPanelWeight.around(panels, bool(entry["transposed"]), order)

    def _bytes(self, name: str, entry: Any) -> ByteWeight:
        parts = self._take(name, tuple(KINDS[entry["kind"]].form(entry["shape"])))
        weight = bytes_from_description(entry, parts, self.dtype)
        check_finite(str(self.source), f"scales of {name!r}", weight.scales(), CheckpointError)
        self.formats.add(weight.format)
        return weight if self.shared else weight.copy()

    def _panels(self, name: str, entry: Any) -> PanelWeight:
        with self._named(name):
            tensors = self._take(name, PARTS)
            panels = from_description(entry, tensors, self.dtype)
        for part in ("channel_scales", "group_scales"):
            scales = tensors.get(part)
            if scales is not None:
                place = f"{name}.{part}"
                path = str(self.files.path(place))
                check_finite(path, f"tensor {place!r}", scales, CheckpointError)
        self.formats.add(panels.format)
        return panels if self.shared else panels.copy()

    def _take(self, name: str, parts: tuple[str, ...]) -> dict[str, Tensor]:
        found = {part: f"{name}.{part}" for part in parts if f"{name}.{part}" in self.files}
        self.used.update(found.values())
        return {part: self.files[key] for part, key in found.items()}

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Errors about an entry name the weight."""
        try:
            yield
        except CheckpointError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.source}: expected weight {name!r} to fit its tensors in {TENSORS}, got "
                f"{type(error).__name__}: {error}"
            ) from error


def _verify(files: TensorFiles, hashes: dict[str, str]) -> None:
    """Raise CheckpointError that names the first tensor whose bytes are not those written."""

    def altered(name: str) -> bool:
        tensor = files[name]
        return hashlib.sha256(bytes_of(tensor)).hexdigest() != hashes.get(name)

    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        for name, is_altered in zip(files, pool.map(altered, files), strict=True):
            if is_altered:
                raise CheckpointError(
                    f"{files.path(name)}: expected tensor {name!r} to have the sha256 of "
                    f"{DESCRIPTION}, got another; the file was altered"
                )
