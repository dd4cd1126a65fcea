"""Pass `cast`: weights to the dtype asked for, by the type of the module that holds them.

Which types: those that the predecessor casts for inference (convolutions, linear layers,
embeddings, LSTM, parameter lists) and, beyond it, embedding bags, 1-D convolutions, linear layers
written by the model's author, and parameters held by a model's own classes. Normalizations keep
their float32 parameters: they cost nothing and their kernels take both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ...graph.forward import Forward
from ...graph.recognize import Recognizer
from ..context import Context

CAST_TYPES = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.LSTM,
    nn.ParameterList,
)
_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def dtypes(model: nn.Module, dtype: Any) -> dict[nn.Module, torch.dtype]:
    """Return the dtype wanted for each module's own parameters, for the modules to be cast.

    dtype: a torch.dtype, or a mapping whose keys are "" (all modules of the list), module paths
    (the module and all below it) or module types; the most particular key wins. Normalizations that
    keep statistics are left out: torch's kernels take parameters and statistics of one dtype only,
    and rounded running means would be of no use. A key that names one of them is a ValueError.
    """
    rules: Mapping[Any, torch.dtype] = dtype if isinstance(dtype, Mapping) else {"": dtype}
    recognizer = Recognizer()
    made_from = {part for module in model.modules() for part in _parametrizations(module)}
    wanted = {}
    for path, module in model.named_modules():
        if not any(p is not None and p.is_floating_point() for p in module._parameters.values()):
            continue
        by_path = max(
            (key for key in rules if isinstance(key, str) and key and _below(path, key)),
            key=len,
            default=None,
        )
        if _keeps_statistics(path, module, rules):
            continue
        if by_path is not None:
            wanted[module] = rules[by_path]
        elif type(module) in rules:
            wanted[module] = rules[type(module)]
        elif "" in rules and (module in made_from or _listed(module, recognizer)):
            wanted[module] = rules[""]
    return wanted


def _keeps_statistics(path: str, module: nn.Module, rules: Mapping[Any, torch.dtype]) -> bool:
    """Whether it is a normalization with statistics; an error if a key gives it another dtype."""
    statistics = getattr(module, "running_mean", None)
    if not isinstance(statistics, torch.Tensor):
        return False
    for key in (path or None, type(module)):
        wanted = rules.get(key, statistics.dtype)
        if wanted != statistics.dtype:
            raise ValueError(
                f"optimize: expected no dtype but {short_name(statistics.dtype)} for "
                f"{type(module).__name__} {path!r}, whose running statistics are "
                f"{short_name(statistics.dtype)}, got {short_name(wanted)}; "
                "a key that names a module above it leaves it as it is"
            )
    return True


def _below(path: str, key: str) -> bool:
    return path == key or path.startswith(key + ".")


def _listed(module: nn.Module, recognizer: Recognizer) -> bool:
    if type(module) in CAST_TYPES or _parametrizations(module):
        return True
    return not type(module).__module__.startswith("torch.nn") and recognizer.norm(module) is None


def _parametrizations(module: nn.Module) -> list[nn.Module]:
    """What holds the parameters that a layer's weight is made of at each call (weight norm)."""
    found = module._modules.get("parametrizations")
    if isinstance(module, CAST_TYPES) and isinstance(found, nn.ModuleDict):
        return [*found.values()]
    return []


def run(context: Context) -> None:
    convert(context, context.open_modules(), context.closed_roots)


def convert(
    context: Context, modules: list[nn.Module], closed: list[nn.Module], packs: bool = True
) -> None:
    """Convert the parameters of modules, and what is given to them.

    closed: the modules among them that are left alone as a whole. packs: whether `pack` and `lstm`
    see these modules later.
    """
    for module in modules:
        _convert_buffers(context, module)
        names = [
            name
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_floating_point()
        ]
        if not names:
            continue
        dtype = context.dtype_of.get(module)
        own = module._parameters[names[0]].dtype  # type: ignore[union-attr]
        if dtype is None or all(module._parameters[n].dtype == dtype for n in names):  # type: ignore[union-attr]
            _keep(context, module, own, packs)
            continue
        shared = _shared_with_uncast(context, module, names, dtype)
        if shared is not None:
            context.left("cast", module, f"shares its weight with {shared}, which is not cast")
            context.dtype_of = {m: d for m, d in context.dtype_of.items() if m is not module}
            _keep(context, module, own, packs)
            continue
        if packs and _packed_later(context, module):
            continue
        for name in names:
            before = module._parameters[name]
            assert before is not None
            if before.dtype == dtype:  # shared with a module that has been cast already
                continue
            converted = nn.Parameter(before.detach().to(dtype), before.requires_grad)
            sharing = [owner for owner, _ in context.owners.get(id(before), ())]
            context.set_parameter(module, name, converted)
            for owner in sharing:
                if owner is not module:
                    context.did("cast", owner, f"{type(owner).__name__} to {short_name(dtype)}")
        context.did("cast", module, f"{type(module).__name__} to {short_name(dtype)}")
        takes_input = type(module) not in (nn.Embedding, nn.EmbeddingBag, ParametrizationList)
        if takes_input and _is_layer(context, module):
            context.set_forward(module, CastInput(module))

    for module in closed:
        parameter = next(module.parameters(), None)
        if parameter is not None and _is_mixed(context, parameter.dtype):
            context.set_forward(module, CastInput(module))
            detail = f"{type(module).__name__}: inputs to {short_name(parameter.dtype)}"
            context.did("cast", module, detail)


def _convert_buffers(context: Context, module: nn.Module) -> None:
    """Convert the tables (masks, positions) of a model's own class, which meet converted values.

    Vectors keep their dtype: frequencies and statistics are computed with before they do.
    """
    dtype = context.dtype_of.get(module, context.dtype)
    if (
        dtype is None
        or _is_layer(context, module)
        or getattr(module, "running_mean", None) is not None
    ):
        return
    for name, buffer in module._buffers.items():
        if buffer is None or not buffer.is_floating_point() or buffer.dim() < 2:
            continue
        if buffer.dtype != dtype:
            context.set_buffer(module, name, buffer.to(dtype))
            detail = f"{type(module).__name__}.{name} to {short_name(dtype)}"
            context.did("cast", module, detail)


def _is_mixed(context: Context, own: torch.dtype) -> bool:
    return any(dtype != own for dtype in context.dtype_of.values())


def _keep(context: Context, module: nn.Module, own: torch.dtype, packs: bool) -> None:
    """A layer that keeps its dtype amid cast ones has to be given inputs of that dtype."""
    takes_any = type(module) in (*_NORMS, nn.Embedding, nn.EmbeddingBag)
    given_others = _is_mixed(context, own) and _is_layer(context, module) and not takes_any
    if given_others and not (packs and _packed_later(context, module)):
        context.set_forward(module, CastInput(module))
        context.did("cast", module, f"{type(module).__name__}: inputs to {short_name(own)}")


def _is_layer(context: Context, module: nn.Module) -> bool:
    """Whether a module is one of torch's, or a kind of one (a convolution of a normed weight)."""
    is_torchs = type(module).__module__.startswith("torch.nn") or isinstance(module, CAST_TYPES)
    return is_torchs or context.recognizer.linear(module) is not None


def _packed_later(context: Context, module: nn.Module) -> bool:
    """Whether `pack` or `lstm` will convert this module's weight, without a copy in between."""
    from .lstm import refusal as lstm_refusal
    from .pack import refusal

    if type(module) is nn.LSTM:
        return "lstm" in context.passes and lstm_refusal(context, module) is None
    return "pack" in context.passes and refusal(context, module) is None


def _shared_with_uncast(
    context: Context, module: nn.Module, names: list[str], dtype: torch.dtype
) -> str | None:
    for name in names:
        for owner, _ in context.owners.get(id(module._parameters[name]), []):
            if context.dtype_of.get(owner) != dtype:
                return context.paths[owner]
    return None


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class CastInput(Forward):
    """A layer's own forward on inputs converted to its dtype."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, converts=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
            weight = self.module._parameters.get("weight")
            # The usual call: nothing to convert, or something that shows at once.
            if (
                weight is not None
                and weight.dtype is args[0].dtype
                and torch._C._get_tracing_state() is None
            ):
                return type(self.module).forward(self.module, args[0])
        return self.own(*args, **kwargs)
