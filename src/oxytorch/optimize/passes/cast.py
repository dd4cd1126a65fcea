"""Pass `cast`: weights to the dtype asked for, by the type of the module that holds them.

Which types: those that the predecessor casts for inference (convolutions, linear layers,
embeddings, LSTM, parameter lists) and, beyond it, embedding bags, 1-D convolutions, linear layers
written by the model's author, and parameters held by a model's own classes. Normalizations keep
their float32 parameters: they cost nothing and their kernels take both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList

from ...core.modes import must_run_plain
from ...core.watched import is_parameter
from ...graph.forward import Forward
from ...graph.recognize import Recognizer, convolution_of_module
from ..context import OptimizeContext

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
    nn.ParameterDict,
)
TAKE_ANY = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
"""Layers that take inputs of another dtype than their parameters'; norms return what they take."""

_DECLARED: dict[type, tuple[str, ...]] = {
    **dict.fromkeys(CAST_TYPES[:7], ("weight", "bias")),
    **dict.fromkeys(CAST_TYPES[7:9], ("weight",)),
    **dict.fromkeys(
        (nn.GRUCell, nn.LSTMCell, nn.RNNCell), ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    ),
    nn.Bilinear: ("weight", "bias"),
}
"""The parameters that layers have, or what a pruned or normed one is made of (weight_orig)."""


def dtypes(model: nn.Module, dtype: Any) -> dict[nn.Module, torch.dtype]:
    """Return the dtype wanted for each module's own parameters, for the modules to be cast.

    dtype: a torch.dtype, or a mapping whose keys are "" (all modules of the list), module paths
    (the module and all below it) or module types; the most particular key wins. Normalizations that
    keep statistics are left out: torch's kernels take parameters and statistics of one dtype only,
    and rounded running means would be of no use. A key that names one of them is a ValueError.
    """
    rules: Mapping[Any, torch.dtype] = dtype if isinstance(dtype, Mapping) else {"": dtype}
    recognizer = Recognizer()
    made_from = made_for(model)
    wanted = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        if not any(p is not None and p.is_floating_point() for p in module._parameters.values()):
            continue
        if _keeps_statistics(path, module, rules):
            continue
        chosen = asked(path, module, rules)
        if chosen is not None:
            wanted[module] = chosen
        elif "" in rules and (module in made_from or _listed(module, recognizer)):
            wanted[module] = rules[""]
    return wanted


def asked(path: str, module: nn.Module, rules: Mapping[Any, torch.dtype]) -> torch.dtype | None:
    """The dtype that a key gives a module, other than the one for all; the most particular wins."""
    by_path = max(
        (key for key in rules if isinstance(key, str) and key and _below(path, key)),
        key=len,
        default=None,
    )
    return rules.get(type(module) if by_path is None else by_path)


def are_named(context: OptimizeContext, modules: Iterable[nn.Module]) -> bool:
    """Whether keys name all of these modules, which then are converted whatever that costs."""
    return all(asked(context.paths[m], m, context.rules) is not None for m in modules)


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
    if is_made(module):
        return False  # it has the dtype of what it is made of
    if type(module) in CAST_TYPES or (
        isinstance(module, CAST_TYPES) and parametrize.is_parametrized(module)
    ):
        return True
    return not is_torchs(module) and recognizer.norm(module) is None


def is_made(module: nn.Module) -> bool:
    """Whether a plain tensor stands in the place of a layer's parameter, which code outside may
    make of others at each call."""
    own = module._flat_weights_names if isinstance(module, nn.RNNBase) else ()
    return any(
        not any(n == name or n.startswith(f"{name}_") for n in module._parameters)
        for name in (*own, *_DECLARED.get(type(module), ()))
    )


def _parametrizations(module: nn.Module) -> list[nn.Module]:
    """What holds the parameters that a module's weight is made of at each call (weight norm)."""
    if isinstance(module, torch.jit.ScriptModule):
        return []
    found = module._modules.get("parametrizations")
    if isinstance(found, nn.ModuleDict) and (
        isinstance(module, CAST_TYPES) or not is_torchs(module)
    ):
        return [*found.values()]
    return []


def made_for(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """The modules that make a weight at each call, with the one that they make it for."""
    return {
        part: module
        for module in model.modules()
        for parts in _parametrizations(module)
        for part in parts.modules()
    }


def run(context: OptimizeContext) -> None:
    """See above."""
    convert(context)


def changed(context: OptimizeContext) -> list[nn.Module]:
    """The modules whose parameters and buffers may be converted."""
    parts = [part for root in converted_wholes(context) for part in root.modules()]
    return [*context.open_modules(), *dict.fromkeys(parts)]


def converted_wholes(context: OptimizeContext) -> list[nn.Module]:
    """The modules that read their parts' weights themselves and are converted with all of them."""
    return [root for root in context.closed_roots if root in context.dtype_of]


def converted_modules(context: OptimizeContext) -> list[nn.Module]:
    """The modules that are converted, but for the parts of those converted as a whole."""
    wholes = converted_wholes(context)
    return [*wholes, *(module for module in context.open_modules() if context.converts(module))]


def convert(context: OptimizeContext, packs: bool = True) -> None:
    """Convert the parameters and buffers of all modules that are to be.

    Where no parameter is converted, no buffer is: it would meet what keeps its dtype.
    packs: whether `pack` and `lstm` see these modules later.
    """
    if not converted_modules(context):
        return
    for module in changed(context):
        for name, wanted in buffers(context, module):
            buffer = module._buffers[name]
            assert buffer is not None
            context.set_buffer(module, name, buffer.to(wanted))
            detail = f"{type(module).__name__}.{name} to {short_name(wanted)}"
            context.applied("cast", module, detail)
        if not context.converts(module) or (packs and _packed_later(context, module)):
            continue
        dtype = context.dtype_of[module]
        for name, before in [*module._parameters.items()]:
            # One that is shared may have been converted with a module before.
            if before is None or not before.is_floating_point() or before.dtype == dtype:
                continue
            converted = nn.Parameter(before.detach().to(dtype), before.requires_grad)
            sharing = [owner for owner, _ in context.owners.get(id(before), ())]
            context.set_parameter(module, name, converted)
            for owner in sharing:
                if owner is module:
                    continue
                context.applied("cast", owner, f"{type(owner).__name__} to {short_name(dtype)}")
                if takes_input(context, owner) and "forward" not in owner.__dict__:
                    context.log.set_forward(owner, cast_input(owner))
        context.applied("cast", module, f"{type(module).__name__} to {short_name(dtype)}")
        if module not in context.closed and takes_input(context, module):
            context.log.set_forward(module, cast_input(module))


def takes_input(context: OptimizeContext, module: nn.Module) -> bool:
    """Whether a converted module converts what it is given."""
    takes_none = type(module) in (nn.Embedding, nn.EmbeddingBag, ParametrizationList)
    return not takes_none and is_layer(context, module)


def buffers(context: OptimizeContext, module: nn.Module) -> list[tuple[str, torch.dtype]]:
    """The buffers of a module that are converted, and to which dtype: all that meet converted
    values.

    Vectors keep their dtype in a class of the model's own that holds no converted parameter:
    frequencies and statistics are computed with before they meet any.
    """
    dtype = context.dtype_of.get(module, context.dtype)
    layer = context.made_for.get(module)
    if layer is not None:
        dtype = context.dtype_of.get(layer)
    is_norm = getattr(module, "running_mean", None) is not None
    if dtype is None or is_norm or module in context.kept_parts:
        return []
    is_made = module in context.made_for.values()
    holds_converted = module in context.dtype_of or layer is not None or is_made
    if is_layer(context, module) and not holds_converted:
        return []
    least = 0 if holds_converted or context.converts_vectors else 2
    return [
        (name, dtype)
        for name, buffer in module._buffers.items()
        if buffer is not None
        and buffer.is_floating_point()
        and buffer.dim() >= least
        and buffer.dtype != dtype
    ]


def keeps_vectors(context: OptimizeContext, module: nn.Module) -> bool:
    """Whether a class of the model's own holds vectors that keep their dtype among others."""
    if context.dtype is None or module in context.kept_parts or is_layer(context, module):
        return False
    converted = {name for name, _ in buffers(context, module)}
    return any(
        b is not None and b.is_floating_point() and b.dtype != context.dtype and n not in converted
        for n, b in module._buffers.items()
    )


def is_layer(context: OptimizeContext, module: nn.Module) -> bool:
    """Whether a module is one of torch's, or a kind of one (a convolution of a normed weight)."""
    if is_torchs(module) or isinstance(module, CAST_TYPES):
        return True
    return context.recognizer.linear(module) is not None


def is_torchs(module: nn.Module) -> bool:
    """Whether torch wrote a module's class, and not the model's author."""
    kinds = (kind for kind in type(module).__mro__ if kind.__module__ != parametrize.__name__)
    return next(kinds).__module__.startswith("torch.nn")


def _packed_later(context: OptimizeContext, module: nn.Module) -> bool:
    """Whether `pack` or `lstm` will convert this module's weight, without a copy in between."""
    from .lstm import refusal as lstm_refusal
    from .pack import refusal

    if module in context.closed:
        return False
    if type(module) is nn.LSTM:
        return "lstm" in context.passes and lstm_refusal(context, module) is None
    return "pack" in context.passes and refusal(context, module) is None


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class CastInput(Forward):
    """A layer's own forward on inputs converted to its dtype."""

    stands_in = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, converts=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
            x, module = args[0], self.module
            weight = module._parameters.get("weight")
            # The usual call: nothing to convert, or something that shows at once.
            if (
                weight is not None
                and weight.dtype is x.dtype
                and torch._C._get_tracing_state() is None
            ):
                kind = type(module)
                forward = kind.forward
                bias = module._parameters.get("bias", False)
                if _CONVOLVE.get(kind) is forward and bias is not False:
                    # What it does, without a second look for the weights.
                    return module._conv_forward(x, weight, bias)  # type: ignore[operator]
                return forward(module, x)
        return self.own(*args, **kwargs)


_CONVOLVE: dict[type, Any] = {k: k.forward for k in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}
"""Torch's own forwards of convolutions, of these classes alone: others may make their weights."""


class CastPoint(CastInput):
    """That of a convolution with one element in its kernel, which on a single position is a linear
    layer: oneDNN has no fast convolution for it in narrow dtypes, and torch no other one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
            x = args[0]
            # Most inputs have more than one position along their last dimension.
            found = self._at_one_position(x) if not x.dim() or x.size(-1) == 1 else None
            if found is not None:
                return found
        return super().__call__(*args, **kwargs)

    def _at_one_position(self, x: Tensor) -> Tensor | None:
        if x.shape[2:].numel() != 1:
            return None
        weight, bias = self.module._parameters.get("weight"), self._bias()
        if not is_parameter(weight) or weight.dtype is not x.dtype or bias is False:
            return None
        fits = x.dim() == weight.dim() and x.shape[1] == weight.shape[1]
        if not fits or not _is_point(self.module) or must_run_plain(x, weight, bias):
            return None
        found = functional.linear(x.flatten(1), weight.flatten(1), bias)
        return found.reshape(*found.shape, *x.shape[2:])


def _is_point(module: nn.Module) -> bool:
    """Whether a convolution's output at a position is that of its input there, times a matrix."""
    geometry = convolution_of_module(module)
    if geometry is None or geometry.groups > 1 or any(geometry.padding):
        return False
    return math.prod(module.kernel_size) == 1  # type: ignore[arg-type]


def cast_input(module: nn.Module) -> CastInput:
    """The forward of a converted layer."""
    return CastPoint(module) if _is_point(module) else CastInput(module)
