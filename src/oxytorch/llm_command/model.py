"""A language model that is ready to write, and what its tokens read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import llm
from ..core.looked_up import RowsWeight
from ..core.packed import PackedTensor
from ..files import load
from ..llm.language_model import LanguageModel
from ..llm.layer import Product, RoutedMlp
from ..llm.record import FusedModel
from ..llm.weights import stored_form
from ..ops.panels import PanelWeight
from .folder import is_quantized, load_model, read_config
from .options import Precision

Tell = Callable[[str], object]


@dataclass
class PreparedModel:
    """A model that `oxytorch.llm.optimize` made, now or before it was written to a file, and the
    seconds that this took.

    precision: what its weights are called.
    """

    model: nn.Module | LanguageModel
    precision: str
    load_seconds: float
    optimize_seconds: float

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        precision: Precision,
        kv_cache: str,
        group_size: int,
        tell: Tell,
    ) -> PreparedModel:
        """Loads a folder and optimizes what was loaded; raises ValueError if it is no model."""
        begin = time.perf_counter()
        tell(f"loading {folder.name}")
        model = load_model(folder)
        loaded = time.perf_counter() - begin
        tell("packing weights")
        result = cls.from_model(model, precision, kv_cache, group_size)
        result.load_seconds = loaded
        if is_quantized(folder, read_config(folder)):
            assert isinstance(result.model, nn.Module)
            result.precision = _most_common_format(result.model)
        return result

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        precision: Precision,
        kv_cache: str,
        group_size: int,
    ) -> PreparedModel:
        """Optimizes a model in place."""
        begin = time.perf_counter()
        made = llm.optimize(
            model,
            dtype=torch.bfloat16,
            weights=precision.weights,
            kv_cache=kv_cache,
            group_size=group_size,
            activation_dtype=precision.activation_dtype,
            inplace=True,
        )
        return cls(made, precision.name, 0.0, time.perf_counter() - begin)

    @classmethod
    def from_file(cls, path: Path, tell: Tell) -> PreparedModel:
        """Opens a file that `oxytorch.save` wrote; raises ValueError if it holds none."""
        begin = time.perf_counter()
        tell(f"loading {path.name}")
        model = load(path)
        if not isinstance(model, LanguageModel):
            raise ValueError(f"{path}: expected a language model, got a {type(model).__name__}")
        sizes: Counter[str] = Counter()
        for weight, _ in _products(model.record):
            name = weight.format if isinstance(weight, PanelWeight) else str(weight.dtype)
            sizes[name.removeprefix("torch.")] += weight.numel()
        return cls(model, sizes.most_common(1)[0][0], time.perf_counter() - begin, 0.0)

    def token_reads(self) -> list[int]:
        """Bytes of the weights that one token reads, for each stretch of memory they lie in."""
        return token_reads(self.model)

    def prompt_operations(self, tokens: int) -> int:
        """Multiplications and additions of a prompt's products; the head's are of one token."""
        assert isinstance(self.model, nn.Module)
        return 2 * sum(
            int(share * parameter.numel()) * (1 if is_head else tokens)
            for parameter, share, is_head in _matrices(self.model)
        )


def _most_common_format(model: nn.Module) -> str:
    sizes: Counter[str] = Counter()
    for parameter in model.parameters():
        stored = stored_form(parameter)
        if isinstance(stored, PanelWeight):
            sizes[stored.format] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else "plain"


def token_reads(model: nn.Module | LanguageModel) -> list[int]:
    """Bytes of the weights that one token reads, for each stretch of memory they lie in.

    All matrices but embeddings that are only looked up, in their packed form, with their scales. Of
    routed experts as many count as a token chooses.
    """
    found: dict[int, float] = {}
    matrices = (
        _products(model.record)
        if isinstance(model, LanguageModel)
        else ((parameter, share) for parameter, share, _ in _matrices(model))
    )
    for parameter, share in matrices:
        place, size = _stored(parameter)
        found[place] = found.get(place, 0.0) + size * share
    return [int(size) for size in found.values()]


def _products(record: FusedModel) -> Iterator[tuple[Tensor, float]]:
    """The weights of a record's products, and the part of each that a token needs."""
    assert isinstance(record.head, Product)
    yield record.head.weight, 1.0
    for layer in record.layers:
        mlp = layer.mlp
        whole = [layer.attention.qkv, layer.attention.output]
        if isinstance(mlp, RoutedMlp):
            whole.append(mlp.router)
            for product in (*mlp.gate_up, *mlp.down):
                yield product.weight, mlp.chosen / len(mlp.down)
        else:
            whole += [mlp.up, mlp.down]
        for product in whole:
            yield product.weight, 1.0


def _matrices(model: nn.Module) -> Iterator[tuple[Tensor, float, bool]]:
    """The weights of products, the part of each that a token needs, and whether it is the head."""
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    head = getattr(model, "get_output_embeddings", lambda: None)()
    of_head = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    share = _expert_share(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or id(parameter) in embeddings - of_head:
            continue
        yield parameter, share if ".experts." in name else 1.0, id(parameter) in of_head


def _stored(parameter: Tensor) -> tuple[int, int]:
    """Where a weight lies in memory, and its bytes; parts of one allocation lie at one place."""
    if not isinstance(parameter, PackedTensor):
        return parameter.untyped_storage().data_ptr(), parameter.nbytes
    stored = stored_form(parameter)
    size = parameter.nbytes_packed()
    if isinstance(parameter, RowsWeight):  # some rows of a weight that has others too
        size = size * len(parameter.places) // stored.shape[0]
    if isinstance(stored, PanelWeight):
        return stored.packed.untyped_storage().data_ptr(), size
    return id(stored), size


def _expert_share(model: nn.Module) -> float:
    """The part of a layer's experts that a token goes through."""
    config = getattr(model, "config", None)
    total = next(
        (
            value
            for name in ("num_local_experts", "num_experts", "n_routed_experts")
            if isinstance(value := getattr(config, name, None), int)
        ),
        1,
    )
    chosen = getattr(config, "num_experts_per_tok", None)
    return min(1.0, chosen / total) if isinstance(chosen, int) and total else 1.0
