"""Reads a decoder layer's structure: names of parts, shapes of weights; no class of a model.

What shapes and names leave open (which norm comes where, how query, key and value share a weight,
which half of a head is rotated) becomes several plans, and `checking.py` tries them on numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ..graph.activations import activation_of_callable
from ..graph.recognize import linear_of_module, norm_of_module
from ..ops.cached_attention import MOST_DIM
from ..ops.panels.epilogues import ACTIVATIONS, is_gated
from . import recipes
from .plan import ExpertsPlan, LayerPlan, NormPlan, ProductPlan


class Unmatched(Exception):
    """A layer is not built as any recipe says; the text says what was missed."""


def find(module: nn.Module, names: tuple[str, ...], prefix: str = "") -> str | None:
    """Returns the path (below `prefix`) of the first name that is a submodule."""
    for name in names:
        path = f"{prefix}.{name}" if prefix and name else prefix or name
        if path and _has(module, path):
            return path
    return None


def _has(module: nn.Module, path: str) -> bool:
    for name in path.split("."):
        found = module._modules.get(name)
        if found is None:
            return False
        module = found
    return True


def plans(
    layer: nn.Module, arguments: dict[str, Any], config: Any, position: int, results: int
) -> Iterator[LayerPlan]:
    """Yields what the layer may be, the most likely first.

    layer: on the CPU, float32.
    arguments: those that the model calls it with.
    position: its number in its list.
    results: see `LayerPlan`.

    Raises Unmatched where a part is missing.
    """
    attention = _attention(layer)
    part = layer.get_submodule(attention)
    mlps, block_orders = [*_mlps(layer)], [*_block_orders(layer)]
    norms = _head_norms(layer, attention, head_dim := _head_dim(part))
    fixed = {**norms, **_fixed(layer, part, attention, arguments, config, position)}
    choices = itertools.product(
        block_orders,
        _projections(layer, attention, head_dim),
        mlps,
        _rotary(arguments),
        _PAIRS,
        _numbers(part, recipes.SCALE) or (head_dim**-0.5,),
        (*_numbers(part, recipes.SOFTCAP), None),
    )
    for order, heads, mlp, turning, (interleaved, repeats), scale, softcap in choices:
        if turning is None and interleaved:
            continue
        if norms["flat_norms"] and not _fits_flat(layer, norms, heads, head_dim):
            raise Unmatched(f"{attention} normalizes neither heads nor all of them")
        is_plain = order["block_order"] == recipes.BLOCK_ORDERS[0].name
        if fixed["residual_scale"] != 1.0 and not is_plain:
            continue
        yield LayerPlan(
            attention=attention,
            head_dim=head_dim,
            scale=scale,
            rotary=0 if turning is None else arguments[turning][0].shape[-1],
            rotary_argument=turning,
            interleaved=interleaved,
            repeat_interleave=repeats,
            softcap=softcap,
            results=results,
            arguments=tuple(arguments),
            **fixed,
            **heads,
            **order,
            **mlp,
        )


def _attention(layer: nn.Module) -> str:
    """The name of the layer's causal attention."""
    attention = find(layer, recipes.ATTENTION)
    if attention is None:
        raise Unmatched(f"no attention among {_names(layer)}")
    if getattr(layer.get_submodule(attention), "is_causal", True) is not True:
        raise Unmatched(f"{attention} is not causal")
    return attention


def _fixed(
    layer: nn.Module,
    part: nn.Module,
    attention: str,
    arguments: dict[str, Any],
    config: Any,
    position: int,
) -> dict[str, Any]:
    """What the plans of a layer have in common; part: the module of its attention."""
    sinks = next((name for name in recipes.SINKS if name in part._parameters), None)
    caches = [name for name in recipes.CACHE_ARGUMENTS if name in arguments]
    return {
        "residual_scale": (*_numbers(layer, recipes.RESIDUAL_SCALE), 1.0)[0],
        "window": window_of(part, config, position),
        "sinks": None if sinks is None else f"{attention}.{sinks}",
        "cache_argument": caches[0] if caches else None,
        "index": layer_index(part, position),
    }


def linear(layer: nn.Module, path: str) -> tuple[nn.Module, bool]:
    """Returns a linear layer and whether its weight is stored transposed."""
    module = layer.get_submodule(path)
    form = linear_of_module(module)
    if form is None:
        kind = type(module)
        raise Unmatched(f"{path} ({kind.__module__}.{kind.__name__}) is no plain linear layer")
    return module, form.transposed


def _names(module: nn.Module) -> str:
    return ", ".join(name for name, _ in module.named_children()) or "no submodules"


def _size(module: nn.Module, transposed: bool) -> tuple[int, int]:
    """out_features, in_features."""
    rows, columns = module.get_parameter("weight").shape
    return (columns, rows) if transposed else (rows, columns)


def _numbers(module: nn.Module, names: tuple[str, ...]) -> tuple[float, ...]:
    found = [getattr(module, name, None) for name in names]
    return tuple(float(value) for value in found if isinstance(value, (int, float)) and value)[:1]


def _head_dim(attention: nn.Module) -> int:
    for name in recipes.HEAD_DIM:
        value = getattr(attention, name, None)
        if isinstance(value, int) and value > MOST_DIM:
            raise Unmatched(f"heads of {value} values are larger than {MOST_DIM}")
        if isinstance(value, int):
            return value
    raise Unmatched(f"no head size among {', '.join(recipes.HEAD_DIM)} of its attention")


def layer_index(attention: nn.Module, position: int) -> int:
    """The number of a layer in the cache."""
    found = getattr(attention, "layer_idx", None)
    return found if isinstance(found, int) else position


def window_of(attention: nn.Module, config: Any, position: int) -> int | None:
    """The sliding window of a layer, or None."""
    types = getattr(config, "layer_types", None)
    for owner in (attention, config):
        for name in recipes.WINDOW:
            if not hasattr(owner, name):
                continue
            value = getattr(owner, name)
            full = owner is config and types and types[position] == "full_attention"
            if full or getattr(config, "use_sliding_window", True) is False:
                return None
            return value if isinstance(value, int) else None
    return None


def _rotary(arguments: dict[str, Any]) -> tuple[str | None, ...]:
    """Names of arguments that bring cos and sin, as choices."""
    found = [
        name
        for name, value in arguments.items()
        if "position_embeddings" in name
        and isinstance(value, (tuple, list))
        and len(value) == 2
        and all(isinstance(part, Tensor) and part.dim() == 3 for part in value)
    ]
    return (*found, None)


_PAIRS = ((False, False), (True, False), (True, True))
"""(interleaved, repeat_interleave), see `LayerPlan`."""


def _head_norm(layer: nn.Module, attention: str, names: tuple[str, ...]) -> NormPlan | None:
    path = find(layer, names, attention)
    if path is None:
        return None
    norm = norm_of(layer, path)
    if norm is None or norm.kind != "rms_norm":
        raise Unmatched(f"{path} is no RMS norm")
    return norm


def _head_norms(layer: nn.Module, attention: str, head_dim: int) -> dict[str, Any]:
    """The norms of query and key, and whether they are over all heads as one row."""
    query = _head_norm(layer, attention, recipes.QUERY_NORM)
    key = _head_norm(layer, attention, recipes.KEY_NORM)
    if (query is None) != (key is None):
        raise Unmatched("query and key are not normalized alike")
    flat = query is not None and _width(layer, query) != head_dim
    return {"query_norm": query, "key_norm": key, "flat_norms": flat}


def _width(layer: nn.Module, norm: NormPlan) -> int:
    return layer.get_submodule(norm.path).get_parameter("weight").numel()


def _fits_flat(
    layer: nn.Module, norms: dict[str, Any], heads: dict[str, Any], head_dim: int
) -> bool:
    """Whether both norms are over all heads as one row, which lie in blocks."""
    wanted = (heads["heads"] * head_dim, heads["kv_heads"] * head_dim)
    found = _width(layer, norms["query_norm"]), _width(layer, norms["key_norm"])
    return heads["layout"] == "blocks" and wanted == found


def norm_of(layer: nn.Module, path: str) -> NormPlan | None:
    """Returns what a norm computes, or None for anything else."""
    found = norm_of_module(layer.get_submodule(path))
    return None if found is None else NormPlan(path, found.kind, found.eps, found.offset)


def _projections(layer: nn.Module, attention: str, head_dim: int) -> Iterator[dict[str, Any]]:
    """How query, key and value come about."""
    output = find(layer, recipes.OUTPUT, attention)
    if output is None:
        raise Unmatched(f"no output projection in {attention}")
    module, transposed = linear(layer, output)
    heads = _size(module, transposed)[1] // head_dim
    common = {"heads": heads, "output": ProductPlan((output,), transposed)}
    names = (recipes.QUERY, recipes.KEY, recipes.VALUE)
    paths = tuple(find(layer, name, attention) for name in names)
    if all(path is not None for path in paths):
        parts = [linear(layer, path) for path in paths if path is not None]
        rows = [_size(*part)[0] for part in parts]
        if rows[0] != heads * head_dim or rows[1] != rows[2] or rows[1] % head_dim:
            raise Unmatched(f"{attention} has query, key and value of {rows} rows")
        qkv = ProductPlan(tuple(map(str, paths)), parts[0][1])
        yield {**common, "qkv": qkv, "kv_heads": rows[1] // head_dim, "layout": "blocks"}
        return
    path = find(layer, recipes.JOINED, attention)
    if path is None:
        raise Unmatched(f"no query, key and value in {attention}")
    module, transposed = linear(layer, path)
    rest = _size(module, transposed)[0] - heads * head_dim
    if rest <= 0 or rest % (2 * head_dim):
        raise Unmatched(f"{path} has no room for keys and values")
    kv_heads = rest // (2 * head_dim)
    each = heads // kv_heads
    yield {
        **common,
        "qkv": ProductPlan((path,), transposed),
        "kv_heads": kv_heads,
        "layout": "blocks",
    }
    if transposed and each > 1:
        return
    grouped = ProductPlan((path,), transposed, grouped=each if each > 1 else 0, head_dim=head_dim)
    yield {**common, "qkv": grouped, "kv_heads": kv_heads, "layout": "groups"}


def _mlps(layer: nn.Module) -> Iterator[dict[str, Any]]:
    """The MLP of a layer, or its routed experts."""
    for path in recipes.MLP:
        if path and not _has(layer, path):
            continue
        owner = layer.get_submodule(path) if path else layer
        if find(layer, recipes.EXPERTS, path) is not None:
            yield from _experts(layer, path, owner)
            return
        found = mlp_products(layer, path)
        if found is not None:
            activation_fn = activation_of(owner, found[0].gated)
            yield {"mlp": path, "up": found[0], "down": found[1], "activation_fn": activation_fn}
            return
    raise Unmatched(f"no MLP among {_names(layer)}")


def mlp_products(layer: nn.Module, path: str) -> tuple[ProductPlan, ProductPlan] | None:
    """The two products of an MLP, or None where there is none."""
    down = find(layer, recipes.DOWN, path)
    if down is None:
        return None
    gate, up = find(layer, recipes.GATE, path), find(layer, recipes.UP, path)
    joined, plain = find(layer, recipes.GATE_UP, path), find(layer, recipes.PLAIN_UP, path)
    paths: tuple[str, ...]
    if gate is not None and up is not None:
        paths, gated = (gate, up), True
    elif joined is not None:
        paths, gated = (joined,), True
    elif plain is not None:
        paths, gated = (plain,), False
    else:
        return None
    transposed = [linear(layer, name)[1] for name in (*paths, down)]
    return ProductPlan(paths, transposed[0], gated), ProductPlan((down,), transposed[-1])


def activation_of(owner: nn.Module, gated: bool) -> str:
    """The name of the activation among `owner`'s attributes, which a product applies itself."""
    suffix = "_mul" if gated else ""
    for attribute in recipes.ACTIVATION:
        function: Callable[..., Any] | None = getattr(owner, attribute, None)
        if not callable(function):
            continue
        found = activation_of_callable(function)
        name = None if found is None else found.epilogue
        if name is None or name + suffix not in ACTIVATIONS:
            known = [key.removesuffix("_mul") for key in ACTIVATIONS if is_gated(key) is gated]
            raise Unmatched(f"its activation {attribute} is none of {', '.join(known)}")
        return name
    raise Unmatched(f"no activation in {type(owner).__name__}")


def _experts(layer: nn.Module, path: str, owner: nn.Module) -> Iterator[dict[str, Any]]:
    router = find(layer, recipes.ROUTER, path)
    experts_path = find(layer, recipes.EXPERTS, path)
    assert experts_path is not None
    if router is None:
        raise Unmatched(f"no router in {path}")
    extra = {name for name, _ in owner.named_children()} - {
        router.rpartition(".")[2],
        experts_path.rpartition(".")[2],
    }
    if extra:
        raise Unmatched(f"{path} has {', '.join(sorted(extra))} beside its experts")
    route, experts = layer.get_submodule(router), layer.get_submodule(experts_path)
    owners = (owner, route)
    counts = [getattr(part, name, None) for part in owners for name in recipes.CHOSEN]
    chosen = next((count for count in counts if isinstance(count, int)), None)
    weight = route._parameters.get("weight")
    if chosen is None or weight is None or route._parameters.get("bias") is not None:
        raise Unmatched(f"{router} is no plain router")
    for normalized in (True, False):
        if isinstance(experts, nn.ModuleList):
            found = [mlp_products(layer, f"{experts_path}.{i}") for i in range(len(experts))]
            pairs = [pair for pair in found if pair is not None]
            if len(pairs) != len(found) or not all(pair[0].gated for pair in pairs):
                raise Unmatched(f"{experts_path} are no gated MLPs")
            activation_fn = activation_of(experts[0], True)
            ups, downs = zip(*pairs, strict=True)
            plan = ExpertsPlan(router, chosen, normalized, None, ups, downs)
        else:
            names = ("gate_up_proj", "down_proj")
            if set(experts._parameters) != set(names):
                raise Unmatched(f"{experts_path} has {', '.join(experts._parameters)}")
            activation_fn = activation_of(experts, True)
            stacked = (f"{experts_path}.{names[0]}", f"{experts_path}.{names[1]}")
            plan = ExpertsPlan(router, chosen, normalized, stacked)
        yield {"mlp": path, "experts": plan, "activation_fn": activation_fn}


def _block_orders(layer: nn.Module) -> Iterator[dict[str, Any]]:
    """Orders of the layer's norms: each of its norms has exactly one place."""
    norms = {}
    for name, _ in layer.named_children():
        norm = norm_of(layer, name)
        if norm is not None:
            norms[name] = norm
    found = False
    for block_order in recipes.BLOCK_ORDERS:
        roles = ("attention_norm", "mlp_norm", "after_attention_norm", "after_mlp_norm")
        taken = {role: getattr(block_order, role) for role in roles if getattr(block_order, role)}
        choices = [[name for name in names if name in norms] for names in taken.values()]
        for names in itertools.product(*choices):
            if len(set(names)) != len(names) or set(names) != set(norms):
                continue
            found = True
            placed = tuple((role, norms[name]) for role, name in zip(taken, names, strict=True))
            yield {
                "block_order": block_order.name,
                "norms": placed,
                "parallel": block_order.parallel,
                "norm_last": block_order.norm_last,
            }
    if not found:
        raise Unmatched(f"no recipe for the norms {', '.join(norms) or '(none)'}")
